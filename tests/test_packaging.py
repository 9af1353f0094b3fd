"""The wheel: all of the package and its templates, usable from any folder."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHIPPED = ["pyproject.toml", "README.md", "LICENSE", "megagen", "templates"]
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", "build")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that nothing is left in the source tree; needs no network."""
    copy = tmp_path_factory.mktemp("source")
    for name in SHIPPED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=LEFT_OUT)
        else:
            shutil.copy(source, copy / name)
    out = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-build-isolation",
        "--no-deps",
        "-w",
        str(out),
    ]
    ran = subprocess.run([*command, str(copy)], capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    (path,) = out.glob("megagen-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(target),
    ]
    ran = subprocess.run([*command, str(wheel)], capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    return target


def tree_files(folder: str, into: str) -> set[str]:
    """Files below a folder of the source tree, as the wheel should name them."""
    paths = (path for path in (ROOT / folder).rglob("*") if path.is_file())
    wanted = (path for path in paths if "__pycache__" not in path.parts and "build" not in path.parts)
    return {str(Path(into) / path.relative_to(ROOT / folder)) for path in wanted}


def test_wheel_holds_the_package_and_its_templates(wheel):
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = tree_files("megagen", "megagen") | tree_files("templates", "megagen/templates")
    assert held - expected == set()
    assert expected - held == set(), "add the folder to [tool.setuptools] in pyproject.toml"


def test_wheel_names_licence_and_version(wheel):
    from megagen import __version__

    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        lines = archive.read(metadata).decode().splitlines()
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
    assert f"Version: {__version__}" in lines
    assert "License-Expression: Apache-2.0" in lines


def test_installed_wheel_generates_from_another_folder(installed, tmp_path):
    env = {**os.environ, "PYTHONPATH": str(installed), "MEGAGEN_CACHE_DIR": str(tmp_path / "cache")}
    script = installed / "bin" / "megagen"
    command = [
        sys.executable,
        str(script),
        "generate",
        "--model",
        "tiny",
        "--tokens",
        "8",
        "--out",
        "kernels",
    ]
    ran = subprocess.run(
        [*command, "--compile"], capture_output=True, text=True, cwd=tmp_path, env=env, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    assert len(list(tmp_path.glob("kernels/*.cubin"))) == 1
    where = subprocess.run(
        [sys.executable, "-c", "import megagen; print(megagen.__file__)"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=env,
    )
    assert Path(where.stdout.strip()).is_relative_to(installed)


def test_ranges_admit_the_versions_that_people_have():
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = {r.name: r.specifier for r in map(Requirement, project["dependencies"])}
    for name, version in [
        ("cuda-bindings", "13.3.1"),
        ("cuda-core", "1.2.2"),
        ("nvidia-cuda-nvrtc", "13.0.88"),
        ("torch", "2.11.0"),
        ("torch", "2.13.0"),
    ]:
        assert ranges[name].contains(version), f"{name} {version}"
    for python in ("3.11", "3.12"):
        assert Requirement(f"python{project['requires-python']}").specifier.contains(python)
