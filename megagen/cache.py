"""Compiled kernels, kept in this process and on disk.

One file per kernel, named by its key and guarded by a lock file of the same name. Files appear whole and
carry a checksum, so a torn or foreign file is a miss and is rebuilt.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megagen import compiler
from megagen.compiler import CompiledKernel
from megagen.errors import CacheError
from megagen.files import templates_dir, write_atomically

_MAGIC = b"megagen kernel 1\n"
_DIGEST_BYTES = 64
_SECTIONS = ("source", "ptx", "log", "cubin")
_SUFFIX = ".kernel"
_NOTE_SUFFIX = ".recipe"  # holds the key of the kernel whose source a recipe gives
_LOCK_TIMEOUT_S = 300.0


def cache_dir() -> Path:
    """``MEGAGEN_CACHE_DIR``, else ``megagen`` in the user's cache folder."""
    if chosen := os.environ.get("MEGAGEN_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megagen"


def key_of(source: str, arch: str, name: str) -> str:
    """SHA-256 over all that decides what NVRTC makes: source, name, options, version and target."""
    return _digest(source, arch, name, compiler.nvrtc_version())


def note_of(recipe: str, arch: str, name: str) -> str:
    """As ``key_of`` the source that a recipe gives, with NVRTC's version as its package tells it."""
    return _digest(recipe, arch, name, compiler.packaged_nvrtc())


def _digest(text: str, arch: str, name: str, nvrtc: str) -> str:
    parts = [text, name, arch, *compiler.options_for(arch), nvrtc]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def recipe_of(*parts: str) -> str:
    """Identifies a source by what it is rendered from: ``parts`` (a plan's hash, say) and megagen itself."""
    return hashlib.sha256(json.dumps([*parts, _code_digest()]).encode()).hexdigest()


@cache
def _code_digest() -> str:
    """SHA-256 over every module and template that can have a part in a source."""
    package = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(
        [*package.glob("*.py"), *package.glob("planning/*.py"), *templates_dir().rglob("*.j2")]
    ):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


@dataclass(frozen=True)
class CacheEntry:
    """One file of the cache: its kernel and the source it was made of, or why it can't be used."""

    key: str
    path: Path
    size: int
    kernel: CompiledKernel | None
    source: str
    damage: str


class KernelCache:
    """A folder of compiled kernels, and those of them that this process has used.

    A folder that can only be read serves what it holds; what it lacks is a CacheError.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._loaded: dict[str, CompiledKernel] = {}

    def load_or_compile(self, source: str, arch: str, *, name: str) -> CompiledKernel:
        """The kernel of this source, compiled at most once however many threads and processes ask.

        Args and errors as for ``compiler.compile``, and:

        Raises:
            CacheError: the folder can't be written or locked.
        """
        key = key_of(source, arch, name)
        kernel = self._loaded.get(key) or self._read_kernel(key)
        if kernel is None:
            with self._locked(key):
                # Another process may have compiled it while this one waited.
                kernel = self._read_kernel(key)
                if kernel is None:
                    kernel = compiler.compile(source, arch, name=name)
                    self._write(key, kernel, source)
        self._loaded[key] = kernel
        return kernel

    def load_or_render(
        self, recipe: str, render: Callable[[], str], arch: str, *, name: str
    ) -> CompiledKernel:
        """As ``load_or_compile`` of ``render()``, which is not called if the cache knows its result.

        Args:
            recipe: identifies all that the source depends on, this megagen included (``recipe_of``).
            render: makes the source.
        """
        note = self.directory / f"{note_of(recipe, arch, name)}{_NOTE_SUFFIX}"
        with contextlib.suppress(OSError):
            key = note.read_text()
            if kernel := self._loaded.get(key) or self._read_kernel(key):
                self._loaded[key] = kernel
                return kernel
        source = render()
        kernel = self.load_or_compile(source, arch, name=name)
        if not f"{compiler.packaged_nvrtc()}.".startswith(f"{compiler.nvrtc_version()}."):
            return kernel  # this process has loaded another NVRTC than the package's
        try:
            write_atomically(note, key_of(source, arch, name).encode())
        except OSError as error:
            raise self._unusable("written", error) from error
        return kernel

    def entries(self) -> list[CacheEntry]:
        """Every kernel file of the folder, read and checked, in the order of their keys.

        Raises:
            CacheError: the folder can't be read.
        """
        try:
            paths = sorted(self.directory.glob(f"*{_SUFFIX}"))
        except OSError as error:
            raise self._unusable("read", error) from error
        return [self._entry(path) for path in paths]

    def find(self, key_prefix: str) -> CacheEntry:
        """The one entry whose key starts with ``key_prefix``.

        Raises:
            CacheError: no entry or several, or a folder that can't be read.
        """
        found = sorted(self.directory.glob(f"{key_prefix}*{_SUFFIX}")) if key_prefix.isalnum() else []
        if len(found) != 1:
            raise CacheError(
                f"key={key_prefix!r} fits {len(found)} kernels in {self.directory}; "
                "`megagen cache list` shows their keys"
            )
        return self._entry(found[0])

    def clear(self) -> int:
        """Remove every kernel, and the lock and temporary files beside them; returns the number of kernels.

        Other files of the folder stay.

        Raises:
            CacheError: a file can't be removed.
        """
        self._loaded.clear()
        removed = 0
        try:
            for pattern in (f"*{_SUFFIX}", f"*{_SUFFIX}.lock", f"*{_NOTE_SUFFIX}", "*.tmp"):
                for path in self.directory.glob(pattern):
                    path.unlink(missing_ok=True)
                    removed += pattern == f"*{_SUFFIX}"
        except OSError as error:
            raise self._unusable("cleared", error) from error
        return removed

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}{_SUFFIX}"

    def _read_kernel(self, key: str) -> CompiledKernel | None:
        """The kernel on disk; None if there is none or its file is damaged."""
        try:
            contents = self._path(key).read_bytes()
        except OSError:
            return None  # if the folder itself is at fault, locking it says so
        try:
            return _unpack(contents, key)[0]
        except ValueError:
            return None

    def _entry(self, path: Path) -> CacheEntry:
        key = path.name.removesuffix(_SUFFIX)
        contents = b""
        try:
            contents = path.read_bytes()
            kernel, source = _unpack(contents, key)
        except (OSError, ValueError) as error:
            return CacheEntry(key, path, len(contents), None, "", str(error))
        return CacheEntry(key, path, len(contents), kernel, source, "")

    def _write(self, key: str, kernel: CompiledKernel, source: str) -> None:
        try:
            write_atomically(self._path(key), _pack(key, kernel, source))
        except OSError as error:
            raise self._unusable("written", error) from error

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        from filelock import FileLock, Timeout  # here, since its import takes longer than finding a kernel

        path = f"{self._path(key)}.lock"
        lock = FileLock(path)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=_LOCK_TIMEOUT_S)
        except Timeout as error:
            raise CacheError(
                f"{path} was held by another process for {_LOCK_TIMEOUT_S:.0f} s; see whether that process "
                "hangs, or set MEGAGEN_CACHE_DIR to another folder"
            ) from error
        except (OSError, NotImplementedError) as error:
            raise self._unusable("locked", error) from error
        try:
            yield
        finally:
            lock.release()

    def _unusable(self, verb: str, error: Exception) -> CacheError:
        return CacheError(
            f"the kernel cache {self.directory} can't be {verb} ({error}); "
            "set MEGAGEN_CACHE_DIR to a folder that this user can write"
        )


def default_cache() -> KernelCache:
    """This process's cache of ``cache_dir()``."""
    return _cache_of(cache_dir())


@cache
def _cache_of(directory: Path) -> KernelCache:
    return KernelCache(directory)


def _pack(key: str, kernel: CompiledKernel, source: str) -> bytes:
    """Magic line, SHA-256 of the rest in hex, one line of JSON, then the sections back to back."""
    sections = {
        "source": source.encode(),
        "ptx": kernel.ptx.encode(),
        "log": kernel.log.encode(),
        "cubin": kernel.cubin,
    }
    sizes = [len(sections[section]) for section in _SECTIONS]
    header = json.dumps({"key": key, "sizes": sizes, "kernel": kernel.resources()}).encode()
    body = b"\n".join([header, b"".join(sections[section] for section in _SECTIONS)])
    return _MAGIC + hashlib.sha256(body).hexdigest().encode() + body


def _unpack(contents: bytes, key: str) -> tuple[CompiledKernel, str]:
    """Inverse of ``_pack``; ValueError says what is wrong with a damaged or foreign file."""
    if not contents.startswith(_MAGIC):
        raise ValueError("not a kernel file of this version")
    body_at = len(_MAGIC) + _DIGEST_BYTES
    body = memoryview(contents)[body_at:]
    if contents[len(_MAGIC) : body_at] != hashlib.sha256(body).hexdigest().encode():
        raise ValueError("torn: its checksum does not fit")
    at = contents.index(b"\n", body_at) + 1
    header = json.loads(contents[body_at:at])
    if header["key"] != key:
        raise ValueError(f"holds the kernel of another key, {header['key']}")
    sections = {}
    for section, size in zip(_SECTIONS, header["sizes"]):
        sections[section] = contents[at : at + size]
        at += size
    kernel = CompiledKernel.from_parts(
        header["kernel"], sections["cubin"], sections["ptx"].decode(), sections["log"].decode()
    )
    return kernel, sections["source"].decode()
