"""``megagen plan``: everything of a plan is explained, on every architecture."""

import json

import pytest
from typer.testing import CliRunner

from megagen.cli import app
from megagen.planning import KernelPlan
from megagen.planning.cost import predict
from megagen.planning.planner import FORMAT_OF_ARCH

LAYER = ["plan", "--model", "flash8", "--ranks", "2", "--max-tokens", "1024"]


def plan(arch: str, *options: str) -> str:
    arguments = [*LAYER, "--arch", arch, "--format", FORMAT_OF_ARCH[arch], *options]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "260"})
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("arch", FORMAT_OF_ARCH)
def test_text_explains_decisions_registers_memory_and_time(arch):
    output = plan(arch, "--tokens", "64")
    (made,) = json.loads(plan(arch, "--tokens", "64", "--json"))["plans"]
    for choice in made["choices"]:
        assert choice["name"] in output and choice["reason"] in output
    for role in made["roles"]:
        assert role["name"] in output and role["job"] in output
    for region in made["shared_memory"]:
        assert region["name"] in output
    assert f"shared memory: {made['shared_memory_bytes']:,} of 232,448 bytes" in output
    assert f"{made['pool_rows']:,} rows" in output
    assert "64,512" in output, "the registers that the roles have"
    for part in ("predicted time", "HBM", "tensor cores", "NVLink", "combine"):
        assert part in output
    assert ("tensor memory" in output) == (arch != "sm90")


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_the_map_is_drawn_to_scale(arch):
    output = plan(arch, "--tokens", "64")
    (made,) = json.loads(plan(arch, "--tokens", "64", "--json"))["plans"]
    rows = [line for line in output.splitlines() if "█" in line or "·" in line]
    for region in made["shared_memory"]:
        (row,) = (line for line in rows if f" {region['name']} " in line)
        assert row.count("█") + row.count("·") == 32
        assert row.count("█") == pytest.approx(region["size"] / 232_448 * 32, abs=1.5)


def test_json_holds_plans_that_can_be_read_and_their_predictions():
    record = json.loads(plan("sm100", "--json"))
    assert record["schema_version"] == 1
    assert len(record["plans"]) == len(record["predictions"]) == len(record["max_tokens"]) > 1
    for values, prediction in zip(record["plans"], record["predictions"]):
        read = KernelPlan.from_json(json.dumps(values))
        assert prediction == json.loads(json.dumps(predict(read).to_dict()))
        assert values["tensor_memory_columns"] in (64, 128, 256, 512)


def test_predictions_are_for_the_sms_asked_for():
    few, all_sms = (
        json.loads(plan("sm90", "--json", *sms))["predictions"][-1] for sms in (["--sms", "60"], [])
    )
    assert (few["sms"], all_sms["sms"]) == (60, 132)
    assert few["seconds"] > all_sms["seconds"]
