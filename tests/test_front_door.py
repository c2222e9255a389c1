"""The package `conure`: lazy loading, public names, version."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import conure

ROOT = Path(__file__).parents[1]
HEAVY = ("httpx", "msgspec", "torch", "litestar")


def python(*arguments: str, isolated: bool = False) -> str:
    """Run the interpreter on this checkout; return its output."""
    done = subprocess.run(
        [sys.executable, *(["-S"] if isolated else []), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_conure_loads_no_heavy_module() -> None:
    code = f"import sys, conure; print([name for name in {HEAVY} if name in sys.modules])"
    assert python("-c", code) == "[]"


def test_public_names_load_no_torch() -> None:
    code = (
        "import sys, conure; [getattr(conure, name) for name in conure.__all__]; "
        "print('httpx' in sys.modules, 'torch' in sys.modules)"
    )
    assert python("-c", code) == "True False"


@pytest.mark.parametrize("name", conure.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(conure, name) is getattr(conure, name)
    assert name in dir(conure)


def test_exports_match_all() -> None:
    assert {*conure._MODULES, "__version__"} == set(conure.__all__)


def test_an_unknown_attribute_raises() -> None:
    with pytest.raises(AttributeError, match="module 'conure' has no attribute 'Clinet'"):
        _ = conure.Clinet  # type: ignore[attr-defined]


def test_dir_does_not_load_modules() -> None:
    code = "import sys, conure; print('Client' in dir(conure), 'httpx' in sys.modules)"
    assert python("-c", code) == "True False"


@pytest.mark.parametrize("name", [name for name in conure.__all__ if name != "__version__"])
def test_public_classes_can_be_pickled(name: str) -> None:
    each = getattr(conure, name)
    assert pickle.loads(pickle.dumps(each)) is each


def test_module_prints_the_version() -> None:
    assert python("-m", "conure", "--version") == f"conure {conure.__version__}"


WITHOUT_METADATA = """
from importlib import metadata

def missing(name):
    raise metadata.PackageNotFoundError(name)

metadata.version = missing
import conure
print(conure.__version__)
"""


def test_an_uninstalled_checkout_has_a_version() -> None:
    # A checkout that was installed keeps its metadata next to the package.
    assert python("-c", WITHOUT_METADATA, isolated=True) == "0+source"
