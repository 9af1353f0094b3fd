"""A folder of kernels built ahead of time: what is in it, and its way into a process.

A folder holds any number of kernel sets, at most one per contract and architecture. ``manifest.json`` lists
them, and every file with its SHA-256. ``megagen.build`` writes such folders; loading one needs neither NVRTC
nor Jinja.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megagen.compiler import CompiledKernel
from megagen.contract import Contract
from megagen.errors import CacheError, MegagenError
from megagen.planning import KernelPlan, PlanSet

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class AotFolder:
    """An opened folder; ``manifest`` is the checked content of its ``manifest.json``."""

    directory: Path
    manifest: dict[str, Any]

    @property
    def names(self) -> tuple[str, ...]:
        """Every kernel and helper, as ``load`` takes them."""
        return tuple(self.manifest["kernels"])

    def plan_set(self, contract: Contract, arch: str) -> PlanSet:
        """The plans that the folder holds for a contract on an architecture (``sm90``, ...).

        Raises:
            CacheError: it holds none that fit; says what differs: architecture, fields of the contract, or
                weight layout.
        """
        entry = self._set_of(contract, arch)
        plans = tuple(self._plan(name) for name in entry["plans"])
        for plan in plans:
            if plan.weight_layout.name != entry["weight_layout"]:
                raise CacheError(
                    f"{self.directory}: {plan.name} reads weights in the layout {entry['weight_layout']}, "
                    f"this megagen transforms them to {plan.weight_layout.name}; {_REBUILD}"
                )
        return PlanSet(tuple(entry["max_tokens"]), plans)

    def helpers(self, contract: Contract, arch: str) -> tuple[str, ...]:
        """Companion kernels of a contract, as ``load`` takes them; errors as for ``plan_set``."""
        return tuple(self._set_of(contract, arch)["helpers"])

    def load(self, name: str) -> CompiledKernel:
        """The compiled kernel of a plan (``plan.name``) or of a helper (``helpers/...``).

        Raises:
            CacheError: no such kernel, it was generated but not compiled, or a file is missing or damaged.
        """
        try:
            resources = self.manifest["kernels"][name]
        except KeyError:
            raise CacheError(
                f"{self.directory} holds no kernel {name!r}, only {', '.join(self.names)}; {_REBUILD}"
            ) from None
        if resources is None:
            raise CacheError(f"{self.directory} holds only the source of {name}; generate it with --compile")
        cubin, ptx = (self.read(f"{name}{suffix}") for suffix in (".cubin", ".ptx"))
        try:
            return CompiledKernel.from_parts(resources, cubin, ptx.decode(), log="")
        except ValueError as error:
            raise CacheError(f"{self.directory}: {name} was {error}; {_REBUILD}") from error

    def read(self, file: str) -> bytes:
        """A file of the folder, checked against its checksum.

        Raises:
            CacheError: unknown, missing or damaged.
        """
        expected = self.manifest["files"].get(file)
        try:
            contents = (self.directory / file).read_bytes()
        except OSError as error:
            raise CacheError(f"{self.directory / file} can't be read ({error}); {_REBUILD}") from error
        if expected != digest(contents):
            raise CacheError(f"{self.directory / file} is not the file that its manifest lists; {_REBUILD}")
        return contents

    def _plan(self, name: str) -> KernelPlan:
        try:
            return KernelPlan.from_json(self.read(f"{name}.plan.json").decode())
        except CacheError:
            raise
        except (MegagenError, ValueError) as error:
            raise CacheError(
                f"{self.directory}: the plan of {name} does not fit: {error}; {_REBUILD}"
            ) from error

    def _set_of(self, contract: Contract, arch: str) -> dict[str, Any]:
        sets = self.manifest["sets"]
        same_arch = [entry for entry in sets if entry["arch"] == arch]
        if not same_arch:
            built_for = ", ".join(sorted({entry["arch"] for entry in sets})) or "nothing"
            raise CacheError(f"{self.directory} is built for {built_for}, not for arch={arch}; {_REBUILD}")
        for entry in same_arch:
            if entry["contract_hash"] == contract.hash:
                return entry
        nearest = min(same_arch, key=lambda entry: len(_differences(entry["contract"], contract)))
        raise CacheError(
            f"{self.directory} holds no kernels of this contract on {arch}; the nearest differs in "
            f"{'; '.join(_differences(nearest['contract'], contract)) or 'the buffer layout'}; {_REBUILD}"
        )


def load_folder(directory: Path | str) -> AotFolder:
    """Open a folder that ``megagen generate`` wrote.

    Raises:
        CacheError: no manifest, or one that this megagen can't read.
    """
    path = Path(directory) / MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CacheError(
            f"kernels={str(directory)!r} is no folder of kernels: {path} can't be read ({error}); "
            "write one with `megagen generate --compile --out DIR`"
        ) from error
    if not isinstance(manifest, dict) or manifest.get("schema_version") != SCHEMA_VERSION:
        raise CacheError(f"{path} is not of schema_version {SCHEMA_VERSION}; {_REBUILD}")
    return AotFolder(Path(directory), manifest)


def digest(contents: bytes) -> str:
    """SHA-256 in hex, as the manifest lists it."""
    return hashlib.sha256(contents).hexdigest()


_REBUILD = (
    "build the folder again with `megagen generate --compile --out DIR`, or allow compilation (jit=True)"
)


def _differences(theirs: dict[str, Any], contract: Contract) -> list[str]:
    """Fields in which a contract of a manifest differs from the one asked for."""
    built, asked = (_flat(values) for values in (theirs, json.loads(json.dumps(contract.to_dict()))))
    return [
        f"{name} (built for {built.get(name)}, asked for {asked.get(name)})"
        for name in sorted(built.keys() | asked.keys())
        if built.get(name) != asked.get(name)
    ]


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """``{"shape": {"hidden": 1}, "ranks": 2}`` -> ``{"hidden": 1, "ranks": 2}``."""
    nested = values.get("shape", {})
    return {**nested, **{name: value for name, value in values.items() if name != "shape"}}
