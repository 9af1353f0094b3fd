"""Ahead-of-time builds: kernel sets -> a folder that ``megagen.aot`` loads.

Sources are compiled by ninja, in parallel; an interrupted or failed build goes on where it stopped.
``python -m megagen.build`` is one compile step of such a build.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from megagen import cache, compiler
from megagen.aot import MANIFEST, SCHEMA_VERSION, AotFolder, digest, load_folder
from megagen.arch import Arch
from megagen.companion import quantize_name
from megagen.contract import Contract
from megagen.errors import CacheError, CompileError, DeviceError, InputError, MegagenError
from megagen.files import write_atomically
from megagen.planning import PlanSet, make_plan, plan_set

HELPERS = "helpers/"
"""Folder of the companion kernels."""

_WORK = ".build"  # inside the folder: ninja's files, the lock, what the compile steps report
_LOCK_TIMEOUT_S = 600.0
_COMPILED_SUFFIXES = (".cubin", ".ptx")


@dataclass(frozen=True)
class KernelSet:
    """The kernels of one layer on one architecture: those of its plans, and their companions.

    Attributes:
        plans: by token bucket, all of one contract and architecture.
        planned_for: arguments of ``plan_layer`` besides contract and arch, with which ``stale_files`` plans
            again; None for plans that were forced.
    """

    plans: PlanSet
    planned_for: Mapping[str, Any] | None

    @property
    def contract(self) -> Contract:
        return self.plans.plans[0].contract

    @property
    def arch(self) -> str:
        return self.plans.plans[0].arch

    @cached_property
    def files(self) -> Mapping[str, str]:
        """Path of each text file, relative to the folder -> contents."""
        from megagen.render import render, render_quantize  # here, since a compile step doesn't need Jinja

        helper = quantize_name(self.contract, self.arch)
        texts = {f"{HELPERS}{helper}.cu": render_quantize(self.contract, self.arch)}
        for plan in self.plans.plans:
            texts[f"{plan.name}.cu"] = render(plan)
            texts[f"{plan.name}.plan.json"] = plan.to_json()
        return texts

    @property
    def names(self) -> list[str]:
        """Stems of the files of each kernel, companions included."""
        return [file.removesuffix(".cu") for file in self.files if file.endswith(".cu")]

    def manifest_entry(self) -> dict[str, Any]:
        return {
            "arch": self.arch,
            "contract": self.contract.to_dict(),
            "contract_hash": self.contract.hash,
            "weight_layout": self.plans.plans[0].weight_layout.name,
            "planned_for": self.planned_for,
            "max_tokens": list(self.plans.limits),
            "plans": [plan.name for plan in self.plans.plans],
            "helpers": [name for name in self.names if name.startswith(HELPERS)],
        }


def plan_layer(
    contract: Contract, arch: str, *, tokens: Sequence[int] | None = None, sms: int | None = None
) -> PlanSet:
    """Plans for all token buckets of a contract, or with ``tokens`` (counts per rank) one for each of these.

    The plan of a count serves the counts below it too, the last one all up to ``max_tokens``; neighbours that
    are the same plan are merged.

    Raises:
        InputError: a count above the contract's ``max_tokens``.
        PlanError: no plan exists.
    """
    if tokens is None:
        return plan_set(contract, arch, sms=sms)
    counts = sorted(set(tokens))
    if counts[-1] > contract.max_tokens:
        raise InputError(f"tokens={counts[-1]} is above max_tokens={contract.max_tokens}; raise --max-tokens")
    plans = [make_plan(contract, arch, count, sms=sms) for count in counts]
    # The last of equal neighbours stands for all of them.
    last = [i for i, plan in enumerate(plans) if i + 1 == len(plans) or plan.hash != plans[i + 1].hash]
    limits = [counts[i] for i in last[:-1]]
    return PlanSet((*limits, contract.max_tokens), tuple(plans[i] for i in last))


def generate(kernels: KernelSet, out: Path, *, compile: bool = False, jobs: int | None = None) -> AotFolder:
    """Write a kernel set into a folder, beside the sets of other contracts and architectures.

    Args:
        kernels: replaces what the folder holds of the same contract and architecture.
        out: created if it is missing.
        compile: also compile every source, with ``jobs`` processes (default: one per usable core).

    Raises:
        CompileError: a source doesn't compile; what does is kept for the next try, the manifest stays.
        CacheError: the folder can't be written, or another build of it takes too long.
        DeviceError: ninja or NVRTC is missing.
    """
    try:
        with _locked(out):
            for file, text in kernels.files.items():
                _write_if_changed(out / file, text)
            files, resources = list(kernels.files), dict.fromkeys(kernels.names)
            if compile:
                resources = _compile_all(out, kernels.names, Arch.get(kernels.arch).compile_target, jobs)
                files += [f"{name}{suffix}" for name in kernels.names for suffix in _COMPILED_SUFFIXES]
            _write_manifest(kernels, out, files, resources)
    except OSError as error:
        raise CacheError(f"out={str(out)!r} can't be written ({error}); choose a folder that can") from error
    return load_folder(out)


def stale_files(out: Path, kernels: KernelSet | None = None) -> list[str]:
    """Files of a folder that are not what would be generated now, one line each; empty if all is fresh.

    Args:
        out: the folder.
        kernels: the set to compare; without it, every set of the folder is planned and rendered again.

    Raises:
        CacheError: no such folder.
    """
    folder = load_folder(out)
    sets = [kernels] if kernels else [_plan_again(folder, entry) for entry in folder.manifest["sets"]]
    expected = {file: text for one in sets for file, text in one.files.items()}
    found = []
    for file, text in expected.items():
        if not (out / file).is_file():
            found.append(f"{file}: missing")
        elif (out / file).read_text() != text:
            found.append(f"{file}: differs from what is generated now")
    for file, checksum in folder.manifest["files"].items():
        if file in expected:
            continue
        if kernels is None and not file.endswith(_COMPILED_SUFFIXES):
            found.append(f"{file}: no longer generated")
        elif not (out / file).is_file() or digest((out / file).read_bytes()) != checksum:
            found.append(f"{file}: missing or damaged")
    return found


def _plan_again(folder: AotFolder, entry: Mapping[str, Any]) -> KernelSet:
    contract, arch, planned_for = Contract.from_dict(entry["contract"]), entry["arch"], entry["planned_for"]
    if planned_for is None:
        return KernelSet(folder.plan_set(contract, arch), None)
    return KernelSet(plan_layer(contract, arch, **planned_for), planned_for)


def _write_if_changed(path: Path, text: str) -> None:
    """Leave a file of the same contents alone, so that ninja need not compile it again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or path.read_text() != text:
        write_atomically(path, text.encode())


def _compile_all(out: Path, names: Sequence[str], target: str, jobs: int | None) -> dict[str, Any]:
    """Compile ``<name>.cu`` for each name through ninja; returns the resources of each kernel."""
    if importlib.util.find_spec("ninja") is None:
        raise DeviceError("--compile needs ninja, which is not installed; `pip install ninja`")
    work = out / _WORK
    write_atomically(work / "build.ninja", _ninja_file(out, names, target).encode())
    # The compile steps must find this megagen, also where it is used from its source tree.
    package_root = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
    jobs = jobs or len(os.sched_getaffinity(0))
    command = [
        sys.executable,
        "-m",
        "ninja",
        "-C",
        str(out),
        "-f",
        f"{_WORK}/build.ninja",
        "-k",
        "0",
        "-j",
        str(jobs),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    if ran.returncode:
        raise CompileError(f"{out}: not every kernel compiled\n{ran.stdout}{ran.stderr}")
    return {name: json.loads((work / f"{name}.json").read_text()) for name in names}


def _ninja_file(out: Path, names: Sequence[str], target: str) -> str:
    """One build statement per kernel. Its command holds the cache key, so that it runs again when anything
    that decides the result changes: the source, the options or NVRTC."""
    python = _ninja_escape(shlex.quote(sys.executable))
    lines = [
        f"builddir = {_WORK}",
        "rule nvrtc",
        f"  command = {python} -m megagen.build $in $target $key $stem $report",
        "  description = NVRTC $in",
    ]
    for name in names:
        source = (out / f"{name}.cu").read_text()
        stem = _ninja_escape(name)
        lines += [
            f"build {stem}.cubin {stem}.ptx {_WORK}/{stem}.json: nvrtc {stem}.cu",
            f"  target = {target}",
            f"  key = {cache.key_of(source, target, source_name(name))}",
            f"  stem = {stem}",
            f"  report = {_WORK}/{stem}.json",
        ]
    return "\n".join(lines) + "\n"


def source_name(name: str) -> str:
    """What a kernel's source is called in messages and line information: its file without folders."""
    return f"{Path(name).name}.cu"


def _ninja_escape(text: str) -> str:
    return text.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def _write_manifest(
    kernels: KernelSet, out: Path, files: Sequence[str], resources: Mapping[str, Mapping[str, Any] | None]
) -> None:
    """Enter a set into the folder's manifest and remove the files of the set that it replaces."""
    try:
        before = load_folder(out).manifest
    except CacheError:  # a new folder, or one that nobody can load
        before = {"sets": [], "kernels": {}, "files": {}}
    entry = kernels.manifest_entry()
    identity = (entry["contract_hash"], entry["arch"])
    others = [other for other in before["sets"] if (other["contract_hash"], other["arch"]) != identity]
    kept = {name for other in others for name in [*other["plans"], *other["helpers"]]}
    checksums = {file: checksum for file, checksum in before["files"].items() if _kernel_name(file) in kept}
    checksums |= {file: digest((out / file).read_bytes()) for file in files}
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "sets": [*others, entry],
        "kernels": {name: value for name, value in before["kernels"].items() if name in kept}
        | dict(resources),
        "files": checksums,
    }
    write_atomically(out / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    for file in before["files"].keys() - checksums.keys():
        (out / file).unlink(missing_ok=True)


def _kernel_name(file: str) -> str:
    """``helpers/a.cu`` -> ``helpers/a``; ``b.plan.json`` -> ``b``."""
    return re.sub(r"\.(cu|cubin|ptx|plan\.json)$", "", file)


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """One build of a folder at a time; makes the folder, and keeps its working files out of git."""
    work = out / _WORK
    (work / "helpers").mkdir(parents=True, exist_ok=True)
    (work / ".gitignore").write_text("*\n")
    try:
        with FileLock(work / "lock", timeout=_LOCK_TIMEOUT_S):
            yield
    except Timeout as error:
        raise CacheError(
            f"another process has been building {out} for {_LOCK_TIMEOUT_S:.0f} s; "
            "wait for it, or choose another folder"
        ) from error


def main() -> int:
    """Compile one source into ``STEM.cubin`` and ``STEM.ptx``; its resources go to REPORT."""
    parser = argparse.ArgumentParser(prog="python -m megagen.build", description=main.__doc__)
    for argument in ("source", "target", "key", "stem", "report"):
        parser.add_argument(argument)
    args = parser.parse_args()
    try:
        kernel = compiler.compile(Path(args.source).read_text(), args.target, name=source_name(args.stem))
    except MegagenError as error:
        print(error, file=sys.stderr)
        return 1
    write_atomically(Path(f"{args.stem}.cubin"), kernel.cubin)
    write_atomically(Path(f"{args.stem}.ptx"), kernel.ptx.encode())
    write_atomically(Path(args.report), json.dumps(kernel.resources()).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
