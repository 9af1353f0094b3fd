"""Measured choices: kept, found again, and never in the way."""

import json

import pytest

from megagen import CacheError, MoEShape, tuning
from megagen.contract import Contract
from megagen.planning import make_plan, plan_set, sm100
from megagen.planning.planner import ladder_of

TINY = MoEShape.preset("tiny")
CONTRACT = Contract(TINY, 2, 512)
WHERE = ("Some GPU", CONTRACT, "sm90", 132)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGAGEN_CACHE_DIR", str(tmp_path / "cache"))


def tuned(contract=CONTRACT, sms=132):
    return tuning.tuned_plan_set(contract, "sm90", sms, gpu="Some GPU")


def test_nothing_measured_is_none():
    assert tuned() is None


def test_measured_choices_replace_the_rules_in_their_buckets():
    tuning.store(*WHERE, {64: {"choice": {"block_m": 128}, "us": 1.0}, 8: {"choice": {}, "us": 1.0}})
    plans = tuned()
    assert plans.select(64).block_m == plans.select(33).block_m == 128
    rules = plan_set(CONTRACT, "sm90", sms=132)
    for tokens in (1, 8, 32, 65, 512):
        assert plans.select(tokens).hash == rules.select(tokens).hash
    assert plans.limits[-1] == 512
    assert len({plan.hash for plan in plans.plans}) > 1


def test_later_results_join_earlier_ones():
    tuning.store(*WHERE, {64: {"choice": {"block_m": 128}, "us": 1.0}})
    tuning.store(
        *WHERE, {64: {"choice": {"block_m": 16}, "us": 1.0}, 128: {"choice": {"block_m": 32}, "us": 1.0}}
    )
    assert tuning.load(*WHERE) == {64: {"block_m": 16}, 128: {"block_m": 32}}


def test_another_capacity_uses_them_and_another_machine_does_not():
    tuning.store(*WHERE, {64: {"choice": {"block_m": 128}, "us": 1.0}})
    smaller = tuned(Contract(TINY, 2, 50))
    assert smaller.select(50).block_m == 128
    assert smaller.select(50).contract.max_tokens == 50
    assert tuned(sms=66) is None
    assert tuned(Contract(TINY, 1, 512)) is None
    assert tuning.tuned_plan_set(CONTRACT, "sm90", 132, gpu="Other GPU") is None


@pytest.mark.parametrize("choice", [{"block_m": 7}, {"no_such_argument": 1}])
def test_a_choice_that_is_none_any_more_falls_back_to_the_rules(choice):
    tuning.store(*WHERE, {64: {"choice": choice, "us": 1.0}})
    assert tuned().select(64).hash == make_plan(CONTRACT, "sm90", 64, sms=132).hash


@pytest.mark.parametrize("contents", ["", "{", "[]", '{"schema_version": 99, "entries": {}}'])
def test_a_file_that_can_not_be_used_is_none(contents):
    tuning.tuned_file().parent.mkdir(parents=True)
    tuning.tuned_file().write_text(contents)
    assert tuned() is None
    tuning.store(*WHERE, {64: {"choice": {"block_m": 16}, "us": 1.0}})
    assert json.loads(tuning.tuned_file().read_text())["schema_version"] == tuning.SCHEMA_VERSION


def test_a_folder_that_can_not_be_written_is_an_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEGAGEN_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(CacheError, match="MEGAGEN_CACHE_DIR"):
        tuning.store(*WHERE, {64: {"choice": {}, "us": 1.0}})


def test_candidates_are_distinct_and_start_with_the_rules():
    choices = tuning.candidate_choices(CONTRACT, "sm90", 64, 132)
    plans = [make_plan(CONTRACT, "sm90", 64, sms=132, **choice) for choice in choices]
    assert choices[0] == {}
    assert len({plan.hash for plan in plans}) == len(plans) >= 4
    assert {plan.block_m for plan in plans} == set(ladder_of("sm90"))


def test_candidates_are_tiles_of_the_architecture():
    contract = Contract(MoEShape.preset("flash8", 2), 2, 1024, "mxfp8_mxfp4")
    choices = tuning.candidate_choices(contract, "sm100", 1024, 148)
    tiles = [choice["block_m"] for choice in choices if choice]
    own = make_plan(contract, "sm100", 1024, sms=148).block_m
    assert choices[0] == {} and sorted([own, *tiles]) == sorted(sm100.LADDER)
