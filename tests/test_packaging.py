"""The wheel holds the four folders, whole and nowhere else.

Builds a source distribution and, from that, a wheel, out of a copy of the tree and without
the network, as a release would be. Knows only files; what they do is tested elsewhere.

Kept true: a file added to a folder is in the wheel, or a test here says that it is not.
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
HOUSE = ("pyproject.toml", "README.md", "LICENSE", "tests", "examples", "benchmarks")
CACHES = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info", ".*_cache")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is under version control: links as links, no caches."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in (*HOUSE, *FOLDERS, ".src"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=CACHES)
        else:
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def built(checkout: Path) -> Path:
    """A folder with one source distribution, and the one wheel built from it."""
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", "."],
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return checkout / "dist"


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    (path,) = built.glob("conure-*.whl")
    return zipfile.ZipFile(path)


def tree(checkout: Path) -> set[str]:
    """Every file of the four folders, under its import name."""
    return {
        str("conure" / path.relative_to(checkout))
        for folder in FOLDERS
        for path in (checkout / folder).rglob("*")
        if path.is_file()
    }


def test_the_wheel_holds_exactly_the_tree(wheel: zipfile.ZipFile, checkout: Path) -> None:
    files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert files == tree(checkout)
    assert {f"conure/{folder}/py.typed" for folder in FOLDERS} <= files


def test_nothing_but_conure_is_installed_at_the_top(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"conure"}
    assert len(tops) == 2


def test_the_wheel_carries_license_extras_and_the_console_script(wheel: zipfile.ZipFile) -> None:
    names = {Path(name).name: name for name in wheel.namelist() if ".dist-info/" in name}
    assert wheel.read(names["LICENSE"]) == (ROOT / "LICENSE").read_bytes()
    metadata = wheel.read(names["METADATA"]).decode()
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    for extra in ("server", "engine", "langchain", "llamaindex"):
        assert f"\nProvides-Extra: {extra}\n" in metadata
    scripts = configparser.ConfigParser()
    scripts.read_string(wheel.read(names["entry_points.txt"]).decode())
    assert dict(scripts["console_scripts"]) == {"conure": "conure.server.cli:main"}


def test_the_source_distribution_needs_no_links(built: Path) -> None:
    (path,) = built.glob("conure-*.tar.gz")
    with tarfile.open(path) as archive:
        members = archive.getmembers()
    assert [member.name for member in members if member.issym() or member.islnk()] == []
    inside = {member.name.partition("/")[2] for member in members}
    assert {"LICENSE", "README.md", "pyproject.toml"} <= inside
    assert {f".src/conure/{folder}/py.typed" for folder in FOLDERS} <= inside


def test_an_installed_wheel_imports_without_the_checkout(built: Path, tmp_path: Path) -> None:
    (path,) = built.glob("conure-*.whl")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path)
    code = (
        "import conure.server.program.ir as ir, conure.engine.api, importlib.resources as r, sys\n"
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
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
