"""The adapter imports if its extra is installed; `make test` installs it."""

from __future__ import annotations

import pytest


def test_adapter_imports_with_its_extra() -> None:
    pytest.importorskip(
        "llama_index.core",
        reason="LlamaIndex is not installed: pip install 'conure[llamaindex]', or `make setup`",
    )
    from conure.adapters import llamaindex

    assert llamaindex.Conure.class_name() == "conure_llm"
