"""The logits of a runner, for comparisons of two ways to compute a model."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from conure.engine.protocol import SamplingParams
from conure.engine.runner.base import ScheduledSequence
from conure.engine.runner.torch_runner import TorchModelRunner


def logits_of(runner: TorchModelRunner) -> torch.Tensor:
    """Return the logits of rows that share, prefill and decode, one after the other."""
    seen: list[torch.Tensor] = []
    forward = runner._forward

    def recording(*args: Any) -> torch.Tensor:
        seen.append(forward(*args))
        return seen[-1].float()

    ids = random.Random(1).choices(range(256), k=33)
    other = ids[:16] + ids[5:11]
    sampling = SamplingParams(max_tokens=9)
    blocks, others = list(range(9)), [0, 1, 2, 3, 20, 21]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "_forward", recording)
        runner.run([ScheduledSequence(1, ids, 0, 17, blocks)], [])
        rows = [
            ScheduledSequence(1, ids, 17, 16, blocks, sampling),
            ScheduledSequence(2, other, 16, 6, others, sampling),
        ]
        runner.run(rows, [])
        rows = [
            ScheduledSequence(1, [*ids, 7], 33, 1, blocks, sampling),
            ScheduledSequence(2, [*other, 8], 22, 1, others, sampling),
        ]
        runner.run(rows, [])
    return torch.cat(seen)
