"""The adapter imports wherever its extra is installed; `make test` installs it."""

from __future__ import annotations

import pytest


def test_the_adapter_imports_where_llamaindex_is_installed() -> None:
    pytest.importorskip(
        "llama_index.core",
        reason="LlamaIndex is not installed: pip install 'conure[llamaindex]', or `make setup`",
    )
    from conure.adapters import llamaindex

    assert llamaindex.Conure.class_name() == "conure_llm"
