"""Packages of the benchmarks, loaded by path.

The folder of the benchmarks is not on the import path: it has modules with the names of our
folders.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_FOLDER = Path(__file__).parents[2] / "benchmarks"


def load_package(name: str) -> ModuleType:
    """Return a package of the benchmarks, such as `cookbook/langchain_apps`."""
    alias = f"benchmark_{name.replace('/', '_')}"
    if alias in sys.modules:
        return sys.modules[alias]
    folder = _FOLDER / name
    spec = importlib.util.spec_from_file_location(
        alias, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[alias] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
