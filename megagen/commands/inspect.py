"""``megagen inspect``: what a source, a cubin, a plan, a folder or a cached kernel is made of."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from megagen import compiler
from megagen.aot import load_folder
from megagen.arch import Arch
from megagen.cache import CacheEntry, default_cache
from megagen.commands.output import Json, emit, warn
from megagen.compiler import CompiledKernel
from megagen.errors import CacheError, InputError
from megagen.inspection.cubin import read_cubin
from megagen.inspection.plan_tables import plan_tables
from megagen.inspection.sass import find_nvdisasm, instruction_mix
from megagen.inspection.tables import instruction_mix_table, resources_table, rows_table
from megagen.planning import KernelPlan


@dataclasses.dataclass(frozen=True)
class Report:
    """What a command found: the JSON record, the same as text, and what must not be (exit code 1)."""

    record: dict[str, Any]
    text: tuple[RenderableType, ...]
    problems: tuple[str, ...] = ()


def inspect(
    what: Annotated[
        str,
        typer.Argument(
            help="A .cu, .cubin or .plan.json file, a folder of kernels, or (the head of) a cache key."
        ),
    ],
    arch: Annotated[
        str | None,
        typer.Option(help="What to compile a .cu file for; default: what the plan beside it says, or sm90."),
    ] = None,
    source: Annotated[
        bool, typer.Option("--source", help="Print the kernel's source and nothing else.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show resources, shared-memory map, spills and instruction mix; exit 1 on spills and ptxas notes."""
    if source:
        text = _source(what)
        emit(as_json, {"what": what, "source": text}, text.rstrip())
        return
    report = _report(what, arch)
    emit(as_json, {"what": what, **report.record}, *report.text)
    for problem in report.problems:
        warn(problem)
    if report.problems:
        raise typer.Exit(1)


def _source(what: str) -> str:
    path = Path(what)
    if path.name.endswith(".plan.json"):
        from megagen.render import render

        return render(KernelPlan.from_json(_read_text(path)))
    if path.suffix in (".cu", ".cubin"):
        return _read_text(path.with_suffix(".cu"))
    if path.exists():
        raise InputError(
            f"{what} has no source of its own; give a .cu, .cubin or .plan.json file, or a cache key"
        )
    return _cached(what).source


def _cached(key: str) -> CacheEntry:
    """The intact entry whose key starts with ``key``."""
    try:
        entry = default_cache().find(key)
    except CacheError as error:
        raise InputError(f"{key!r} is no file or folder, and as a cache {error}") from error
    if entry.damage:
        raise InputError(f"cached kernel {entry.key} is damaged: {entry.damage}")
    return entry


def _report(what: str, arch: str | None) -> Report:
    path = Path(what)
    if path.is_dir():
        return _report_folder(path)
    if path.is_file():
        if path.suffix == ".cubin":
            return _with_plan_beside(path, _report_cubin(path.read_bytes(), path.name))
        if path.suffix == ".json":
            return _report_plan(KernelPlan.from_json(_read_text(path)))
        if path.suffix == ".cu":
            return _with_plan_beside(path, _report_source(path, arch))
        raise InputError(f"{what} is no .cu, .cubin or .plan.json file; give one of these")
    entry = _cached(what)
    assert entry.kernel is not None
    report = _report_kernel(entry.kernel)
    return dataclasses.replace(report, record={"kind": "cached kernel", "key": entry.key, **report.record})


def _report_source(path: Path, arch: str | None) -> Report:
    plan = _plan_beside(path)
    target = Arch.get(arch or (plan.arch if plan else "sm90")).compile_target
    kernel = compiler.compile(_read_text(path), target, name=path.name, strict=False)
    report = _report_kernel(kernel)
    return dataclasses.replace(report, record={"kind": "source", **report.record}, problems=kernel.problems())


def _report_kernel(kernel: CompiledKernel) -> Report:
    mix_record, mix_text = _mix(kernel.cubin)
    resources = {**kernel.resources(), **_cubin_only(kernel.cubin)}
    record = {"resources": resources, **mix_record}
    return Report(record, (resources_table(kernel.name, resources), *mix_text))


def _report_cubin(cubin: bytes, name: str) -> Report:
    resources = dataclasses.asdict(read_cubin(cubin))
    mix_record, mix_text = _mix(cubin)
    problems = (f"{name} uses {resources['stack']} bytes of stack per thread",) if resources["stack"] else ()
    record = {"kind": "cubin", "resources": resources, **mix_record}
    return Report(record, (resources_table(name, resources), *mix_text), problems)


def _report_plan(plan: KernelPlan) -> Report:
    return Report({"kind": "plan", "plan": json.loads(plan.to_json())}, plan_tables(plan))


def _with_plan_beside(path: Path, report: Report) -> Report:
    """Add the plan beside a source or cubin, where there is one."""
    beside = _plan_beside(path)
    if beside is None:
        return report
    plan = _report_plan(beside)
    record = {**report.record, "plan": plan.record["plan"]}
    return Report(record, (*plan.text, *report.text), report.problems)


def _plan_beside(path: Path) -> KernelPlan | None:
    """The plan that `megagen generate` wrote next to a source or cubin."""
    beside = path.with_suffix(".plan.json")
    return KernelPlan.from_json(_read_text(beside)) if beside.is_file() else None


def _report_folder(path: Path) -> Report:
    folder = load_folder(path)
    rows = []
    for name in folder.names:
        resources = folder.manifest["kernels"][name] or {}
        shown = ("registers", "stack", "spill_stores", "spill_loads", "nvrtc")
        rows.append({"kernel": name, **{key: resources.get(key, "") for key in shown}})
    return Report({"kind": "folder", **folder.manifest}, (rows_table(str(path), rows),))


def _cubin_only(cubin: bytes) -> dict[str, Any]:
    """What the compiler's log does not tell."""
    read = read_cubin(cubin)
    return {"max_threads": read.max_threads, "code_bytes": read.code_bytes}


def _mix(cubin: bytes) -> tuple[dict[str, Any], tuple[RenderableType, ...]]:
    if find_nvdisasm() is None:
        return {"instructions": None}, ("no instruction mix: `pip install nvidia-cuda-nvdisasm`",)
    mix = instruction_mix(cubin)
    record = {
        "total": mix.total,
        "by_category": mix.by_category(),
        "opcodes": mix.opcodes,
        "spill_lines": mix.spill_lines,
    }
    return {"instructions": record}, (instruction_mix_table(mix),)


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} can't be read: {error}") from error
