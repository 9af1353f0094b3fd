"""Groups of real processes: what they report reaches the caller, and nothing that goes wrong hangs."""

import time

import pytest
from bench_fakes import end, fail, run_baseline, talk

from megagen import DeviceError, MegaMoETimeout
from megagen.bench.processes import run_ranks

pytestmark = pytest.mark.timeout(120)


def test_messages_of_rank_0_arrive_in_order():
    gathered, attempted, environment = run_ranks(talk, "argument", 2)
    assert gathered == {"kind": "gathered", "values": [(0, "argument"), (1, "argument")]}
    assert attempted["result"] == (None, "rank 1: ValueError: no")
    assert environment["nvls"] == "0"


def test_the_error_that_says_most_is_raised_as_its_class():
    with pytest.raises(MegaMoETimeout, match="rank 1 waited for rank 0"):
        list(run_ranks(fail, None, 2))


def test_a_process_that_dies_is_an_error():
    messages = run_ranks(end, "dies", 1)
    assert next(messages) == {"kind": "begun"}
    with pytest.raises(DeviceError, match="rank 0 died with exit code 7"):
        next(messages)


def test_silence_ends_the_processes():
    messages = run_ranks(end, "hangs", 1, silence_limit_s=30.0)
    assert next(messages) == {"kind": "begun"}
    start = time.monotonic()
    with pytest.raises(MegaMoETimeout, match="rank"):
        list(run_ranks(end, "hangs", 1, deadline=time.monotonic() + 0.5))
    assert time.monotonic() - start < 20
    messages.close()


def test_the_baseline_of_two_ranks_computes_the_layer():
    (message,) = run_ranks(run_baseline, 21, 2)
    assert max(message["values"]) < 0.08
