"""The runner on a fake GPU: nothing is computed, but every operator and launch is checked.

Operators on tensors of two devices raise, kernels check the device of their arguments, and a read
on the host is counted. What is missing is what a fake device lacks: numbers and time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from conure.engine.config import EngineConfig
from conure.engine.models import probe, registry, weights
from conure.engine.models.fused_decoder import FusedDecoder
from conure.engine.protocol import SamplingParams
from conure.engine.runner.base import ScheduledSequence
from conure.engine.runner.torch_runner import TorchModelRunner
from conure.engine.testing.fake_cuda import FakeCuda, fake_cuda

from .. import shrunk

BLOCK = 16
WIDTH = 12
"""Blocks of each row."""
SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 7, "min_p": 0.1},
    {"logprobs": 3},
    {"repetition_penalty": 1.2, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    {"logit_bias": ((3, 1.0),), "min_tokens": 5, "ignore_eos": True, "logprobs": 0},
)


SHORT = ("llama", "gemma2")
"""The fused decoder, and modules of transformers with a window in every other layer."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(family, marks=() if family in SHORT else pytest.mark.slow)
        for family in shrunk.FAMILIES
    ],
)
def rehearsal(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[TorchModelRunner, FakeCuda]]:
    """A warm runner on a fake GPU, in bfloat16."""
    folder = tmp_path_factory.mktemp("model") / request.param
    shrunk.write(folder, request.param, pad_token_id=None)
    checkpoint = registry.find(str(folder), is_dummy=False)
    model = weights.load(checkpoint, weights.read_config(checkpoint), "float32")
    with fake_cuda(probe.probe(model, request.param)) as device:
        config = EngineConfig(
            dummy_weights=str(folder / "config.json"),
            dtype="bfloat16",
            num_blocks=100,
            block_size=BLOCK,
            max_sequences=6,
            context_len=WIDTH * BLOCK,
            step_tokens=128,
        )
        runner = TorchModelRunner(config)
        is_fused = request.param != "gemma2"
        assert isinstance(runner._fused_decoder, FusedDecoder) == is_fused
        runner.warm()
        yield runner, device


def rows(num: int, start: int, num_new: int, **sampling: Any) -> list[ScheduledSequence]:
    """Return rows that begin with a common block."""
    params = SamplingParams(max_tokens=9, **sampling)
    return [
        ScheduledSequence(
            row,
            [5] * (start + num_new),
            start,
            num_new,
            [0, *range(1 + row * WIDTH, (row + 1) * WIDTH)],
            params,
            start + num_new - 1,
        )
        for row in range(num)
    ]


STEPS: dict[str, Callable[[dict[str, Any]], Sequence[ScheduledSequence]]] = {
    "prefill": lambda kind: rows(1, 0, 40, **kind),
    "two prompts": lambda kind: rows(2, 17, 30, **kind),
    "mixed": lambda kind: [*rows(3, 60, 1, **kind), *rows(5, 16, 20, **kind)[3:]],
    "padded decode": lambda kind: rows(3, 60, 1, **kind),
    "full decode": lambda kind: rows(6, 100, 1, **kind),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("kind", range(len(SAMPLING)))
def test_steps_stay_on_the_device(
    rehearsal: tuple[TorchModelRunner, FakeCuda], name: str, kind: int
) -> None:
    runner, device = rehearsal
    captures, reads = device.num_captures, device.num_reads
    attended = device.launches["attend_kernel"] + device.num_replays
    replays = device.num_replays
    scheduled = STEPS[name](SAMPLING[kind])
    assert len(runner.run(scheduled, [])) == len(scheduled)
    assert device.num_reads == reads, "the host waited for a number"
    assert device.num_captures == captures, "warming up missed a recording"
    assert device.launches["attend_kernel"] + device.num_replays > attended
    assert device.num_replays == replays + 1, "no recording fits the step"


def test_masked_rows_stay_on_the_device(rehearsal: tuple[TorchModelRunner, FakeCuda]) -> None:
    runner, device = rehearsal
    reads = device.num_reads
    masked = rows(3, 32, 1, temperature=0.5)
    masked[1].mask = b"\x0f\x01"
    assert len(runner.run(masked, [])) == 3
    assert device.num_reads == reads


def test_deferred_step_is_sampled_after_its_forward_pass(
    rehearsal: tuple[TorchModelRunner, FakeCuda],
) -> None:
    runner, device = rehearsal
    reads = device.num_reads
    first = runner.start(rows(4, 32, 1), [])
    following = rows(4, 33, 1, repetition_penalty=1.2)
    for index, row in enumerate(following):
        row.ids, row.previous_id_index, row.is_deferred = [5] * 33, index, index == 1
    replays = device.num_replays
    second = runner.start(following, [])
    assert device.num_replays == replays + 1
    assert len(first.read()) == 4
    for row in following:
        row.ids = [*row.ids, 7]
    following[1].mask = b"\x0f"
    second.sample()
    assert len(second.read()) == 4
    assert device.num_reads == reads


def test_one_stream_records_all_steps(rehearsal: tuple[TorchModelRunner, FakeCuda]) -> None:
    """Each further stream would have its own cached memory."""
    _, device = rehearsal
    assert device.num_captures > 10
    assert device.num_streams == 1


def test_step_follows_one_that_was_not_read(rehearsal: tuple[TorchModelRunner, FakeCuda]) -> None:
    runner, device = rehearsal
    reads = device.num_reads
    first = runner.start(rows(4, 32, 1), [])
    following = rows(4, 33, 1)
    for index, row in enumerate(following):
        row.ids, row.previous_id_index = [5] * 33, index
    second = runner.start(following, [])
    assert not first.is_ready
    assert len(first.read()) == len(second.read()) == 4
    assert device.num_reads == reads


@pytest.mark.parametrize("num_pairs", [1, 2, 17])
def test_copies_precede_a_step(
    rehearsal: tuple[TorchModelRunner, FakeCuda], num_pairs: int
) -> None:
    runner, device = rehearsal
    moved = device.launches["move_blocks_kernel"]
    pairs = [(number, 80 + number) for number in range(num_pairs)]
    runner.run(rows(2, 32, 1), pairs)
    runner.run([], pairs)
    # To scratch memory and back, for keys and values of one shape.
    assert device.launches["move_blocks_kernel"] == moved + 4


def test_rows_that_sample_nothing_return_nothing(
    rehearsal: tuple[TorchModelRunner, FakeCuda],
) -> None:
    runner, _ = rehearsal
    silent = rows(2, 0, 5)
    for row in silent:
        row.sampling = None
    assert runner.run(silent, []) == []


def test_host_read_during_a_capture_raises(rehearsal: tuple[TorchModelRunner, FakeCuda]) -> None:
    _, device = rehearsal
    numbers = torch.ones(3, device="cuda")
    reads = device.num_reads
    assert float(numbers.sum()) == 0
    assert device.num_reads == reads + 1
    with (
        torch.cuda.graph(torch.cuda.CUDAGraph()),
        pytest.raises(RuntimeError, match="not permitted when stream is capturing"),
    ):
        float(numbers.sum())


@pytest.mark.usefixtures("rehearsal")
def test_mixed_devices_raise() -> None:
    with pytest.raises(RuntimeError, match="device"):
        torch.add(torch.ones(3, device="cuda"), torch.ones(3))
