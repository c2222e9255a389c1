"""Settings that must be made before any test module is imported.

Triton decides at import whether kernels are compiled for a GPU or interpreted, and transformers
imports it. Without a GPU only the interpreter works. `TRITON_INTERPRET=0` requests compiled
kernels.

Property tests use the same examples in every run, and take the time that they take: hypothesis's
deadline of an example is wall time, and another process may need the machine. New examples:
`pytest --hypothesis-profile explore`.

On a machine without the plugins pytest-asyncio and pytest-timeout, tests that need neither run.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("suite", settings.get_profile("explore"), derandomize=True)
settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Accept the settings of plugins that a machine lacks, which runs no test that needs them."""
    if not pluginmanager.hasplugin("asyncio"):
        for name in ("asyncio_mode", "asyncio_default_fixture_loop_scope"):
            parser.addini(name, "read by pytest-asyncio")
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "read by pytest-timeout")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks of plugins that a machine lacks."""
    config.addinivalue_line("markers", "timeout: seconds of a test, applied by pytest-timeout")
