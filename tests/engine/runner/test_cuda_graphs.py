"""Recorded steps: replays give the tokens of eager steps, whatever changes between them.

The recordings are those of `graph_double`, on the CPU; `test_gpu` does the same on a GPU.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conure.engine.protocol import SamplingParams
from conure.engine.runner.backend import Backend
from conure.engine.runner.base import ScheduledSequence
from conure.engine.runner.cuda_graphs import (
    MAX_RECORDINGS,
    CudaGraphCache,
    CudaGraphs,
    bucket_sizes,
)
from conure.engine.runner.staging import Staging
from conure.engine.runner.torch_runner import TorchModelRunner
from conure.engine.runner.warmup import recorded_sizes
from conure.engine.testing.fake_cuda import FakeCuda, fake_cuda

from .. import shrunk
from ..graph_double import Dense, Recorder, backend, interpreted

BLOCK = 4
FAMILIES = ("llama", "qwen3", "mistral", "gemma2")
"""Fused, with head norms, with a window, and by the modules of transformers."""
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.2, "top_p": 0.9, "top_k": 20, "seed": 4},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"min_tokens": 3, "logprobs": 2, "logit_bias": ((7, 2.0),)},
    {"ignore_eos": True, "frequency_penalty": 0.4, "temperature": 0.5, "min_p": 0.05},
)


def runner_of(folder: Path, device: Backend | str, **options: Any) -> TorchModelRunner:
    chosen = {"num_blocks": 96, "block_size": BLOCK, "max_sequences": 6, "min_saved": 0, **options}
    return shrunk.runner_on(folder, device, **chosen)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shrunk.write(tmp_path_factory.mktemp("model") / request.param, request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shrunk.write(tmp_path_factory.mktemp("model") / "llama", "llama")


class Crowd:
    """Contexts that join, leave, fork, are evicted and mix prompts with decoding."""

    def __init__(self, runner: TorchModelRunner, seed: int) -> None:
        self.runner = runner
        self.rng = random.Random(seed)
        self.free = list(range(runner.limits.num_blocks))
        self.rng.shuffle(self.free)
        self.alive: list[ScheduledSequence] = []
        self.done: list[list[int]] = []
        self.logprobs: list[tuple[float, list[int]]] = []
        self.num_born = 0
        self.shared: set[int] = set()

    def live(self, num_steps: int) -> list[list[int]]:
        for _ in range(num_steps):
            self.step()
        return [*self.done, *(row.ids for row in self.alive)]

    def step(self) -> None:
        rng, rows, copies = self.rng, [], []
        while len(self.alive) < self.runner.limits.max_sequences and rng.random() < 0.3:
            copies += self.join()
        for row in self.alive:
            if rng.random() < 0.05:
                self.evict(row)
            row.num_new = min(rng.choice((1, 5, 100)), len(row.ids) - row.start)
            ends = row.start + row.num_new == len(row.ids)
            row.sampling = self.sampling[row.context] if ends else None
            while len(row.blocks) * BLOCK < row.start + row.num_new:
                row.blocks.append(self.free.pop())
            rows.append(row)
        sampled = iter(self.runner.run(rows, copies))
        for row in rows:
            row.start += row.num_new
            if row.sampling is not None:
                row.ids.append(next(sampled))
                if row.logprob is not None:
                    self.logprobs.append(
                        (row.logprob.logprob, [token for token, _ in row.logprob.top])
                    )
                    row.logprob = None
        assert next(sampled, None) is None
        for row in [row for row in self.alive if len(row.ids) > row.num_prompt + 8]:
            self.alive.remove(row)
            self.evict(row)
            self.done.append(row.ids)

    @property
    def sampling(self) -> dict[int, SamplingParams]:
        return {
            born: SamplingParams(max_tokens=64, **SETTINGS[born % len(SETTINGS)])
            for born in range(self.num_born)
        }

    def join(self) -> list[tuple[int, int]]:
        """Begin a context, sometimes as a fork whose last block is a copy."""
        rng, copies = self.rng, []
        parent = rng.choice(self.alive) if self.alive and rng.random() < 0.5 else None
        ids: list[int] = []
        blocks: list[int] = []
        start = 0
        if parent is not None and parent.start:
            start = rng.randint(1, parent.start)
            ids, blocks = parent.ids[:start], [*parent.blocks[: start // BLOCK]]
            if start % BLOCK:
                blocks = [*blocks, self.free.pop()]
                copies = [(parent.blocks[start // BLOCK], blocks[-1])]
            self.shared |= {*parent.blocks[: start // BLOCK]}
        ids = [*ids, *rng.choices(range(256), k=rng.randint(1, 9))]
        self.alive.append(ScheduledSequence(self.num_born, ids, start, 0, blocks, None, len(ids)))
        self.num_born += 1
        return copies

    def evict(self, row: ScheduledSequence) -> None:
        """Take a context's blocks; those that another may read are not given again."""
        self.free = [*(b for b in row.blocks if b not in self.shared), *self.free]
        row.blocks.clear()
        row.start = 0


@pytest.mark.parametrize("seed", range(3))
def test_replays_match_eager_steps(folder: Path, seed: int) -> None:
    recorder = Recorder()
    lives = []
    for device in (backend(recorder), backend(None), "cpu"):
        crowd = Crowd(runner_of(folder, device, num_blocks=400), seed)
        lives.append((crowd.live(80), crowd.logprobs))
    (replayed, logprobs), (eager, eager_logprobs), (expected, _) = lives
    assert recorder.num_replayed > 10
    assert 2 <= recorder.num_recorded < recorder.num_replayed / 2
    assert len(replayed) > 15
    assert replayed == eager == expected
    assert [ids for _, ids in logprobs] == [ids for _, ids in eager_logprobs]
    assert np.allclose([a for a, _ in logprobs], [b for b, _ in eager_logprobs], atol=1e-5)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "0", reason="needs the interpreter")
# What fills a step up attends to nothing, and computes with whatever its memory held.
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("family", "num_steps"), [("mistral", 16), pytest.param("qwen3", 40, marks=pytest.mark.slow)]
)
def test_gpu_kernel_replays_match_the_cpu(family: str, num_steps: int, tmp_path: Path) -> None:
    """Attention, merging and what is fused, as Triton kernels in the interpreter."""
    folder = shrunk.write(tmp_path, family, num_hidden_layers=2)
    recorder = Recorder()
    lives = [
        Crowd(runner_of(folder, device, num_blocks=200, max_sequences=4), 5).live(num_steps)
        for device in (interpreted(recorder), "cpu")
    ]
    assert recorder.num_replayed > recorder.num_recorded > 0
    assert sum(len(ids) for ids in lives[0]) > num_steps
    assert lives[0] == lives[1]


def test_host_values_make_a_replay_wrong(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The double detects the faults that it is meant to detect."""
    recorder = Recorder(forbids=False)
    runner = runner_of(llama, backend(recorder))
    forward = runner._forward

    def careless(ids: Tensor, positions: Tensor, last: Tensor, attention: Any) -> Tensor:
        return forward(torch.tensor(ids.tolist()), positions, last, attention)

    monkeypatch.setattr(runner, "_forward", careless)
    ids = [5, 99, 42, 200]
    rows = [ScheduledSequence(0, ids, i, 1, [3], SamplingParams(max_tokens=1)) for i in range(4)]
    spoiled = [runner.run([row], []) for row in rows]
    assert recorder.num_recorded == 1
    honest = runner_of(llama, backend(None))
    assert spoiled != [honest.run([row], []) for row in rows]


def test_synchronising_model_runs_eagerly(
    llama: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    runner = runner_of(llama, backend(recorder))
    forward = runner._forward

    def asking(ids: Tensor, positions: Tensor, last: Tensor, attention: Any) -> Tensor:
        assert int(ids.sum()) >= 0
        return forward(ids, positions, last, attention)

    monkeypatch.setattr(runner, "_forward", asking)
    rows = [ScheduledSequence(0, [5, 6], i, 1, [3], SamplingParams(max_tokens=1)) for i in range(2)]
    with caplog.at_level(logging.WARNING):
        got = [runner.run([row], []) for row in rows]
    honest = runner_of(llama, backend(None))
    assert got == [honest.run([row], []) for row in rows]
    assert recorder.num_recorded == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "run eagerly" in caplog.text


def sizes_of(
    runner: TorchModelRunner, monkeypatch: pytest.MonkeyPatch, *, waits: bool
) -> list[int]:
    """Return the numbers of tokens of the passes that follow; with `waits` they read a number."""
    forward = runner._forward
    sizes: list[int] = []

    def watched(ids: Tensor, positions: Tensor, last: Tensor, attention: Any) -> Tensor:
        sizes.append(len(ids))
        assert not waits or int(ids.sum()) >= 0
        return forward(ids, positions, last, attention)

    monkeypatch.setattr(runner, "_forward", watched)
    return sizes


def decoding(num_rows: int) -> list[ScheduledSequence]:
    sampling = SamplingParams(max_tokens=1)
    return [ScheduledSequence(row, [5, 6], 1, 1, [row], sampling) for row in range(num_rows)]


def test_steps_that_cannot_be_recorded_are_not_padded(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(llama, backend(Recorder()))
    sizes = sizes_of(runner, monkeypatch, waits=True)
    runner.run(decoding(1), [])
    sizes.clear()
    runner.run(decoding(5), [])
    assert sizes == [5]


def test_steps_without_memory_to_record_them_are_not_padded(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        raise torch.OutOfMemoryError("out of memory")

    runner = runner_of(llama, backend(record))
    sizes = sizes_of(runner, monkeypatch, waits=False)
    for _ in range(2):
        runner.run(decoding(5), [])
    assert sizes == [6, 5]


def test_warming_a_model_that_cannot_be_recorded_runs_each_variant_once(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(llama, backend(Recorder(), Dense(num_rows=300, num_blocks=100)))
    sizes = sizes_of(runner, monkeypatch, waits=True)
    runner.warm()
    # Before and while it is recorded, and eagerly.
    assert sizes == [256] * 3


def test_recording_is_dropped_with_its_buffers(llama: Path) -> None:
    recorder, dense = Recorder(), Dense(num_blocks=8)
    ids = random.Random(1).choices(range(256), k=40)
    blocks = list(range(20))
    got, expected = (
        [
            runner.run([ScheduledSequence(0, ids, 0, 3, blocks)], []),
            *(
                runner.run(
                    [
                        ScheduledSequence(
                            0, ids[: end + 1], end, 1, blocks, SamplingParams(max_tokens=1)
                        )
                    ],
                    [],
                )
                for end in range(3, 39)
            ),
        ]
        for runner in (runner_of(llama, backend(recorder, dense)), runner_of(llama, "cpu"))
    )
    assert got == expected
    assert recorder.num_replayed == 36
    assert 2 <= recorder.num_recorded < 9


def test_warm_records_all_sizes_without_writing_blocks(llama: Path) -> None:
    recorder = Recorder()
    runner = runner_of(llama, backend(recorder))
    before = [cache.clone() for cache in runner._own_caches]
    runner.warm()
    sizes = recorded_sizes(runner.limits)
    assert sizes == (1, 2, 4, 6, 8, 16, 32, 64, 128, 192, 256)
    assert recorder.num_recorded == len(sizes)
    scratch = runner.limits.num_blocks
    for cache, old in zip(runner._own_caches, before, strict=True):
        assert torch.equal(cache[:scratch], old[:scratch])
    sampling = SamplingParams(max_tokens=1)
    runner.run([ScheduledSequence(0, [5], 0, 1, [3], sampling)] * 5, [])
    runner.run([ScheduledSequence(0, [5] * 90, 89, 1, list(range(23)), sampling)] * 3, [])
    replayed = recorder.num_replayed
    runner.run([ScheduledSequence(0, [5] * 90, 13, 77, list(range(23)), sampling)] * 2, [])
    assert recorder.num_replayed == replayed + 1, "a step with prompts is replayed, too"
    assert recorder.num_recorded == len(sizes)


def test_steps_with_prompts_are_recorded_by_warming_alone(llama: Path) -> None:
    recorder = Recorder()
    runner = runner_of(llama, backend(recorder))
    prompt = ScheduledSequence(0, [5] * 9, 0, 9, [1, 2, 3], SamplingParams(max_tokens=1))
    expected = runner.run([prompt], [])
    assert recorder.num_recorded == 0
    runner.warm()
    assert runner.run([prompt], []) == expected
    assert recorder.num_replayed > 0


def test_recordings_share_the_memory_of_their_logits(llama: Path) -> None:
    recorder, addresses = Recorder(), set()

    def noted(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        addresses.add(function().untyped_storage().data_ptr())
        return recorder(function)

    runner = runner_of(llama, backend(noted))
    runner.warm()
    assert recorder.num_recorded > 1
    assert addresses == {runner._recorded_logits.untyped_storage().data_ptr()}


def test_step_that_needs_more_memory_than_recordings_have_runs_eagerly(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    runner = runner_of(llama, backend(recorder))
    runner.warm()
    prepare = runner._operations.prepare
    monkeypatch.setattr(
        runner._operations,
        "prepare",
        lambda *args, may_grow=True, **options: prepare(*args, **options) if may_grow else None,
    )
    replayed = recorder.num_replayed
    prompt = ScheduledSequence(0, [5] * 9, 0, 9, [1, 2, 3], SamplingParams(max_tokens=1))
    assert len(runner.run([prompt], [])) == 1
    assert recorder.num_replayed == replayed


def test_large_prefill_keeps_recordings_valid(llama: Path) -> None:
    recorder = Recorder()
    dense = Dense(num_rows=1, num_blocks=1)
    runner = runner_of(llama, backend(recorder, dense), step_tokens=64)
    runner.warm()
    grown, recorded = dense.num_grown, recorder.num_recorded
    ids, blocks = [5] * 90, list(range(23))
    runner.run([ScheduledSequence(0, ids, 26, 64, blocks)], [])
    runner.run([ScheduledSequence(n, ids, 80, 10, blocks) for n in range(6)], [])
    runner.run([ScheduledSequence(0, ids, 89, 1, blocks, SamplingParams(max_tokens=1))], [])
    assert (dense.num_grown, recorder.num_recorded) == (grown, recorded)


@pytest.fixture
def device() -> Iterator[FakeCuda]:
    with fake_cuda() as device:
        yield device


def test_function_that_waits_is_never_captured(device: FakeCuda) -> None:
    graphs = CudaGraphCache(CudaGraphs(torch.device("cuda", 0)))
    numbers = torch.ones(3, device="cuda")
    assert graphs.run(1, lambda: numbers * float(numbers.sum())).shape == (3,)
    assert not graphs.can_record
    assert device.num_captures == 0
    assert device.sync_debug_mode == 0


def test_function_that_waits_once_is_captured(device: FakeCuda) -> None:
    numbers, kept = torch.ones(3, device="cuda"), dict[str, float]()

    def scaled() -> Tensor:
        if not kept:
            kept["sum"] = float(numbers.sum())
        return numbers * kept["sum"]

    graphs = CudaGraphCache(CudaGraphs(torch.device("cuda", 0)))
    graphs.run(1, scaled)
    assert graphs.can_record
    assert (device.num_captures, device.num_replays) == (1, 1)


def test_failed_capture_leaves_the_current_stream(device: FakeCuda) -> None:
    stream = torch.cuda.current_stream()

    def synchronised() -> Tensor:
        torch.cuda.synchronize()  # which torch does not refuse outside of a capture
        return torch.ones(3, device="cuda")

    graphs = CudaGraphCache(CudaGraphs(torch.device("cuda", 0)))
    graphs.run(1, synchronised)
    assert device.num_captures == 1
    assert not graphs.can_record
    assert torch.cuda.current_stream() is stream


def test_unrelated_errors_are_raised() -> None:
    def record(function: Any) -> Any:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    graphs = CudaGraphCache(record)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        graphs.run(1, partial(torch.zeros, 1))


def test_out_of_memory_affects_one_recording(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()

    def record(function: Any) -> Any:
        if int(function()) == 1:
            raise torch.OutOfMemoryError("out of memory")
        return recorder(function)

    graphs = CudaGraphCache(record)
    for key in (0, 1, 1, 2):
        assert int(graphs.run(key, partial(torch.full, (1,), float(key)))) == key
    assert recorder.num_recorded == 2
    assert caplog.text.count("not enough memory to record steps of key=1") == 1


def test_steps_are_padded_to_few_sizes() -> None:
    assert bucket_sizes(1) == (1,)
    assert bucket_sizes(6) == (1, 2, 4, 6)
    assert bucket_sizes(128) == (1, 2, 4, 8, 16, 32, 64, 128)


def test_recordings_are_bounded() -> None:
    recorder = Recorder()
    graphs = CudaGraphCache(recorder)
    for key in range(200):
        assert int(graphs.run(key, partial(torch.full, (1,), float(key)))) == key
    assert len(graphs) == MAX_RECORDINGS
    assert recorder.num_recorded == 200
    assert int(graphs.run(199, partial(torch.full, (1,), 0.0))) == 199
    assert int(graphs.run(0, partial(torch.full, (1,), 7.0))) == 7


def test_staged_arrays_keep_their_addresses() -> None:
    staging = Staging(torch.device("cpu"), 4096)
    first = staging.put([np.arange(5), np.ones((2, 3), np.float32), np.zeros(0, np.int64)])
    second = staging.put([np.arange(5) + 7, np.full((2, 3), 3, np.float32)])
    assert first[0].tolist() == second[0].tolist() == [7, 8, 9, 10, 11]
    assert first[1].tolist() == second[1].tolist() == [[3.0] * 3] * 2
    assert first[1].data_ptr() == second[1].data_ptr()
    assert first[1].data_ptr() % 256 == first[0].data_ptr() % 256
    assert first[2].shape == (0,)


def test_oversized_arrays_are_copied_separately() -> None:
    staging = Staging(torch.device("cpu"), 512)
    few, many = np.arange(8), np.arange(100)
    assert staging.fits([few])
    assert not staging.fits([few, many])
    found = staging.put([many, few])
    assert found[0].tolist() == many.tolist()
    assert found[1].tolist() == few.tolist()


def test_cpu_arrays_are_not_copied() -> None:
    array = np.arange(4)
    (found,) = Staging(torch.device("cpu"), 0).put([array])
    array[0] = 9
    assert found.tolist() == [9, 1, 2, 3]
