"""The accuracy checks reach every attention configuration, and find it accurate."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from attention import configuration_checks
from conure.kernels.gpu.configuration import (
    AttentionShape,
    KernelConfiguration,
    large_rows,
    programs_per_processor,
    small_rows,
)
from conure.kernels.gpu.work_table.builder import LayerGroup, WorkTableBuilder
from tests.kernels.triton_interpreter import interpreter_with_bfloat16

__all__ = ["interpreter_with_bfloat16"]
CONFIGURATIONS = configuration_checks.attention_configurations()


@pytest.mark.parametrize(
    ("configuration", "shape"), CONFIGURATIONS, ids=[each.name for each, _ in CONFIGURATIONS]
)
def test_rows_reach_the_tile_size(
    configuration: KernelConfiguration, shape: AttentionShape
) -> None:
    window = configuration_checks.WINDOW if configuration.constants["HAS_WINDOW"] else None
    work = WorkTableBuilder(
        LayerGroup(
            kv_heads=shape.kv_heads,
            group=shape.group,
            window=window,
            small=small_rows(shape.group),
            large=large_rows(shape),
            processors=132,
            programs=(programs_per_processor(shape, 0), 2, 1),
        )
    )
    work.update(configuration_checks.rows_for(configuration, shape).plan)
    assert work.large == configuration.large


@pytest.fixture
def one_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check few configurations, with one KV head: the interpreter is slow."""
    selected = ("group4-64x64-page16-rows64", "group7-128x128-page16-rows16", "64-window")
    chosen = [
        (each, shape._replace(kv_heads=1))
        for each, shape in CONFIGURATIONS
        if each.name.startswith("attend-bf16") and each.name.endswith(selected)
    ]
    monkeypatch.setattr(configuration_checks, "attention_configurations", lambda: chosen)


@pytest.mark.usefixtures("one_of_each")
def test_configurations_are_accurate() -> None:
    device = torch.device("cuda" if os.environ.get("TRITON_INTERPRET") == "0" else "cpu")
    checked = list(configuration_checks.check_configurations(device))
    assert len(checked) == 3
    assert [each for each in checked if not each.is_accurate] == []
