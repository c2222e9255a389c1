"""`conure serve` in a process of its own, as the benchmarks start it, for tests that need one."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

_PATH = Path(__file__).parents[1] / "benchmarks" / "own_server.py"
_SPEC = importlib.util.spec_from_file_location("own_server", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
_MODULE = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_MODULE)

# Not imported by name: beside it lie files with the names of our own folders.
served: Callable[..., AbstractContextManager[str]] = _MODULE.served
environment: Callable[[], dict[str, str]] = _MODULE.environment
