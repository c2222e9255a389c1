"""The caches of a GPU. The test measures the memory of the whole device, so it runs alone."""

from __future__ import annotations

from pathlib import Path

import torch

from conure.engine.runner import device

from .. import shrunk
from .test_gpu import pytestmark as on_a_gpu
from .test_gpu import runner_of

pytestmark = on_a_gpu


def test_caches_use_free_device_memory(tmp_path: Path) -> None:
    folder = shrunk.write(tmp_path, "llama")
    free = device.free_bytes(torch.device("cuda", 0))
    runner = runner_of(folder, "auto", num_blocks=None)
    assert runner._model.device.type == "cuda"
    taken = sum(cache.numel() * cache.element_size() for cache in runner._own_caches)
    assert 0.7 * free < taken < 0.95 * free
