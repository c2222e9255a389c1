"""The batch-invariant mode: a context's logits do not depend on the batch, bit by bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conure.engine.models import batch_invariance
from conure.engine.protocol import EngineError, EngineLimits, SamplingParams
from conure.engine.runner import backend
from conure.engine.runner.base import ScheduledSequence
from conure.engine.runner.torch_runner import TorchModelRunner

from .. import shrunk
from ..random_calls import RandomCall, run_calls

BLOCK = 16
LENGTH = 300
DTYPES = ("float32", "bfloat16")

BY_MATRIX_LIBRARY = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="the CPU has no bfloat16"
)


def runner_of(folder: Path, dtype: str, **options: Any) -> TorchModelRunner:
    chosen = {"num_blocks": 120, "block_size": BLOCK, "batch_invariant": True, **options}
    return shrunk.runner_on(folder, dtype=dtype, **chosen)


@pytest.fixture(
    scope="module",
    params=[
        *((family, dtype) for family in ("llama", "qwen3", "mistral") for dtype in DTYPES),
        pytest.param(("gemma2", "bfloat16"), marks=BY_MATRIX_LIBRARY),
    ],
    ids="-".join,
)
def runner(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> TorchModelRunner:
    """Return runners of a plain decoder, one with head norms, one with a window, and of modules."""
    family, dtype = request.param
    folder = tmp_path_factory.mktemp("model") / family
    changes: dict[str, Any] = {"max_position_embeddings": 1024}
    if family == "mistral":
        changes["sliding_window"] = 150
    return runner_of(shrunk.write(folder, family, **changes), dtype)


def ids_of(seed: int, length: int = LENGTH) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def whole(runner: TorchModelRunner, ids: Sequence[int]) -> Tensor:
    """Return the logits of all tokens of a context that runs alone and at once."""
    return runner._logits(
        [ScheduledSequence(0, list(ids), 0, len(ids), list(range(-(-len(ids) // BLOCK))))]
    )


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_logits_do_not_depend_on_prefill_chunks(runner: TorchModelRunner, chunk: int) -> None:
    ids, blocks = ids_of(1), list(range(19))
    expected = whole(runner, ids)
    found = [
        runner._logits([ScheduledSequence(0, ids, at, min(chunk, LENGTH - at), blocks)])
        for at in range(0, LENGTH, chunk)
    ]
    assert torch.equal(torch.cat(found), expected)


@pytest.mark.parametrize("num", [1, 2, 5, 15])
def test_logits_do_not_depend_on_the_batch(runner: TorchModelRunner, num: int) -> None:
    rng = random.Random(num)
    common = ids_of(2, 200 // BLOCK * BLOCK)
    shared = list(range(len(common) // BLOCK))
    for is_shared in (True, False):
        contexts = [common + ids_of(10 + each, rng.randint(1, 30)) for each in range(num)]
        expected = [whole(runner, ids)[len(common) :] for ids in contexts]
        runner._logits([ScheduledSequence(0, common, 0, len(common), shared)])
        rows, free = [], iter(range(40, 120))
        for index, ids in enumerate(contexts):
            if is_shared:
                blocks, start = [*shared, next(free), next(free)], len(common)
            elif index < 4:
                blocks, start = [next(free) for _ in range(-(-len(ids) // BLOCK))], 0
            else:
                break
            rows.append(ScheduledSequence(index, ids, start, len(ids) - start, blocks))
        rng.shuffle(rows)
        found = torch.split(runner._logits(rows), [row.num_new for row in rows])
        for row, logits in zip(rows, found, strict=True):
            tail = logits[len(common) - row.start :]
            assert torch.equal(tail, expected[row.context])


@pytest.mark.parametrize("dtype", DTYPES)
def test_seed_gives_same_tokens_in_a_batch(dtype: str, tmp_path: Path) -> None:
    folder = shrunk.write(tmp_path, "llama", max_position_embeddings=1024)
    runner = runner_of(folder, dtype, step_tokens=40)
    common = ids_of(3, 150)
    calls = [
        RandomCall(
            common + ids_of(number, 5 + number),
            SamplingParams(max_tokens=20, temperature=0.8, seed=number, ignore_eos=True),
            arrival=number // 2,
            abort=None,
        )
        for number in range(6)
    ]
    together = run_calls(runner, calls)
    for number, call in enumerate(calls):
        assert run_calls(runner, [call])[0] == together[number]


def test_batch_dependent_logits_are_rejected() -> None:
    limits = EngineLimits(64, block_size=16, num_blocks=16, step_tokens=64, max_sequences=4)

    def logits(rows: Sequence[ScheduledSequence]) -> Tensor:
        num = sum(row.num_new for row in rows)
        return torch.full((num, 3), 1.0 / (num if len(rows) > 1 else 1))

    with pytest.raises(EngineError, match="a token in a batch with 1 others gives other logits"):
        batch_invariance.check(logits, limits, 256)
    with pytest.raises(EngineError, match="too small for the check"):
        batch_invariance.check(logits, EngineLimits(1, 1, 1, 1, 1), 256)


def test_gpu_rejects_batch_invariance() -> None:
    with pytest.raises(EngineError, match="batch_invariant needs a CPU") as raised:
        backend.create_backend(torch.device("cuda"), batch_invariant=True)
    assert raised.value.code == "engine.bad_option"
