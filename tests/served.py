"""`conure serve` in a separate process, started as the benchmarks start it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

_PATH = Path(__file__).parents[1] / "benchmarks" / "temporary_server.py"
_SPEC = importlib.util.spec_from_file_location("temporary_server", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
_MODULE = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_MODULE)

# Loaded by path: the folder of the benchmarks has modules with the names of our folders.
served: Callable[..., AbstractContextManager[str]] = _MODULE.served
environment: Callable[[], dict[str, str]] = _MODULE.environment
