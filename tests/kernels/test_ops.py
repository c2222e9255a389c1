"""Every implementation computes what the reference defines, and refuses what does not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from conure.kernels import ops, tiles
from conure.kernels.plan import build

from .trees import random_caches, random_rows

BLOCK = 16
BOUNDS = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 3e-2}
"""Largest error against the float64 reference on the same, already rounded, inputs of unit scale.

bfloat16 keeps 8 bits: results up to 4 round by up to 2**-7 twice (part and output)."""


@pytest.fixture(params=ops.NAMES)
def operations(request: pytest.FixtureRequest) -> ops.Operations:
    return ops.implementation(request.param)


@pytest.fixture(params=["whole", "cut"])
def cpu_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ops.Operations:
    if request.param == "cut":
        monkeypatch.setattr(tiles, "TILE_QUERIES", 5)
        monkeypatch.setattr(tiles, "SCORE_BYTES", 4096)
        monkeypatch.setattr(tiles, "SPARE_COLUMNS", 8)
        monkeypatch.setattr(tiles, "RUN_TOKENS", 6)
    return ops.implementation("cpu")


def inputs(
    seed: int,
    *,
    levels: int,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    value_dim: int = 16,
    min_saved: int = 0,
    block_size: int = BLOCK,
) -> tuple[Tensor, Tensor, Tensor, Any]:
    rows = random_rows(seed, levels=levels, block_size=block_size)
    plan = build(*rows[:3], block_size=block_size, min_saved=min_saved)
    caches = random_caches(
        seed,
        rows,
        block_size=block_size,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
    )
    generator = torch.Generator().manual_seed(seed + 1)
    query = torch.randn(plan.num_queries, heads, head_dim, generator=generator, dtype=torch.float64)
    return query, *caches, plan


def check(
    operations: ops.Operations,
    dtype: torch.dtype,
    made: tuple[Tensor, Tensor, Tensor, Any],
    **variant: Any,
) -> None:
    query, keys, values, plan = made
    query, keys, values = query.to(dtype), keys.to(dtype), values.to(dtype)
    wanted = ops.implementation("reference").attention(
        query.double(), keys.double(), values.double(), plan, scale=0.3, **variant
    )
    poisoned = query.new_full(wanted.shape, float("nan"))
    got = operations.attention(query, keys, values, plan, scale=0.3, out=poisoned, **variant)
    assert got is poisoned
    assert got.dtype == dtype
    assert not got.isnan().any(), "an output was left unwritten or read a slot outside its row"
    assert (got.double() - wanted).abs().max().item() <= BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("levels", [1, 2, 3, 4])
@pytest.mark.parametrize("min_saved", [0, 10**9], ids=["shared", "plain"])
def test_attention_over_random_trees_is_what_the_reference_says(
    operations: ops.Operations, dtype: torch.dtype, levels: int, min_saved: int
) -> None:
    for seed in range(6):
        made = inputs(100 * levels + seed, levels=levels, min_saved=min_saved)
        check(operations, dtype, made)


def test_queries_that_fill_a_step_up_change_no_other(operations: ops.Operations) -> None:
    query, keys, values, plan = inputs(3, levels=2)
    query, keys, values = query.float(), keys.float(), values.float()
    wanted = operations.attention(query, keys, values, plan, scale=0.3)
    longer = torch.cat((query, query.new_full((5, *query.shape[1:]), float("nan"))))
    got = operations.attention(longer, keys, values, plan, scale=0.3)
    assert got.shape[0] == len(query) + 5
    assert torch.equal(got[: len(query)], wanted)
    with pytest.raises(ValueError, match=f"query has {len(query) - 1} tokens"):
        operations.attention(query[:-1], keys, values, plan, scale=0.3)


@pytest.mark.parametrize("variant", [{}, {"window": 5}, {"window": 33}, {"softcap": 2.0}])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_windows_soft_caps_and_sinks_mean_the_same_on_both_paths_of_the_cpu(
    cpu_path: ops.Operations, variant: dict[str, Any], with_sinks: bool
) -> None:
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]) if with_sinks else None
    for seed in range(6):
        check(cpu_path, torch.float32, inputs(seed, levels=3), sinks=sinks, **variant)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (8, 1), (6, 2)])
def test_any_grouping_of_heads_works(cpu_path: ops.Operations, heads: int, kv_heads: int) -> None:
    for seed in range(3):
        made = inputs(seed, levels=3, heads=heads, kv_heads=kv_heads, head_dim=24, value_dim=24)
        check(cpu_path, torch.float32, made)


def test_values_may_have_another_size_than_keys(operations: ops.Operations) -> None:
    for seed in range(4):
        check(operations, torch.float32, inputs(seed, levels=3, head_dim=24, value_dim=8))


@pytest.mark.parametrize("block_size", [1, 3, 64])
def test_any_block_size_works(operations: ops.Operations, block_size: int) -> None:
    for seed in range(3):
        check(operations, torch.float32, inputs(seed, levels=3, block_size=block_size))


def test_decoding_rows_that_exceed_a_gathered_call_are_split_into_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiles, "GATHER_BYTES", 16 * 2 * 4 * 60)  # 60 tokens
    for seed in range(6):
        made = inputs(seed, levels=2, min_saved=10**9)
        check(ops.implementation("cpu"), torch.float32, made)


def test_large_scores_do_not_overflow(cpu_path: ops.Operations) -> None:
    query, keys, values, plan = inputs(3, levels=3)
    scaled = (query * 300, keys, values, plan)
    wanted = ops.implementation("reference").attention(*scaled, scale=0.3)
    got = cpu_path.attention(scaled[0].float(), keys.float(), values.float(), plan, scale=0.3)
    assert not got.isnan().any()
    # Scores near 1,000 carry an absolute error of about 1e-4 into the exponent.
    assert (got.double() - wanted).abs().max().item() <= 2e-3


def test_queries_may_be_a_strided_view_as_models_pass_them(operations: ops.Operations) -> None:
    query, keys, values, plan = inputs(5, levels=2)
    strided = query.transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()
    got = operations.attention(strided, keys, values, plan, scale=0.3)
    wanted = ops.implementation("reference").attention(query, keys, values, plan, scale=0.3)
    assert (got - wanted).abs().max().item() <= BOUNDS[torch.float64]


def test_a_row_of_one_part_and_rows_of_several_merge_to_the_whole(
    operations: ops.Operations,
) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(5, 3, 40, generator=generator, dtype=torch.float64)
    values = torch.randn(40, 3, 7, generator=generator, dtype=torch.float64)
    cuts = [(0, 40), (0, 13), (13, 14), (14, 40), (0, 20), (20, 40)]
    slots = torch.tensor([[0, -1, -1], [1, 2, 3], [5, 4, -1], [3, 1, 2], [0, -1, -1]])
    outputs: list[Tensor] = []
    lse: list[Tensor] = []
    parts: dict[tuple[int, int], int] = {}
    table = torch.full_like(slots, -1)
    for row in range(5):
        for column, cut in enumerate(slots[row].tolist()):
            if cut >= 0:
                parts[row, cut] = len(outputs)
                begin, end = cuts[cut]
                own = scores[row, :, begin:end]
                outputs.append(
                    torch.einsum("hk,khe->he", torch.softmax(own, -1), values[begin:end])
                )
                lse.append(torch.logsumexp(own, -1))
                table[row, column] = parts[row, cut]
    sinks = torch.tensor([0.3, -2.0, 1.0])
    got = operations.merge(torch.stack(outputs), torch.stack(lse), table)
    wanted = torch.einsum("thk,khe->the", torch.softmax(scores, -1), values)
    assert (got - wanted).abs().max().item() <= BOUNDS[torch.float64]
    got = operations.merge(torch.stack(outputs), torch.stack(lse), table, sinks=sinks)
    total = torch.logsumexp(scores, -1)
    share = torch.sigmoid(total - sinks.double())
    assert (got - wanted * share[..., None]).abs().max().item() <= BOUNDS[torch.float64]


def test_an_unused_part_never_leaks_into_a_merge(operations: ops.Operations) -> None:
    outputs = torch.ones(2, 1, 4)
    outputs[0] = float("nan")
    lse = torch.tensor([[float("nan")], [0.0]])
    merged = operations.merge(outputs, lse, torch.tensor([[1, -1]]))
    assert torch.equal(merged, torch.ones(1, 1, 4))


def test_stored_tokens_land_in_their_slots_and_nowhere_else(operations: ops.Operations) -> None:
    keys, values = torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 6)
    key = torch.randn(2, 5, 8).transpose(0, 1)
    value = torch.randn(5, 2, 6)
    slots = torch.tensor([11, 0, 5, 6, 3])
    operations.store_kv(key, value, keys, values, slots)
    assert torch.equal(keys.view(12, 2, 8)[slots], key)
    assert torch.equal(values.view(12, 2, 6)[slots], value)
    rest = torch.ones(12, dtype=torch.bool)
    rest[slots] = False
    assert not keys.view(12, 2, 8)[rest].any()


def test_copies_read_all_sources_before_they_write(operations: ops.Operations) -> None:
    cache = torch.arange(4.0)[:, None, None, None].expand(4, 2, 1, 3).contiguous()
    other = cache + 10
    source, destination = torch.tensor([0, 1]), torch.tensor([1, 2])
    operations.copy_blocks([cache, other], source, destination)
    assert cache[:, 0, 0, 0].tolist() == [0, 0, 1, 3]
    assert other[:, 0, 0, 0].tolist() == [10, 10, 11, 13]
    operations.copy_blocks([cache], source[:0], source[:0])
    assert cache[:, 0, 0, 0].tolist() == [0, 0, 1, 3]


def test_an_unknown_implementation_is_refused_and_triton_says_it_is_not_built() -> None:
    with pytest.raises(ValueError, match="not built yet"):
        ops.implementation("triton")
    with pytest.raises(ValueError, match="implementation must be one of reference, cpu"):
        ops.implementation("cuda")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"query": torch.zeros(2, 4)}, "query must be"),
        ({"query": torch.zeros(3, 4, 8)}, "query has 3 tokens"),
        ({"query": torch.zeros(2, 4, 6)}, "query has head size 6"),
        ({"query": torch.zeros(2, 3, 8)}, "query has 3 heads"),
        ({"query": torch.zeros(2, 4, 8, dtype=torch.float64)}, "one dtype"),
        ({"key_cache": torch.zeros(2, 8, 2, 8)}, "value_cache must be"),
        ({"key_cache": torch.zeros(1, 16, 2, 8), "value_cache": torch.zeros(1, 16, 2, 8)}, "block"),
        ({"value_cache": torch.zeros(2, 16, 1, 8)}, "value_cache must be"),
        ({"window": 0}, "window"),
        ({"softcap": 0.0}, "softcap"),
        ({"sinks": torch.zeros(2)}, "sinks"),
        ({"out": torch.zeros(2, 4, 7)}, "out must be"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(change: dict[str, Any], named: str) -> None:
    arguments: dict[str, Any] = {
        "query": torch.zeros(2, 4, 8),
        "key_cache": torch.zeros(2, 16, 2, 8),
        "value_cache": torch.zeros(2, 16, 2, 8),
        "plan": build([1, 1], [17, 2], [[0, 1], [0]], block_size=16),
        "scale": 1.0,
    }
    ops.implementation("cpu").attention(**arguments)
    with pytest.raises(ValueError, match=named):
        ops.implementation("cpu").attention(**{**arguments, **change})
