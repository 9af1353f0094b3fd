"""megagen.tensor_core against the emulator's wgmma library, bit for bit."""

import native
import numpy as np
import pytest
import torch
from hw import streams
from hw.wgmma_cases import fp8_values
from test_wgmma import d_position, descriptor

from megagen import tensor_core
from megagen.contract import Contract
from megagen.emulator import cases
from megagen.planning import make_plan
from megagen.reference import moe_forward
from megagen.shape import MoEShape
from megagen.tensor_core import hopper_fp8_partials

KINDS = ("uniform", "bell", "equal", "mixed", "subnormal", "sparse", "positive", "pairs")
POSITIONS = np.array([[d_position(thread, i) for thread in range(128)] for i in range(128)])


def core_matrices(codes: np.ndarray) -> np.ndarray:
    """[rows, 32] bytes as shared memory holds them without swizzle: 8 x 16 at a time, along K first."""
    return codes.reshape(-1, 8, 2, 16).swapaxes(1, 2).ravel()


def wgmma_chain(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """float32 [64, n] of codes [64, K] and [n, K]: one instruction per 32 of K, the first with scale-d 0."""
    n = len(b)
    registers = np.zeros((n // 2, 128), np.uint32)
    for k in range(0, a.shape[1], 32):
        image = np.concatenate([core_matrices(x[:, k : k + 32]) for x in (a, b)])
        descriptors = descriptor(0, 128, 256, 0), descriptor(64 * 32, 128, 256, 0)
        registers = native.wgmma(n, "e4m3", "e4m3", image, *descriptors, registers, scale_d=k > 0)
    out = np.empty((64, n), np.uint32)
    out[POSITIONS[: n // 2, :, 0], POSITIONS[: n // 2, :, 1]] = registers
    return out.view(np.float32)


def partials(a: np.ndarray, b: np.ndarray, group: int = 128) -> list[np.ndarray]:
    operands = (torch.from_numpy(x).view(torch.float8_e4m3fn) for x in (a, b))
    return [partial.numpy() for partial in hopper_fp8_partials(*operands, group)]


def same_bits(actual: np.ndarray, expected: np.ndarray) -> bool:
    return actual.dtype == expected.dtype and np.array_equal(actual.view(np.uint32), expected.view(np.uint32))


def cancelled(codes: np.ndarray) -> np.ndarray:
    """Every second value the negative of its predecessor."""
    out = codes.copy()
    out[:, 1::2] = codes[:, ::2] ^ 0x80
    return out


@pytest.mark.parametrize("a_kind", KINDS)
@pytest.mark.parametrize("b_kind", KINDS)
def test_same_bits_as_wgmma(a_kind, b_kind):
    a, b = fp8_values(a_kind, "e4m3", 30, 64, 128), fp8_values(b_kind, "e4m3", 40, 96, 128)
    (actual,) = partials(a, b)
    assert same_bits(actual, wgmma_chain(a, b))


def test_every_pair_of_codes():
    """One product of each pair of numbers at k = 0, then one that lies far below or above it."""
    codes = np.arange(256, dtype=np.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]
    codes = np.append(codes, [0, 0])
    for other in (0x01, 0x24, 0x7E, 0x81):
        a, b = np.zeros((2, 256, 128), np.uint8)
        a[:, 0] = b[:, 0] = codes
        a[:, 7], b[:, 7] = other, 0x38
        a[:, 39], b[:, 39] = 0x38, other ^ 0x80
        (actual,) = partials(a, b)
        expected = np.concatenate([wgmma_chain(rows, b) for rows in a.reshape(4, 64, 128)])
        assert same_bits(actual, expected)


def test_cancellation_and_steps_without_products():
    a = fp8_values("uniform", "e4m3", 50, 64, 128)
    b = cancelled(fp8_values("pairs", "e4m3", 51, 256, 128))
    a[::2, 32:64] = 0
    b[::3, 64:96] = 0x80
    a[5] = b[7] = 0
    a[9:12, 1::2] = a[9:12, ::2]
    (actual,) = partials(a, b)
    assert same_bits(actual, wgmma_chain(a, b))
    assert (actual[9:12] == 0).any() and (actual[9:12, b[:, 64] != 0x80] == 0).any()


@pytest.mark.parametrize("chunk_bytes", [20_000, 500_000, 1 << 30])
@pytest.mark.parametrize("group", [64, 128])
def test_groups_in_order_whatever_the_chunks(monkeypatch, chunk_bytes, group):
    monkeypatch.setitem(tensor_core.CHUNK_BYTES, "cpu", chunk_bytes)
    a, b = fp8_values("bell", "e4m3", 60, 64, 512), fp8_values("uniform", "e4m3", 61, 24, 512)
    actual = partials(a, b, group)
    assert len(actual) == 512 // group
    for first, partial in zip(range(0, 512, group), actual):
        columns = slice(first, first + group)
        assert same_bits(partial, wgmma_chain(a[:, columns], b[:, columns]))


def test_nan_stays_in_its_row_or_column():
    a, b = fp8_values("bell", "e4m3", 70, 64, 128), fp8_values("bell", "e4m3", 71, 16, 128)
    (clean,) = partials(a, b)
    a[3, 100], b[2, 0] = 0x7F, 0xFF
    (actual,) = partials(a, b)
    affected = np.zeros(actual.shape, bool)
    affected[3], affected[:, 2] = True, True
    assert np.isnan(actual[affected]).all() and same_bits(actual[~affected], clean[~affected])


def test_empty_operands():
    a = np.zeros((3, 256), np.uint8)
    assert [p.shape for p in partials(a[:0], a)] == [(0, 3)] * 2
    assert [p.shape for p in partials(a, a[:0])] == [(3, 0)] * 2


@pytest.mark.parametrize("tokens", [1, 19])
def test_a_layer_has_the_bits_of_its_reference(tokens):
    """The emulator, like the reference, rounds ex2 and rcp correctly."""
    contract = Contract(MoEShape.preset("micro"), ranks=1, max_tokens=tokens)
    case = cases.Case((make_plan(contract, tokens=tokens, sms=2),), sms=(2,), tokens=(tokens,))
    (result,) = cases.run(case, cases.prepare(case, races=False, proxy="off"))
    (inputs,) = case.inputs()
    expected = moe_forward(*inputs, cases.expert_weights(case.shape), accumulation="hopper")
    assert torch.equal(result.outputs[0].view(torch.int16), expected.view(torch.int16))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_same_bits_on_a_gpu():
    codes = streams.uint8(80, 80 * 1024).reshape(80, 1024)
    operands = torch.from_numpy(np.where(codes & 0x7F == 0x7F, 0, codes)).view(torch.float8_e4m3fn).split(40)
    on_gpu = hopper_fp8_partials(*(operand.cuda() for operand in operands))
    for actual, expected in zip(on_gpu, hopper_fp8_partials(*operands)):
        assert torch.equal(actual.cpu(), expected)
