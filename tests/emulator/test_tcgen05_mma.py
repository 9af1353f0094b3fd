"""tcgen05.mma: kinds, types, layouts, scale factors and accumulation. Expected values come from the PTX ISA's layouts
and number formats; that the sum is rounded once is the emulator's model."""

# ruff: noqa: E501 (embedded CUDA C++ and PTX)

import numpy as np
import pytest
from tcgen05_kernel import run
from tcgen05_operands import (
    NARROW,
    SWIZZLE_SPAN,
    decode,
    idesc,
    k_major,
    mn_major,
    random_codes,
    rounded_sum,
    row_bytes,
    scale_image,
    scaled_idesc,
    swizzled,
    ue8m0,
)

from megagen.errors import EmulatorError, MemoryFault, UnsupportedInstruction

MMA = r"""{{ asm volatile("{{\n.reg .pred p;\nsetp.ne.u32 p, %4, 0;\n"
    "tcgen05.mma.{form} [%0], %1, %2, %3, p;\n}}" :: "r"({d}), "l"({a}), "l"({b}), "r"({idesc}), "r"({accumulate}) : "memory"); }}"""
SCALED = r"""{{ asm volatile("{{\n.reg .pred p;\nsetp.ne.u32 p, %4, 0;\n"
    "tcgen05.mma.{form} [%0], %1, %2, %3, [%5], [%6], p;\n}}" :: "r"({d}), "l"({a}), "l"({b}), "r"({idesc}), "r"({accumulate}), "r"({sfa}), "r"({sfb}) : "memory"); }}"""


def mma(form: str, a: str, b: str, idesc: int, d: str = "tm", accumulate: int = 0) -> str:
    return MMA.format(form=form, a=a, b=b, idesc=f"{idesc}u", d=d, accumulate=accumulate)


def scaled(form: str, a: str, b: str, idesc: int, sfa: str, sfb: str, d: str = "tm", accumulate: int = 0) -> str:
    return SCALED.format(form=form, a=a, b=b, idesc=f"{idesc}u", sfa=sfa, sfb=sfb, d=d, accumulate=accumulate)


def copy_scales(group: int, to: str, offset: int, blocks: int = 1) -> str:
    """One tcgen05.cp per 128 rows of scale factors at ``offset`` of the image."""
    return "".join(
        f'ASM("tcgen05.cp.cta_group::{group}.32x128b.warpx4 [%0], %1;" :: "r"({to} + {4 * k}), "l"(desc(s + {offset + 512 * k}, 0, 128, 0)));'
        for k in range(blocks)
    )


def image_of(*parts: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Parts at multiples of 1024 bytes, and where."""
    padded = [np.pad(p, (0, -len(p) % 1024)) for p in parts]
    return np.concatenate(padded), [0, *np.cumsum([len(p) for p in padded])[:-1].tolist()]


def operands(fmt_a: str, fmt_b: str, m: int, n: int, k: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    return random_codes(rng, fmt_a, (m, k)), random_codes(rng, fmt_b, (n, k))


@pytest.mark.parametrize(("fmt_a", "fmt_b"), [("e4m3", "e2m1"), ("e2m1", "e5m2"), ("e2m3", "e3m2"), ("e3m2", "e4m3"), ("e2m1", "e2m1")])
@pytest.mark.parametrize(("a_id", "b_id"), [(0, 0), (1, 3), (2, 1)])
def test_mxf8f6f4(fmt_a, fmt_b, a_id, b_id):
    m, n, k = 128, 40, 32
    a, b = operands(fmt_a, fmt_b, m, n, k)
    rng = np.random.default_rng(1)
    sa, sb = rng.integers(120, 134, (m, 4)), rng.integers(120, 134, (n, 4))
    image, (at_a, at_b, at_sa, at_sb) = image_of(
        k_major(row_bytes(a, fmt_a), 0, 128, 256), k_major(row_bytes(b, fmt_b), 0, 128, 256),
        scale_image(sa), scale_image(sb),
    )  # fmt: skip
    body = copy_scales(1, "tm + 64", at_sa) + copy_scales(1, "tm + 68", at_sb)
    body += scaled(
        "cta_group::1.kind::mxf8f6f4.block_scale.scale_vec::1X", f"desc(s + {at_a}, 128, 256, 0)", f"desc(s + {at_b}, 128, 256, 0)",
        scaled_idesc(n, m, NARROW[fmt_a], NARROW[fmt_b], a_id, b_id), "tm + 64", "tm + 68",
    )  # fmt: skip
    out = run(body, image, columns=128)
    expected = rounded_sum(
        decode(a, fmt_a) * ue8m0(sa[:, a_id, None]), decode(b, fmt_b) * ue8m0(sb[:, b_id, None])
    )
    assert not out.undefined[:, :n].any()
    assert np.array_equal(out.words[:, :n].view(np.float32), expected)
    assert (out.undefined[:, n:64] == 0xFFFFFFFF).all()


def test_mxf8f6f4_by_two_ctas():
    """Each CTA has its half of A's rows and of B's columns, scale factors of its rows and of all columns."""
    m, n, k = 256, 64, 32
    a, b = operands("e2m1", "e4m3", m, n, k)
    rng = np.random.default_rng(2)
    sa, sb = rng.integers(120, 134, (m, 4)), rng.integers(120, 134, (n, 4))
    images = []
    for cta in range(2):
        rows, columns = slice(128 * cta, 128 * cta + 128), slice(n // 2 * cta, n // 2 * (cta + 1))
        image, (at_a, at_b, at_sa, at_sb) = image_of(
            k_major(row_bytes(a[rows], "e2m1"), 2, 0, 1024), k_major(row_bytes(b[columns], "e4m3"), 2, 0, 1024),
            scale_image(sa[rows]), scale_image(sb),
        )  # fmt: skip
        images.append(image)
    body = copy_scales(2, "tm + 64", at_sa) + copy_scales(2, "tm + 68", at_sb)
    body += scaled(
        "cta_group::2.kind::mxf8f6f4.block_scale", f"desc(s + {at_a}, 0, 1024, 2)", f"desc(s + {at_b}, 0, 1024, 2)",
        scaled_idesc(n, m, NARROW["e2m1"], NARROW["e4m3"], 3, 2), "tm + 64", "tm + 68",
    )  # fmt: skip
    out = run(body, np.stack(images), columns=128, pair=True)
    expected = rounded_sum(decode(a, "e2m1") * ue8m0(sa[:, 3:]), decode(b, "e4m3") * ue8m0(sb[:, 2:3]))
    assert not out.undefined[:, :, :n].any()
    assert np.array_equal(out.words[:, :, :n].reshape(m, n).view(np.float32), expected)
