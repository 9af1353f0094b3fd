"""The command line: what each command prints, and its exit code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from megagen import __version__, errors
from megagen.cli import EXIT_CODES, app, exit_code
from megagen.commands.output import emit
from megagen.planning import KernelPlan
from megagen.shape import PRESETS

ROOT = Path(__file__).parents[1]
LAYER = ["--model", "tiny", "--max-tokens", "64", "--tokens", "64"]
CLEAN = """
extern "C" __global__ void __launch_bounds__(32) clean(int* p) { p[threadIdx.x] = 1; }
"""
NOTED = 'extern "C" __global__ void noted(int* p) { asm volatile("setmaxnreg.inc.sync.aligned.u32 232;"); }\n'


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGAGEN_CACHE_DIR", str(tmp_path / "cache"))


def run(*arguments, code=0):
    """Run a command in this process; its result must have the exit code."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
    return result


def run_json(*arguments, code=0):
    record = json.loads(run(*arguments, "--json", code=code).stdout)
    assert record["schema_version"] == 1
    return record


def test_what_is_not_finite_is_null_in_json(capsys):
    """A row of a result that is nowhere near right can have an infinite error."""
    emit(True, {"rows": [{"worst_row": float("inf"), "us": (1.5, float("nan"))}]})
    printed = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert printed["rows"] == [{"worst_row": None, "us": [1.5, None]}]


def test_help_names_every_command():
    output = run("--help").stdout
    for command in ("plan", "generate", "inspect", "doctor", "cache"):
        assert command in output


def test_module_and_version():
    command = [sys.executable, "-m", "megagen", "--version"]
    printed = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True, timeout=60).stdout
    assert printed.strip() == __version__


@pytest.mark.parametrize(
    "error, code",
    [
        (errors.CompileError, 1),
        (errors.DataRace, 1),
        (errors.InputError, 2),
        (errors.ShapeError, 2),
        (errors.CacheError, 2),
        (errors.DeviceError, 3),
        (errors.NVLinkDomainError, 3),
        (errors.MegaMoETimeout, 4),
        (errors.Deadlock, 4),
    ],
)
def test_exit_codes(error, code):
    assert exit_code(error("")) == code


def test_every_error_has_an_exit_code():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    for kind in kinds:
        if kind is not errors.MegagenError:
            assert any(base in EXIT_CODES for base in kind.__mro__), kind


def test_plan_as_text_gives_reasons_and_the_shared_memory_map():
    output = run("plan", *LAYER).stdout
    for expected in ("block_m", "reason", "shared memory", "weight_stages", "math"):
        assert expected in output


def test_plan_as_json():
    record = run_json("plan", "--model", "tiny", "--max-tokens", "4096")
    assert record["max_tokens"][-1] == 4096
    assert len(record["plans"]) == len(record["max_tokens"]) > 1
    plan = KernelPlan.from_json(json.dumps(record["plans"][0]))
    assert plan.contract.hash == record["contract_hash"]


def test_tokens_choose_the_plans():
    layer = ["plan", "--model", "tiny", "--ranks", 2]
    assert run_json(*layer, "--tokens", "64")["max_tokens"] == [4096]
    assert run_json(*layer, "--tokens", "2048,1")["max_tokens"] == [1, 4096]
    assert run_json(*layer, "--tokens", "1:4096")["max_tokens"] == run_json(*layer)["max_tokens"]


def test_shape_spelled_out_is_the_preset():
    preset = PRESETS["tiny"]
    sizes = ["--hidden", preset.hidden, "--intermediate", preset.intermediate]
    spelled = run_json("plan", *sizes, "--experts", preset.experts, "--top-k", preset.top_k, "--tokens", 8)
    assert spelled["contract_hash"] == run_json("plan", "--model", "tiny", "--tokens", 8)["contract_hash"]


def test_shape_of_a_config_file(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "model_type": "qwen3_moe",
                "hidden_size": 2048,
                "moe_intermediate_size": 768,
                "num_experts": 128,
                "num_experts_per_tok": 8,
            }
        )
    )
    read = run_json("plan", "--model", config, "--tokens", 8)
    assert (
        read["contract_hash"] == run_json("plan", "--model", "qwen3-30b-a3b", "--tokens", 8)["contract_hash"]
    )


@pytest.mark.parametrize(
    "arguments, named",
    [
        ([], "--model"),
        (["--hidden", 512], "--intermediate, --experts, --top-k"),
        (["--model", "tiny", "--hidden", 512], "already sets hidden"),
        (["--model", "nonesuch"], "nonesuch"),
        (["--model", "gpt-oss-120b"], "hidden=2880"),
        (["--model", "tiny", "--ranks", 3], "ranks=3"),
        (["--model", "tiny", "--tokens", "many"], "many"),
        (["--model", "tiny", "--tokens", "4097"], "tokens=4097 is above max_tokens=4096"),
        (["--model", "tiny", "--arch", "sm80"], "sm80"),
        (["--model", "tiny", "--format", "int8"], "int8"),
        (["--plan", "nonesuch.json"], "nonesuch.json"),
        (["--model", "tiny", "--plan", "x.json"], "--model=tiny"),
    ],
)
def test_bad_layers_exit_2_and_say_why(arguments, named):
    result = run("plan", *arguments, code=2)
    assert named in result.stderr
    assert result.stdout == ""


def test_unknown_option_exits_2():
    run("plan", "--nonesuch", code=2)


def test_generate_inspect_check(tmp_path):
    out = tmp_path / "kernels"
    record = run_json("generate", *LAYER, "--out", out, "--compile")
    helper, kernel = sorted(record["kernels"], key=lambda one: one["kernel"].startswith("h5"))
    assert helper["kernel"].startswith("helpers/quantize-")
    assert kernel["spill_stores"] == kernel["stack"] == 0 < kernel["registers"]

    stem = out / kernel["kernel"]
    assert run_json("inspect", out)["kind"] == "folder"
    assert run_json("inspect", f"{stem}.plan.json")["plan"]["name"] == kernel["kernel"]
    cubin = run_json("inspect", f"{stem}.cubin")
    assert cubin["resources"]["registers"] == kernel["registers"]
    assert cubin["plan"]["name"] == run_json("inspect", f"{stem}.cu")["plan"]["name"] == kernel["kernel"]
    text = Path(f"{stem}.cu").read_text()
    assert run("inspect", f"{stem}.cu", "--source").stdout == text
    for suffix in (".cu", ".cubin", ".plan.json"):
        assert run_json("inspect", f"{stem}{suffix}", "--source")["source"] == text
    assert kernel["kernel"] in run("inspect", out).stdout

    assert run_json("generate", "--out", out, "--check")["stale"] == []
    assert run_json("generate", *LAYER, "--out", out, "--check")["stale"] == []
    source = Path(f"{stem}.cu")
    source.write_text(source.read_text() + "// edited\n")
    stale = run("generate", "--out", out, "--check", code=1)
    assert source.name in stale.stderr


def test_generate_from_a_plan_file(tmp_path):
    run("generate", *LAYER, "--out", tmp_path / "first")
    (plan,) = (tmp_path / "first").glob("*.plan.json")
    record = run_json("generate", "--plan", plan, "--out", tmp_path / "second")
    assert plan.name.removesuffix(".plan.json") in {one["kernel"] for one in record["kernels"]}
    run("generate", "--out", tmp_path / "second", "--check")


def test_check_of_no_folder_exits_2(tmp_path):
    assert "manifest" in run("generate", "--out", tmp_path, "--check", code=2).stderr


def test_inspect_compiles_for_what_the_plan_beside_says():
    kernel = next((ROOT / "generated").glob("*sm100*.cu"))
    assert run_json("inspect", kernel)["resources"]["arch"] == "sm_100a"


def test_inspect_a_source(tmp_path):
    path = tmp_path / "clean.cu"
    path.write_text(CLEAN)
    record = run_json("inspect", path)
    assert record["kind"] == "source"
    assert record["resources"]["entry"] == "clean"
    assert run_json("inspect", path, "--arch", "sm100")["resources"]["arch"] == "sm_100a"


def test_inspect_exits_1_on_what_must_not_be(tmp_path):
    path = tmp_path / "noted.cu"
    path.write_text(NOTED)
    result = run("inspect", path, "--json", code=1)
    assert "C7508" in result.stderr
    assert json.loads(result.stdout)["resources"]["entry"] == "noted"
    path.write_text("no C++")
    assert "CompileError" in run("inspect", path, code=1).stderr


def test_inspect_of_nothing_exits_2(tmp_path):
    assert "nonesuch" in run("inspect", "nonesuch", code=2).stderr
    other = tmp_path / "notes.txt"
    other.touch()
    assert ".cubin" in run("inspect", other, code=2).stderr


def test_cache_commands(tmp_path):
    from megagen.cache import default_cache

    assert run_json("cache", "list")["kernels"] == []
    default_cache().load_or_compile(CLEAN, "sm_90a", name="clean.cu")
    (kernel,) = run_json("cache", "list")["kernels"]
    assert kernel["name"] == "clean.cu"
    assert kernel["key"][:12] in run("cache", "list").stdout
    assert run_json("inspect", kernel["key"][:8])["resources"]["entry"] == "clean"
    assert run_json("inspect", kernel["key"][:8], "--source")["source"] == CLEAN
    assert run_json("cache", "verify")["damaged"] == {}

    (path,) = (tmp_path / "cache").glob("*.kernel")
    path.write_bytes(path.read_bytes()[:-1])
    result = run("cache", "verify", code=1)
    assert path.name in result.stderr
    assert "damaged" in run("inspect", kernel["key"][:8], code=2).stderr
    assert run_json("cache", "clear")["removed"] == 1
    assert run_json("cache", "list")["kernels"] == []


def test_doctor_tells_what_is_there_and_what_that_allows():
    result = CliRunner().invoke(app, ["doctor", "--json"])
    record = json.loads(result.stdout)
    parts = {finding["part"].split()[0] for finding in record["findings"]}
    assert {"driver", "GPU", "NVLink", "NVRTC", "torch", "ninja", "nvdisasm", "cache"} == parts
    assert record["can"]["compile kernels"] is True
    assert result.exit_code == (0 if record["can"]["run kernels"] else 3)


def test_doctor_finds_an_unwritable_cache(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MEGAGEN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    record = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    (cache,) = [finding for finding in record["findings"] if finding["part"] == "cache"]
    assert cache["state"] == "unusable" and "MEGAGEN_CACHE_DIR" in cache["allows"]
    assert record["can"]["compile kernels"] is False


def test_planning_and_generating_import_neither_torch_nor_nvrtc(tmp_path):
    code = (
        "import sys; sys.modules['torch'] = sys.modules['cuda.bindings.nvrtc'] = None; "
        "from megagen.cli import app; "
        f"app(['generate', '--model', 'tiny', '--tokens', '8', '--out', {str(tmp_path / 'out')!r}])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT, env=os.environ
    )
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "out" / "manifest.json").is_file()


@pytest.mark.parametrize("nvlink, ranks", [(1, True), (0, False)])
def test_doctor_on_two_gpus(monkeypatch, nvlink, ranks):
    """With the answers of a driver that has two H200s."""
    from megagen.commands import doctor

    def answer(call, *arguments):
        if call == "cuDeviceGetAttribute":
            kind = arguments[0].name.removeprefix("CU_DEVICE_ATTRIBUTE_")
            return {
                "COMPUTE_CAPABILITY_MAJOR": 9,
                "COMPUTE_CAPABILITY_MINOR": 0,
                "MULTIPROCESSOR_COUNT": 132,
            }[kind]
        return {
            "cuInit": None,
            "cuDriverGetVersion": 13000,
            "cuDeviceGetCount": 2,
            "cuDeviceGet": arguments[0] if arguments else None,
            "cuDeviceGetName": b"NVIDIA H200\0".ljust(256),  # as cuda-python gives it
            "cuDeviceTotalMem": 140 << 30,
            "cuDeviceGetP2PAttribute": nvlink,
        }[call]

    monkeypatch.setattr(doctor, "_cuda", answer)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    record = run_json("doctor")
    found = {finding["part"]: finding for finding in record["findings"]}
    assert found["GPU 1"]["found"] == "NVIDIA H200, compute capability 9.0, 132 SMs, 140 GiB"
    assert found["GPU 1"]["allows"] == "runs kernels generated with --arch sm90"
    assert found["driver"]["found"] == "CUDA 13.0"
    assert record["can"]["run kernels"] is True
    assert record["can"]["run several ranks"] is ranks

    monkeypatch.setattr(torch.version, "cuda", None)
    record = run_json("doctor", code=3)
    assert record["can"]["run kernels"] is False
    assert "install a CUDA build" in str(record["findings"])


def test_doctor_counts_only_gpus_that_kernels_exist_for(monkeypatch):
    """NVLink is asked for between GPUs 0 and 2, where GPU 1 is too old."""
    from megagen.commands import doctor

    asked = []
    monkeypatch.setattr(doctor, "_cuda", lambda call, *arguments: asked.append(arguments[1:]) or 1)
    finding = doctor._nvlink([0, 2])
    assert finding.state == "ok" and "all 2 GPUs" in finding.found
    assert asked == [(0, 2), (2, 0)]


def test_doctor_refuses_an_old_driver(monkeypatch):
    from megagen.commands import doctor

    monkeypatch.setattr(doctor, "_cuda", lambda call, *arguments: {"cuDriverGetVersion": 12080}.get(call, 0))
    record = run_json("doctor", code=3)
    (driver,) = [finding for finding in record["findings"] if finding["part"] == "driver"]
    assert driver["state"] == "unusable" and driver["found"] == "CUDA 12.8"
