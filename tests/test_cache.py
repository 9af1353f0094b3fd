"""The kernel cache: one compilation however many ask, and no damaged file is ever used."""

import dataclasses
import multiprocessing
import os
import time

import pytest

from megagen import cache, compiler
from megagen.cache import KernelCache
from megagen.errors import CacheError, CompileError

SOURCE = """
extern "C" __global__ void __launch_bounds__(128) twice(float* values) { values[threadIdx.x] *= 2; }
"""
NAME, ARCH = "twice.cu", "sm_90a"


@pytest.fixture
def compilations(monkeypatch):
    """Names of the kernels compiled while the test runs."""
    names = []
    compile_kernel = compiler.compile

    def recorded(source, arch, *, name):
        names.append(name)
        return compile_kernel(source, arch, name=name)

    monkeypatch.setattr(compiler, "compile", recorded)
    return names


def test_second_request_compiles_nothing(tmp_path, compilations):
    kernels = KernelCache(tmp_path)
    first = kernels.load_or_compile(SOURCE, ARCH, name=NAME)
    assert kernels.load_or_compile(SOURCE, ARCH, name=NAME) is first
    from_disk = KernelCache(tmp_path).load_or_compile(SOURCE, ARCH, name=NAME)
    assert from_disk == first
    assert compilations == [NAME]


def test_recipe_spares_rendering(tmp_path, compilations):
    renderings = []

    def render():
        renderings.append(1)
        return SOURCE

    recipe = cache.recipe_of("plan")
    first = KernelCache(tmp_path).load_or_render(recipe, render, ARCH, name=NAME)
    assert KernelCache(tmp_path).load_or_render(recipe, render, ARCH, name=NAME) == first
    assert (len(renderings), compilations) == (1, [NAME])
    assert KernelCache(tmp_path).load_or_compile(SOURCE, ARCH, name=NAME) == first
    assert compilations == [NAME]

    KernelCache(tmp_path).load_or_render(cache.recipe_of("other plan"), render, ARCH, name=NAME)
    assert (len(renderings), compilations) == (2, [NAME])


@pytest.mark.parametrize("damaged", ["*.recipe", "*.kernel"])
def test_damaged_recipe_or_kernel_is_rendered_again(tmp_path, damaged):
    recipe = cache.recipe_of("plan")
    first = KernelCache(tmp_path).load_or_render(recipe, lambda: SOURCE, ARCH, name=NAME)
    (path,) = tmp_path.glob(damaged)
    path.write_bytes(path.read_bytes()[:-1])
    renderings = []
    again = KernelCache(tmp_path).load_or_render(
        recipe, lambda: renderings.append(1) or SOURCE, ARCH, name=NAME
    )
    assert renderings and again.cubin == first.cubin


def test_recipe_spares_loading_nvrtc(tmp_path, monkeypatch):
    recipe = cache.recipe_of("plan")
    first = KernelCache(tmp_path).load_or_render(recipe, lambda: SOURCE, ARCH, name=NAME)

    def unwanted():
        raise AssertionError("the library is not needed")

    for function in ("nvrtc_version", "_nvrtc"):
        monkeypatch.setattr(compiler, function, unwanted)
    assert KernelCache(tmp_path).load_or_render(recipe, unwanted, ARCH, name=NAME) == first
    monkeypatch.setattr(compiler, "packaged_nvrtc", lambda: "99.0.1")
    with pytest.raises(AssertionError):
        KernelCache(tmp_path).load_or_render(recipe, unwanted, ARCH, name=NAME)


def test_kernels_of_another_nvrtc_than_the_package_get_no_recipe(tmp_path, monkeypatch):
    monkeypatch.setattr(compiler, "packaged_nvrtc", lambda: f"{compiler.nvrtc_version()}1.5")
    KernelCache(tmp_path).load_or_render(cache.recipe_of("plan"), lambda: SOURCE, ARCH, name=NAME)
    assert list(tmp_path.glob("*.kernel")) and not list(tmp_path.glob("*.recipe"))


def test_recipe_depends_on_the_code(monkeypatch):
    before = cache.recipe_of("plan")
    assert cache.recipe_of("plan") == before
    monkeypatch.setattr(cache, "_code_digest", lambda: "other code")
    assert cache.recipe_of("plan") != before


@pytest.mark.parametrize("change", ["source", "arch", "name", "options", "nvrtc"])
def test_key_covers(change, monkeypatch):
    arguments = {"source": SOURCE, "arch": ARCH, "name": NAME}
    before = cache.key_of(**arguments)
    assert cache.key_of(**arguments) == before
    if change == "options":
        monkeypatch.setattr(compiler, "options_for", lambda arch: ("--other",))
    elif change == "nvrtc":
        monkeypatch.setattr(compiler, "nvrtc_version", lambda: "99.0")
    else:
        arguments[change] = {"source": SOURCE + " ", "arch": "sm_100a", "name": "other.cu"}[change]
    assert cache.key_of(**arguments) != before


def compile_slowly(directory, barrier, counter):
    """One process of ``test_eight_processes_compile_once``."""
    compile_kernel = compiler.compile

    def counted(source, arch, *, name):
        with counter.get_lock():
            counter.value += 1
        time.sleep(0.3)  # longer than the others need to get to the lock
        return compile_kernel(source, arch, name=name)

    compiler.compile = counted
    barrier.wait(timeout=60)
    kernel = KernelCache(directory).load_or_compile(SOURCE, ARCH, name=NAME)
    assert kernel.entry == "twice"


def test_eight_processes_compile_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier, counter = context.Barrier(8), context.Value("i", 0)
    processes = [context.Process(target=compile_slowly, args=(tmp_path, barrier, counter)) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
    assert [process.exitcode for process in processes] == [0] * 8
    assert counter.value == 1


def parts_of(contents: bytes) -> dict[str, tuple[int, int]]:
    """Byte range of each part of a kernel file."""
    magic = contents.index(b"\n") + 1
    digest = magic + 64
    header = contents.index(b"\n", digest)
    kernel, source = cache._unpack(contents, cache.key_of(SOURCE, ARCH, NAME))
    ranges = {"magic": (0, magic), "digest": (magic, digest), "header": (digest, header)}
    at = header + 1
    for part, data in [("source", source), ("ptx", kernel.ptx), ("log", kernel.log), ("cubin", kernel.cubin)]:
        ranges[part] = (at, at + len(data))
        at += len(data)
    assert at == len(contents)
    return ranges


PARTS = ["magic", "digest", "header", "source", "ptx", "log", "cubin"]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_damaged_file_is_found_and_rebuilt(tmp_path, compilations, part, damage):
    intact = KernelCache(tmp_path).load_or_compile(SOURCE, ARCH, name=NAME)
    (path,) = tmp_path.glob("*.kernel")
    contents = path.read_bytes()
    start, end = parts_of(contents)[part]
    middle = (start + end) // 2
    flipped = contents[:middle] + bytes([contents[middle] ^ 1]) + contents[middle + 1 :]
    path.write_bytes(contents[:middle] if damage == "cut" else flipped)

    (entry,) = KernelCache(tmp_path).entries()
    assert entry.kernel is None and entry.damage
    rebuilt = KernelCache(tmp_path).load_or_compile(SOURCE, ARCH, name=NAME)
    timed = {"compile_ms": 0, "log": ""}  # the log holds the time that ptxas took
    assert dataclasses.replace(rebuilt, **timed) == dataclasses.replace(intact, **timed)
    assert compilations == [NAME, NAME]
    assert KernelCache(tmp_path).entries()[0].damage == ""


def test_foreign_files_are_no_kernels(tmp_path, compilations):
    KernelCache(tmp_path).load_or_compile(SOURCE, ARCH, name=NAME)
    (path,) = tmp_path.glob("*.kernel")
    other = path.with_name(f"{'0' * 64}.kernel")
    other.write_bytes(path.read_bytes())
    empty = path.with_name(f"{'1' * 64}.kernel")
    empty.touch()
    damage = {entry.path: entry.damage for entry in KernelCache(tmp_path).entries()}
    assert damage[path] == ""
    assert "another key" in damage[other]
    assert "not a kernel file" in damage[empty]


def test_kernel_of_another_version_is_rebuilt(tmp_path, compilations, monkeypatch):
    resources = compiler.CompiledKernel.resources
    with monkeypatch.context() as older:
        older.setattr(compiler.CompiledKernel, "resources", lambda kernel: {**resources(kernel), "gone": 1})
        KernelCache(tmp_path).load_or_compile(SOURCE, ARCH, name=NAME)
    assert "another version" in KernelCache(tmp_path).entries()[0].damage
    KernelCache(tmp_path).load_or_compile(SOURCE, ARCH, name=NAME)
    assert len(compilations) == 2


def test_refused_kernel_is_not_kept(tmp_path):
    with pytest.raises(CompileError):
        KernelCache(tmp_path).load_or_compile("no C++", ARCH, name=NAME)
    assert KernelCache(tmp_path).entries() == []


def test_unwritable_folder_says_the_way_out(tmp_path):
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(CacheError, match="MEGAGEN_CACHE_DIR") as refused:
        KernelCache(blocked / "cache").load_or_compile(SOURCE, ARCH, name=NAME)
    assert str(blocked / "cache") in str(refused.value)


def test_held_lock_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "_LOCK_TIMEOUT_S", 0.1)
    with (
        KernelCache(tmp_path)._locked(cache.key_of(SOURCE, ARCH, NAME)),
        pytest.raises(CacheError, match="held by another process"),
    ):
        KernelCache(tmp_path).load_or_compile(SOURCE, ARCH, name=NAME)


def test_clear_removes_only_what_the_cache_made(tmp_path):
    kernels = KernelCache(tmp_path)
    kernels.load_or_compile(SOURCE, ARCH, name=NAME)
    key = cache.key_of(SOURCE, ARCH, NAME)
    tmp_path.joinpath(f"{key}.kernel.abcd.tmp").touch()
    tmp_path.joinpath("notes.txt").touch()
    kernels.load_or_render(cache.recipe_of("plan"), lambda: SOURCE, ARCH, name=NAME)
    assert kernels.clear() == 1
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_find_by_prefix(tmp_path):
    kernels = KernelCache(tmp_path)
    kernels.load_or_compile(SOURCE, ARCH, name=NAME)
    entry = kernels.find(cache.key_of(SOURCE, ARCH, NAME)[:8])
    assert entry.source == SOURCE and entry.kernel.entry == "twice"
    for wrong in ("zz", "", "*"):
        with pytest.raises(CacheError, match="fits 0 kernels"):
            kernels.find(wrong)


def test_default_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("MEGAGEN_CACHE_DIR", str(tmp_path / "chosen"))
    assert cache.default_cache().directory == tmp_path / "chosen"
    assert cache.default_cache() is cache.default_cache()
    monkeypatch.delenv("MEGAGEN_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.default_cache().directory == tmp_path / "megagen"


def test_warm_load_takes_milliseconds(tmp_path):
    KernelCache(tmp_path).load_or_compile(SOURCE, ARCH, name=NAME)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        KernelCache(tmp_path).load_or_compile(SOURCE, ARCH, name=NAME)
        times.append(time.perf_counter() - start)
    assert min(times) < 5e-3
