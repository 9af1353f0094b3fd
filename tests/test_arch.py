"""Architectures: the numbers that plans rest on."""

import pytest

from megagen.arch import ARCHS, Arch
from megagen.errors import DeviceError, PlanError


@pytest.mark.parametrize("name", ARCHS)
def test_get_returns_the_named_arch(name):
    arch = Arch.get(name)
    assert arch.name == name
    assert Arch.of_capability(*arch.compute_capability) is arch
    assert arch.compile_target == f"sm_{arch.compute_capability[0]}{arch.compute_capability[1]}a"


def test_unknown_names_and_gpus_list_the_known():
    with pytest.raises(PlanError, match=r"sm80.*sm90, sm100, sm103"):
        Arch.get("sm80")
    with pytest.raises(DeviceError, match=r"8\.0.*9\.0 \(H200\)"):
        Arch.of_capability(8, 0)


@pytest.mark.parametrize(("threads", "registers"), [(384, 168), (512, 128), (1024, 64), (128, 255)])
def test_launch_registers(threads, registers):
    assert Arch.get("sm90").launch_registers(threads) == registers


@pytest.mark.parametrize("threads", [0, 100, 1056])
def test_launch_registers_refuses_what_no_block_has(threads):
    with pytest.raises(PlanError, match=rf"threads={threads}"):
        Arch.get("sm90").launch_registers(threads)


@pytest.mark.parametrize("name", ARCHS)
def test_limits_fit_together(name):
    arch = Arch.get(name)
    assert all(arch.launch_registers(t) * t <= arch.registers for t in range(32, 1025, 32))
    assert arch.min_setmaxnreg % arch.register_step == arch.max_setmaxnreg % arch.register_step == 0
    assert list(arch.cluster_sizes) == sorted(arch.cluster_sizes)
    assert all(sms <= arch.sms and sms % size == 0 for size, sms in arch.cluster_sms)


def test_only_measured_rates_say_so():
    assert {name: arch.rates.source for name, arch in ARCHS.items()} == {
        "sm90": "measured",
        "sm100": "assumed",
        "sm103": "assumed",
    }


def test_mma_forms():
    (wgmma,) = Arch.get("sm90").mma
    assert Arch.get("sm90").warpgroup_m == 64
    assert [n for n in range(0, 300) if wgmma.allows_n(n)] == list(range(8, 257, 8))
    pair = Arch.get("sm100").mma[1]
    assert pair.ctas == 2
    assert not pair.allows_n(8) and pair.allows_n(16)
