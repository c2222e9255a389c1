"""The wheel contains the package `conure` and the four folders, and nothing else.

Builds a source distribution from a copy of the tree and a wheel from the source distribution,
without network access, as a release does.
"""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("adapters", "engine", "kernels", "server")
PROJECT_FILES = ("pyproject.toml", "README.md", "LICENSE", "tests", "examples", "benchmarks")
CACHES = shutil.ignore_patterns("__pycache__", "prebuilt", "*.pyc", "*.egg-info", ".*_cache")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the files under version control: links as links, no caches."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in (*PROJECT_FILES, *FOLDERS, "conure"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=CACHES)
        else:
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def built(checkout: Path) -> Path:
    """Return a folder with one source distribution and the one wheel built from it."""
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", "."],
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return checkout / "dist"


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    (path,) = built.glob("conure-*.whl")
    return zipfile.ZipFile(path)


def tree(checkout: Path) -> set[str]:
    """Return every file of the package and of the four folders, under its import name."""
    front_door = {
        f"conure/{path.relative_to(checkout / 'conure')}"
        for paths in ((checkout / "conure").iterdir(), (checkout / "conure" / "cli").rglob("*"))
        for path in paths
        if path.is_file()
    }
    return front_door | {
        str("conure" / path.relative_to(checkout))
        for folder in FOLDERS
        for path in (checkout / folder).rglob("*")
        if path.is_file()
    }


def test_wheel_contains_exactly_the_packages(wheel: zipfile.ZipFile, checkout: Path) -> None:
    files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert files == tree(checkout)
    assert {f"conure/{folder}/py.typed" for folder in FOLDERS} <= files


def test_wheel_has_one_top_level_package(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"conure"}
    assert len(tops) == 2


def test_wheel_has_license_extras_and_console_script(wheel: zipfile.ZipFile) -> None:
    names = {Path(name).name: name for name in wheel.namelist() if ".dist-info/" in name}
    assert wheel.read(names["LICENSE"]) == (ROOT / "LICENSE").read_bytes()
    metadata = wheel.read(names["METADATA"]).decode()
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    for extra in ("server", "engine", "langchain", "llamaindex"):
        assert f"\nProvides-Extra: {extra}\n" in metadata
    scripts = configparser.ConfigParser()
    scripts.read_string(wheel.read(names["entry_points.txt"]).decode())
    assert dict(scripts["console_scripts"]) == {"conure": "conure.cli.main:main"}


def test_source_distribution_needs_no_links(built: Path) -> None:
    (path,) = built.glob("conure-*.tar.gz")
    with tarfile.open(path) as archive:
        members = archive.getmembers()
    assert [member.name for member in members if member.issym() or member.islnk()] == []
    inside = {member.name.partition("/")[2] for member in members}
    assert {"LICENSE", "README.md", "pyproject.toml"} <= inside
    assert {f"conure/{folder}/py.typed" for folder in FOLDERS} <= inside


def test_installed_wheel_imports_without_the_checkout(built: Path, tmp_path: Path) -> None:
    (path,) = built.glob("conure-*.whl")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path)
    code = (
        "import conure.server.program.ir as ir, conure.engine.protocol\n"
        "import importlib.resources as r, sys\n"
        "assert ir.__file__.startswith(sys.argv[1]), ir.__file__\n"
        "assert r.files('conure.server').joinpath('py.typed').is_file()\n"
        "import conure.kernels\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
