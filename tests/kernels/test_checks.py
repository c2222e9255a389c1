"""Every implementation checks its arguments and names the invalid one in the error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conure.kernels import ops
from conure.kernels.planning.plan import build_plan

CACHE = torch.zeros(2, 16, 2, 8)
OTHER_DEVICE = torch.device("meta")
STRIDED = torch.zeros(2, 4, 16)[..., ::2]


def test_unknown_implementation_raises_an_error() -> None:
    with pytest.raises(
        ValueError, match="implementation must be one of reference, cpu, invariant, triton"
    ):
        ops.implementation("cuda")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(2, 4)}, "query must be"),
        ({"query": torch.zeros(1, 4, 8)}, "query has 1 tokens"),
        ({"query": torch.zeros(2, 4, 6)}, "query has head size 6"),
        ({"query": torch.zeros(2, 3, 8)}, "query has 3 heads"),
        ({"query": torch.zeros(2, 4, 8, dtype=torch.float16)}, "query.* one dtype"),
        ({"query": torch.zeros(2, 4, 8, dtype=torch.float64)}, "query.* one dtype"),
        ({"query": STRIDED}, "query must have"),
        ({"key_cache": torch.zeros(2, 16, 2)}, "key_cache must be"),
        ({"key_cache": torch.zeros(2, 8, 2, 8)}, "value_cache must be"),
        ({"key_cache": torch.zeros(2, 16, 8, 2).mT}, "key_cache must have"),
        ({"key_cache": torch.zeros(4, 16, 2, 8)[::2]}, "key_cache must have"),
        ({"key_cache": CACHE[:1], "value_cache": CACHE[:1]}, "plan reads block 1, key_cache has 1"),
        (
            {"key_cache": torch.zeros(2, 8, 2, 8), "value_cache": torch.zeros(2, 8, 2, 8)},
            "key_cache has blocks of 8",
        ),
        ({"value_cache": torch.zeros(2, 16, 1, 8)}, "value_cache must be"),
        ({"value_cache": torch.zeros(2, 16, 2)}, "value_cache must be"),
        ({"value_cache": CACHE.bfloat16()}, "value_cache must have one dtype"),
        ({"value_cache": CACHE.to(OTHER_DEVICE)}, "value_cache is on meta, but query is on"),
        ({"key_cache": CACHE.to(OTHER_DEVICE)}, "key_cache is on meta, but query is on"),
        ({"query": torch.zeros(2, 0, 8)}, "query has 0 heads"),
        (dict.fromkeys(("query", "key_cache", "value_cache"), None), "query must have a floating"),
        ({"key_cache": CACHE[:, :, :0], "value_cache": CACHE[:, :, :0]}, "must have heads"),
        ({"value_cache": CACHE[..., :0]}, "must have heads"),
        ({"value_cache": torch.zeros(2, 16, 4, 8)[:, :, ::2].mT.contiguous().mT}, "value_cache"),
        ({"plan": build_plan([1, 1], [17, 2], [[0, 2], [0]], block_size=16)}, "plan reads block 2"),
        (
            {"plan": build_plan([3], [17], [[0, 1]], block_size=16)},
            "query has 2 tokens, the plan has 3",
        ),
        ({"scale": float("nan")}, "scale"),
        ({"scale": 0.0}, "scale"),
        ({"scale": -0.1}, "scale"),
        ({"softcap": float("inf")}, "softcap"),
        ({"sinks": torch.zeros(4, dtype=torch.int64)}, "sinks must have a floating"),
        ({"window": 0}, "window"),
        ({"softcap": 0.0}, "softcap"),
        ({"sinks": torch.zeros(2)}, "sinks must be"),
        ({"sinks": torch.zeros(4, device=OTHER_DEVICE)}, "sinks is on meta"),
        ({"out": torch.zeros(2, 4, 7)}, "out must be"),
        ({"out": torch.zeros(2, 4, 8, dtype=torch.float64)}, "out must be"),
        ({"out": STRIDED}, "out must have"),
        ({"out": torch.zeros(2, 4, 8, device=OTHER_DEVICE)}, "out is on meta"),
    ],
)
def test_attention_checks_arguments(
    operations: ops.AttentionOperations, change: dict[str, Any], message: str
) -> None:
    arguments: dict[str, Any] = {
        "query": torch.zeros(2, 4, 8),
        "key_cache": CACHE,
        "value_cache": CACHE,
        "plan": build_plan([1, 1], [17, 2], [[0, 1], [0]], block_size=16),
        "scale": 1.0,
    }
    operations.attention(**arguments)
    # None means the valid argument, cast to integers.
    change = {name: arguments[name].int() if new is None else new for name, new in change.items()}
    with pytest.raises(ValueError, match=message):
        operations.attention(**{**arguments, **change})
    if not change.keys() - {"query", "key_cache", "value_cache", "plan", "window"}:
        del arguments["scale"]
        with pytest.raises(ValueError, match=message):
            operations.prepare(**{**arguments, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"outputs": torch.zeros(2, 3)}, "outputs must be"),
        ({"lse": torch.zeros(2, 2)}, "lse must be"),
        ({"slots": torch.zeros(2, 1)}, "slots must be"),
        ({"slots": torch.zeros(2, dtype=torch.int64)}, "slots must be"),
        ({"sinks": torch.zeros(2)}, "sinks must be"),
        ({"sinks": torch.zeros(3, dtype=torch.int64)}, "sinks must have a floating"),
        ({"outputs": torch.zeros(2, 3, 4, dtype=torch.int64)}, "outputs must have a floating"),
        ({"lse": torch.zeros(2, 3, dtype=torch.int64)}, "lse must have a floating"),
        ({"slots": torch.tensor([[2], [0]])}, "slots must be from -1 to 1, got 0 to 2"),
        ({"slots": torch.tensor([[0], [-2]])}, "slots must be from -1 to 1, got -2 to 0"),
        ({"slots": torch.tensor([[0], [-1]])}, "slots must name at least one partial"),
        ({"lse": torch.zeros(2, 3, device=OTHER_DEVICE)}, "lse is on meta"),
    ],
)
def test_merge_checks_arguments(
    operations: ops.AttentionOperations, change: dict[str, Any], message: str
) -> None:
    arguments: dict[str, Any] = {
        "outputs": torch.zeros(2, 3, 8),
        "lse": torch.zeros(2, 3),
        "slots": torch.zeros(2, 1, dtype=torch.int64),
    }
    operations.merge(**arguments)
    with pytest.raises(ValueError, match=message):
        operations.merge(**{**arguments, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": torch.zeros(3, 2)}, "key must be"),
        ({"key": torch.zeros(3, 2, 9)}, "key must be"),
        ({"value": torch.zeros(3, 1, 8)}, "value must be"),
        ({"value": torch.zeros(2, 2, 8)}, "slots must be"),
        ({"slots": torch.arange(2)}, "slots must be"),
        ({"slots": torch.arange(3, dtype=torch.int32)}, "slots must be .* torch.int32"),
        ({"slots": torch.tensor([0, 1, 32])}, "slots must be from 0 to 31, got 0 to 32"),
        ({"slots": torch.tensor([0, 1, -1])}, "slots must be from 0 to 31, got -1 to 1"),
        ({"value_cache": torch.zeros(1, 16, 2, 8)}, "value_cache must be"),
        ({"key_cache": torch.zeros(2, 16, 2, 16)[..., ::2]}, "key_cache must have"),
        ({"value": torch.zeros(3, 2, 8, device=OTHER_DEVICE)}, "value is on meta"),
    ],
)
def test_store_kv_checks_arguments(
    operations: ops.AttentionOperations, change: dict[str, Any], message: str
) -> None:
    arguments: dict[str, Any] = {
        "key": torch.zeros(3, 2, 8),
        "value": torch.zeros(3, 2, 8),
        "key_cache": CACHE.clone(),
        "value_cache": CACHE.clone(),
        "slots": torch.arange(3),
    }
    operations.store_kv(**arguments)
    with pytest.raises(ValueError, match=message):
        operations.store_kv(**{**arguments, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": torch.zeros(1)}, "source must be"),
        ({"destination": torch.zeros(2, dtype=torch.int64)}, "destination must be"),
        ({"caches": [torch.zeros(2, 8)]}, r"caches\[0\] must be"),
        ({"source": torch.tensor([2])}, "source must be from 0 to 1, got 2 to 2"),
        ({"source": torch.tensor([-1])}, "source must be from 0 to 1"),
        ({"destination": torch.tensor([-1])}, "destination must be from 0 to 1"),
        ({"caches": [CACHE.clone(), CACHE[:1].clone()]}, "destination must be from 0 to 0"),
        ({"caches": [CACHE, CACHE.to(OTHER_DEVICE)]}, r"caches\[1\] is on meta"),
    ],
)
def test_copy_blocks_checks_arguments(
    operations: ops.AttentionOperations, change: dict[str, Any], message: str
) -> None:
    arguments: dict[str, Any] = {
        "caches": [CACHE.clone()],
        "source": torch.tensor([0]),
        "destination": torch.tensor([1]),
    }
    operations.copy_blocks(**arguments)
    with pytest.raises(ValueError, match=message):
        operations.copy_blocks(**{**arguments, **change})


@pytest.mark.parametrize("name", ["num_blocks", "block_size", "heads", "dim"])
def test_new_cache_checks_arguments(operations: ops.AttentionOperations, name: str) -> None:
    arguments: dict[str, Any] = {"num_blocks": 2, "block_size": 16, "heads": 2, "dim": 8}
    assert operations.new_cache(**arguments, dtype=torch.float32).shape == (2, 16, 2, 8)
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        operations.new_cache(**{**arguments, name: 0}, dtype=torch.float32)
    with pytest.raises(ValueError, match="dtype must be"):
        operations.new_cache(**arguments, dtype=torch.int32)


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((2, 2, 288), torch.float32, "query has head size 288"),
        ((2, 258, 8), torch.float32, "query has 129 heads per KV head"),
        ((2, 2, 8), torch.float64, "query is torch.float64"),
    ],
)
def test_triton_checks_what_kernels_support(
    shape: tuple[int, ...], dtype: torch.dtype, message: str
) -> None:
    cache = torch.zeros(2, 16, 2, shape[2], dtype=dtype)
    plan = build_plan([1, 1], [17, 2], [[0, 1], [0]], block_size=16)
    with pytest.raises(ValueError, match=message):
        ops.implementation("triton").attention(
            torch.zeros(shape, dtype=dtype), cache, cache, plan, scale=1.0
        )
