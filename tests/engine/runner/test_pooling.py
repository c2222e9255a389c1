"""Sums of hidden states equal transformers', however a text is cut into steps."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from conure.engine.protocol import SamplingParams
from conure.engine.runner.base import ScheduledSequence
from conure.engine.runner.torch_runner import TorchModelRunner

from .. import shrunk

BLOCK = 4
TEXT = random.Random(7).choices(range(256), k=30)


@pytest.fixture(scope="module", params=[*shrunk.FAMILIES])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shrunk.write(tmp_path_factory.mktemp("model") / request.param, request.param)


def mean_states(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    states: torch.Tensor = found.hidden_states[-1][0]
    return states.mean(0)


def row(ids: list[int], start: int, num_new: int, pool_from: int) -> ScheduledSequence:
    blocks = [*range(-(-len(ids) // BLOCK))]
    return ScheduledSequence(0, ids, start, num_new, blocks, pool_from=pool_from)


def sum_of(runner: TorchModelRunner, *rows: ScheduledSequence) -> torch.Tensor:
    """Run each row as a step; return the sum of their hidden states."""
    total = torch.zeros(0)
    for each in rows:
        runner.run([each], [])
        assert each.hidden_sum is not None
        states = torch.tensor(each.hidden_sum)
        total = states if not len(total) else total + states
    return total


@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "modules"])
def test_sums_are_those_of_transformers(folder: Path, is_fused: bool) -> None:
    runner = shrunk.runner_on(folder, num_blocks=64, block_size=BLOCK, optimize=is_fused)
    expected = mean_states(shrunk.load(folder), TEXT)
    length = len(TEXT)
    whole = sum_of(runner, row(TEXT, 0, length, 0))
    torch.testing.assert_close(whole / length, expected, rtol=1e-4, atol=1e-5)
    in_steps = sum_of(runner, row(TEXT, 0, 11, 0), row(TEXT, 11, length - 11, 11))
    torch.testing.assert_close(in_steps, whole, rtol=1e-4, atol=1e-4)
    again = sum_of(runner, row(TEXT, 0, 11, 0), row(TEXT, 4, length - 4, 11))
    torch.testing.assert_close(again, whole, rtol=1e-4, atol=1e-4)


def test_tokens_that_were_summed_before_are_left_out(tmp_path: Path) -> None:
    runner = shrunk.runner_on(
        shrunk.write(tmp_path / "llama", "llama"), num_blocks=64, block_size=BLOCK
    )
    again = row(TEXT, 0, 8, 8)
    runner.run([again], [])
    assert again.hidden_sum is None


def test_rows_that_sample_and_rows_that_are_summed_share_a_step(tmp_path: Path) -> None:
    folder = shrunk.write(tmp_path / "llama", "llama")
    runner = shrunk.runner_on(folder, num_blocks=64, block_size=BLOCK)
    alone = sum_of(runner, row(TEXT, 0, len(TEXT), 0))
    sampling = ScheduledSequence(
        1, TEXT[:5], 0, 5, [40, 41], SamplingParams(max_tokens=4), num_prompt=5
    )
    [expected] = runner.run([sampling], [])
    summed = row(TEXT, 0, len(TEXT), 0)
    assert runner.run([sampling, summed], []) == [expected]
    assert summed.hidden_sum is not None
    torch.testing.assert_close(torch.tensor(summed.hidden_sum), alone, rtol=1e-4, atol=1e-4)
    assert sampling.hidden_sum is None
