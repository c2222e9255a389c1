"""The batch-invariant mode: in bfloat16 too a context's logits are its own, bit by bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conure.engine import backend, invariance
from conure.engine.api import EngineError, Limits, Sampling
from conure.engine.local import LocalRunner
from conure.engine.runner import Row

from . import shrunk
from .test_flight import Call, answers

BLOCK = 16
LENGTH = 300

pytestmark = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="the CPU has no bfloat16"
)


def runner_of(folder: Path, **options: Any) -> LocalRunner:
    chosen = {"num_blocks": 120, "block_size": BLOCK, "batch_invariant": True, **options}
    return LocalRunner(model=str(folder), dtype="bfloat16", **chosen)


@pytest.fixture(scope="module", params=["llama", "qwen3", "mistral", "gemma2"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LocalRunner:
    """By the lean pass, with head norms, with a window, and by the modules of transformers."""
    folder = tmp_path_factory.mktemp("model") / request.param
    changes: dict[str, Any] = {"max_position_embeddings": 1024}
    if request.param == "mistral":
        changes["sliding_window"] = 150
    return runner_of(shrunk.write(folder, request.param, **changes))


def ids_of(seed: int, length: int = LENGTH) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def whole(runner: LocalRunner, ids: Sequence[int]) -> Tensor:
    """Return the logits of all tokens of a context that runs alone and at once."""
    return runner._logits([Row(0, list(ids), 0, len(ids), list(range(-(-len(ids) // BLOCK))))])


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_logits_are_the_same_however_the_prompt_is_cut(runner: LocalRunner, chunk: int) -> None:
    ids, blocks = ids_of(1), list(range(19))
    wanted = whole(runner, ids)
    found = [
        runner._logits([Row(0, ids, at, min(chunk, LENGTH - at), blocks)])
        for at in range(0, LENGTH, chunk)
    ]
    assert torch.equal(torch.cat(found), wanted)


@pytest.mark.parametrize("num", [1, 2, 5, 15])
def test_logits_are_the_same_in_a_batch_with_and_without_a_shared_prefix(
    runner: LocalRunner, num: int
) -> None:
    rng = random.Random(num)
    common = ids_of(2, 200 // BLOCK * BLOCK)
    shared = list(range(len(common) // BLOCK))
    for is_shared in (True, False):
        contexts = [common + ids_of(10 + each, rng.randint(1, 30)) for each in range(num)]
        wanted = [whole(runner, ids)[len(common) :] for ids in contexts]
        runner._logits([Row(0, common, 0, len(common), shared)])
        rows, free = [], iter(range(40, 120))
        for index, ids in enumerate(contexts):
            if is_shared:
                blocks, start = [*shared, next(free), next(free)], len(common)
            elif index < 4:
                blocks, start = [next(free) for _ in range(-(-len(ids) // BLOCK))], 0
            else:
                break
            rows.append(Row(index, ids, start, len(ids) - start, blocks))
        rng.shuffle(rows)
        found = torch.split(runner._logits(rows), [row.num_new for row in rows])
        for row, logits in zip(rows, found, strict=True):
            tail = logits[len(common) - row.start :]
            assert torch.equal(tail, wanted[row.context])


def test_a_seed_gives_the_same_tokens_alone_and_in_company(tmp_path: Path) -> None:
    folder = shrunk.write(tmp_path, "llama", max_position_embeddings=1024)
    runner = runner_of(folder, step_tokens=40)
    common = ids_of(3, 150)
    calls = [
        Call(
            common + ids_of(number, 5 + number),
            Sampling(max_tokens=20, temperature=0.8, seed=number, ignore_eos=True),
            arrival=number // 2,
            abort=None,
        )
        for number in range(6)
    ]
    together = answers(runner, calls)
    for number, call in enumerate(calls):
        assert answers(runner, [call])[0] == together[number]


def test_what_depends_on_its_company_is_refused_with_the_reason() -> None:
    limits = Limits(64, block_size=16, num_blocks=16, step_tokens=64, max_sequences=4)

    def logits(rows: Sequence[Row]) -> Tensor:
        num = sum(row.num_new for row in rows)
        return torch.full((num, 3), 1.0 / (num if len(rows) > 1 else 1))

    with pytest.raises(EngineError, match="a token beside 1 others has other logits than alone"):
        invariance.check(logits, limits, 256)
    with pytest.raises(EngineError, match="too small for the trial"):
        invariance.check(logits, Limits(1, 1, 1, 1, 1), 256)


def test_a_gpu_refuses_in_one_sentence() -> None:
    with pytest.raises(EngineError, match="batch_invariant is for the CPU") as raised:
        backend.of(torch.device("cuda"), batch_invariant=True)
    assert raised.value.code == "engine.bad_option"
