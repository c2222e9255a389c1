"""The local engine on a GPU: what the doubles prove elsewhere, on the real thing.

Run with `TRITON_INTERPRET=0`, which selects compiled kernels.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conure.engine.protocol import SamplingParams
from conure.engine.runner import backend
from conure.engine.runner.base import ScheduledSequence
from conure.engine.runner.torch_runner import TorchModelRunner
from conure.engine.runner.warmup import recorded_sizes
from conure.engine.sampling import batch, sampler
from conure.kernels import sampling

from .. import shrunk
from .test_cuda_graphs import FAMILIES, SETTINGS, Crowd

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") != "0",
        reason="needs a GPU, and TRITON_INTERPRET=0",
    ),
]
BLOCK = 16


def runner_of(
    folder: Path, where: str | backend.Backend, dtype: str = "float32", **options: Any
) -> TorchModelRunner:
    # Few tokens, so that there are few recordings.
    chosen: dict[str, Any] = {
        "step_tokens": 32,
        "num_blocks": 256,
        "block_size": BLOCK,
        "max_sequences": 6,
    }
    chosen |= {"min_saved": 0, **options}
    return shrunk.runner_on(folder, where, dtype=dtype, **chosen)


def eager() -> backend.Backend:
    """Return the GPU without recordings."""
    made = backend.create_backend(torch.device("cuda", 0))
    return backend.Backend(made.device, made.operations, made.fused)


@pytest.fixture(scope="module", params=(*FAMILIES, "qwen2"))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shrunk.write(tmp_path_factory.mktemp("model") / request.param, request.param)


@pytest.mark.parametrize("seed", range(3))
def test_replays_match_eager_steps_and_cpu(folder: Path, seed: int) -> None:
    options: dict[str, Any] = {"num_blocks": 400, "block_size": 4}
    lives = [
        Crowd(runner_of(folder, where, **options), seed).live(80)
        for where in ("cuda", eager(), "cpu")
    ]
    assert lives[0] == lives[1] == lives[2]


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_greedy_tokens_equal_transformers(folder: Path, chunk: int) -> None:
    runner = runner_of(folder, "cuda")
    runner.warm()
    rng = random.Random(chunk)
    rows = [ScheduledSequence(i, rng.choices(range(256), k=20 + 9 * i), 0, 0, []) for i in range(5)]
    decode(runner, rows, 30, chunk)
    reference = shrunk.load(folder)
    ties = sum(shrunk.count_ties(reference, row.ids, 20 + 9 * row.context) for row in rows)
    assert ties <= 2


def decode(
    runner: TorchModelRunner, rows: Sequence[ScheduledSequence], num: int, chunk: int
) -> None:
    """Generate `num` tokens greedily for each row."""
    free = list(range(runner.limits.num_blocks))
    random.Random(0).shuffle(free)
    ends = [len(row.ids) + num for row in rows]
    while pending := [r for r, end in zip(rows, ends, strict=True) if len(r.ids) < end]:
        for row in pending:
            row.num_new = min(chunk, len(row.ids) - row.start)
            is_last = row.start + row.num_new == len(row.ids)
            row.sampling = SamplingParams(max_tokens=64) if is_last else None
            while len(row.blocks) * runner.limits.block_size < row.start + row.num_new:
                row.blocks.append(free.pop())
        sampled = iter(runner.run(pending, []))
        for row in pending:
            row.start += row.num_new
            if row.sampling is not None:
                row.ids.append(next(sampled))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_close_to_exact_logprobs(folder: Path, dtype: str) -> None:
    sampling = SamplingParams(max_tokens=9, logprobs=1)
    ids = random.Random(4).choices(range(256), k=40)
    logprobs = []
    for where, kind in (("cpu", "float32"), ("cuda", dtype)):
        row = ScheduledSequence(0, ids, 0, 40, [3, 1, 2], sampling, 40)
        runner_of(folder, where, kind).run([row], [])
        assert row.logprob is not None
        logprobs.append(row.logprob.logprob)
    assert abs(logprobs[0] - logprobs[1]) < 0.5


@pytest.mark.parametrize("width", [300, 128_256])
def test_device_samples_same_tokens_as_cpu(width: int) -> None:
    rows = []
    for index in range(32):
        ids = random.Random(index).choices(range(256), k=9 + index)
        settings = {**SETTINGS[index % len(SETTINGS)], "seed": index}
        rows.append(
            ScheduledSequence(
                index, ids, len(ids) - 1, 1, [0], SamplingParams(max_tokens=9, **settings), 4
            )
        )
    rows[3].mask = bytes([255] * 20)
    logits = 3 * torch.randn(len(rows), width, generator=torch.Generator().manual_seed(1))
    expected = batch.sample(logits.clone(), rows, (5,))
    wishes = batch.make_batch(rows, (5,), width)
    assert wishes is not None
    there: sampler.LogitOpsBatch[Tensor] = sampler.LogitOpsBatch(
        *(torch.from_numpy(array).cuda() for array in wishes.ops)
    )
    for name in ("reference", "triton"):
        operations = sampling.implementation(name)
        found = sampler.sample_tokens(logits.cuda(), there, wishes.num_top, operations)
        assert batch.unpack(found.tolist(), rows, wishes) == expected


def test_noise_equals_cpu_bit_for_bit() -> None:
    keys = torch.tensor([0, 1, -1, 2**62, -(2**63)])
    assert torch.equal(sampling.noise(keys.cuda(), 1000).cpu(), sampling.noise(keys, 1000))


def test_decode_step_is_recorded_without_synchronising(folder: Path) -> None:
    runner = runner_of(folder, "cuda")
    runner.warm()
    graphs = runner._graphs
    assert graphs is not None
    assert graphs.can_record
    # The kernels have several variants of each size.
    assert {key[0] for key in graphs._replays if isinstance(key, tuple)} == set(
        recorded_sizes(runner.limits)
    )
    num_recorded = len(graphs)
    runner.warm()
    assert len(graphs) == num_recorded
    row = ScheduledSequence(0, [5, 6], 1, 1, [3], None)
    torch.cuda.set_sync_debug_mode("error")
    try:
        runner.run([row], [])  # nothing is sampled, so nothing is copied to the host
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
