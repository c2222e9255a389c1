"""Every implementation computes what the reference defines."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from conure.kernels import ops
from conure.kernels.planning.plan import build_plan
from conure.kernels.planning.planner import Planner
from tests.kernels import implementations
from tests.kernels.random_trees import Rows, comb, device_of, random_caches, random_rows

BLOCK = 16
BOUNDS = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest error against the float64 reference on the same, already rounded, inputs of unit scale.

bfloat16 keeps 8 bits: results up to 4 round by up to 2**-7 twice (weights and output). float16
keeps 11: 2**-10. float32 keeps 24, and the sums are of some hundred terms."""
COMPUTED = [
    (name, dtype)
    for name in implementations.NAMES
    for dtype in BOUNDS
    # Tensor cores have no float64.
    if (name, dtype) != ("triton", torch.float64)
]


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
    plan = build_plan(*rows[:3], block_size=block_size, min_saved=min_saved)
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
    operations: ops.AttentionOperations,
    dtype: torch.dtype,
    arguments: tuple[Tensor, Tensor, Tensor, Any],
    expected: Tensor | None = None,
    **variant: Any,
) -> None:
    device = device_of(operations)
    query, keys, values = (tensor.to(device) for tensor in rounded(arguments, dtype))
    plan = arguments[3]
    if expected is None:
        expected = reference(arguments, dtype, **variant)
    expected = expected.to(device)
    if (sinks := variant.get("sinks")) is not None:
        variant["sinks"] = sinks.to(device)
    out = query.new_full(expected.shape, float("nan"))
    result = operations.attention(query, keys, values, plan, scale=0.3, out=out, **variant)
    assert result is out
    assert result.dtype == dtype
    assert not result.isnan().any(), "an output was not written, or read a slot outside its row"
    assert (result.double() - expected).abs().max().item() <= BOUNDS[dtype]


def rounded(arguments: tuple[Tensor, Tensor, Tensor, Any], dtype: torch.dtype) -> list[Tensor]:
    return [tensor.to(dtype) for tensor in arguments[:3]]


def reference(
    arguments: tuple[Tensor, Tensor, Tensor, Any], dtype: torch.dtype, **variant: Any
) -> Tensor:
    query, keys, values = (tensor.double() for tensor in rounded(arguments, dtype))
    operations = ops.implementation("reference")
    return operations.attention(query, keys, values, arguments[3], scale=0.3, **variant)


@cache
def random_tree(
    seed: int, levels: int, min_saved: int, dtype: torch.dtype
) -> tuple[tuple[Tensor, Tensor, Tensor, Any], Tensor]:
    """Return arguments and their result, for all implementations."""
    arguments = inputs(seed, levels=levels, min_saved=min_saved)
    return arguments, reference(arguments, dtype)


def num_seeds(operations: ops.AttentionOperations, expected: int) -> int:
    """Return fewer seeds for interpreted kernels: one takes 0.1 to 0.5 s."""
    return max(1, expected // 3) if operations.name == "triton" else expected


@pytest.mark.parametrize(("name", "dtype"), COMPUTED, ids=str)
@pytest.mark.parametrize("levels", range(1, 8))
@pytest.mark.parametrize("min_saved", [0, 10**9], ids=["shared", "plain"])
def test_attention_over_random_trees_equals_the_reference(
    name: str, dtype: torch.dtype, levels: int, min_saved: int
) -> None:
    operations = implementations.attention(name)
    for seed in range(num_seeds(operations, 6 if levels < 5 else 2)):
        arguments, expected = random_tree(100 * levels + seed, levels, min_saved, dtype)
        check(operations, dtype, arguments, expected)


def test_padding_queries_do_not_affect_others(
    operations: ops.AttentionOperations, device: torch.device
) -> None:
    *tensors, plan = inputs(3, levels=2)
    query, keys, values = (tensor.to(device, torch.float32) for tensor in tensors)
    expected = operations.attention(query, keys, values, plan, scale=0.3)
    longer = torch.cat((query, query.new_full((5, *query.shape[1:]), float("nan"))))
    result = operations.attention(longer, keys, values, plan, scale=0.3)
    assert result.shape[0] == len(query) + 5
    assert torch.equal(result[: len(query)], expected)
    with pytest.raises(ValueError, match=f"query has {len(query) - 1} tokens"):
        operations.attention(query[:-1], keys, values, plan, scale=0.3)


@pytest.mark.parametrize("variant", [{}, {"window": 5}, {"window": 33}, {"softcap": 2.0}])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_cpu_windows_caps_and_sinks_equal_the_reference(
    cpu_path: ops.AttentionOperations, variant: dict[str, Any], with_sinks: bool
) -> None:
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]) if with_sinks else None
    for seed in range(6):
        check(cpu_path, torch.float32, inputs(seed, levels=3), sinks=sinks, **variant)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (8, 1), (6, 2)])
def test_heads_may_be_grouped(cpu_path: ops.AttentionOperations, heads: int, kv_heads: int) -> None:
    for seed in range(3):
        arguments = inputs(
            seed, levels=3, heads=heads, kv_heads=kv_heads, head_dim=24, value_dim=24
        )
        check(cpu_path, torch.float32, arguments)


@pytest.mark.parametrize("min_saved", [0, 10**9], ids=["shared", "plain"])
def test_value_size_may_differ_from_key_size(
    operations: ops.AttentionOperations, min_saved: int
) -> None:
    for seed in range(num_seeds(operations, 4)):
        arguments = inputs(seed, levels=3, head_dim=24, value_dim=8, min_saved=min_saved)
        check(operations, torch.float32, arguments)


@pytest.mark.parametrize("block_size", [1, 3, 64, 128])
def test_block_size_may_be_any(operations: ops.AttentionOperations, block_size: int) -> None:
    for seed in range(num_seeds(operations, 3)):
        check(operations, torch.float32, inputs(seed, levels=3, block_size=block_size))


def test_large_scores_do_not_overflow(cpu_path: ops.AttentionOperations) -> None:
    query, keys, values, plan = inputs(3, levels=3)
    scaled = (query * 300, keys, values, plan)
    expected = ops.implementation("reference").attention(*scaled, scale=0.3)
    result = cpu_path.attention(scaled[0].float(), keys.float(), values.float(), plan, scale=0.3)
    assert not result.isnan().any()
    # Scores near 1,000 carry an absolute error of about 1e-4 into the exponent.
    assert (result.double() - expected).abs().max().item() <= 2e-3


def test_what_is_no_number_is_not_hidden(cpu_path: ops.AttentionOperations) -> None:
    query, keys, values, plan = inputs(3, levels=3)
    for broken, cap in ((keys.clone(), None), (keys, 5.0)):
        if broken is keys:
            query[1] = torch.nan
        else:
            broken[0, :, 0] = torch.nan
            broken[1, :, 1] = torch.inf
        expected = ops.implementation("reference").attention(
            query, broken, values, plan, scale=0.3, softcap=cap
        )
        result = cpu_path.attention(
            query.float(), broken.float(), values.float(), plan, scale=0.3, softcap=cap
        )
        assert torch.equal(result.isnan(), expected.isnan())
        assert expected.isnan().any()
        assert not expected.isnan().all()


def test_queries_may_be_a_strided_view(
    operations: ops.AttentionOperations, device: torch.device
) -> None:
    *tensors, plan = inputs(5, levels=2)
    query, keys, values = (tensor.to(device) for tensor in tensors)
    strided = query.transpose(0, 1).contiguous().transpose(0, 1)
    expected = ops.implementation("reference").attention(query, keys, values, plan, scale=0.3)
    strided, keys, values = strided.float(), keys.float(), values.float()
    assert not strided.is_contiguous()
    result = operations.attention(strided, keys, values, plan, scale=0.3)
    assert (result - expected).abs().max().item() <= BOUNDS[torch.float32]


def test_partials_merge_to_the_full_result(
    operations: ops.AttentionOperations, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(5, 3, 40, generator=generator, dtype=torch.float64)
    values = torch.randn(40, 3, 7, generator=generator, dtype=torch.float64)
    cuts = [(0, 40), (0, 13), (13, 14), (14, 40), (0, 20), (20, 40)]
    slots = torch.tensor([[0, -1, -1], [1, 2, 3], [5, 4, -1], [3, 1, 2], [0, -1, -1]])
    outputs: list[Tensor] = []
    lse: list[Tensor] = []
    partials: dict[tuple[int, int], int] = {}
    table = torch.full_like(slots, -1)
    for row in range(5):
        for column, cut in enumerate(slots[row].tolist()):
            if cut >= 0:
                partials[row, cut] = len(outputs)
                begin, end = cuts[cut]
                chunk = scores[row, :, begin:end]
                outputs.append(
                    torch.einsum("hk,khe->he", torch.softmax(chunk, -1), values[begin:end])
                )
                lse.append(torch.logsumexp(chunk, -1))
                table[row, column] = partials[row, cut]
    sinks = torch.tensor([0.3, -2.0, 1.0], device=device)
    scores, values, table = scores.to(device), values.to(device), table.to(device)
    # Triton's partials are float32; the others keep float64.
    dtype = torch.float32 if operations.name == "triton" else torch.float64
    stacked = torch.stack(outputs).to(device, dtype), torch.stack(lse).to(device, dtype)
    result = operations.merge(*stacked, table)
    expected = torch.einsum("thk,khe->the", torch.softmax(scores, -1), values)
    assert result.dtype == dtype
    assert (result - expected).abs().max().item() <= BOUNDS[dtype]
    result = operations.merge(*stacked, table, sinks=sinks)
    total = torch.logsumexp(scores, -1)
    share = torch.sigmoid(total - sinks.double())
    assert (result - expected * share[..., None]).abs().max().item() <= BOUNDS[dtype]


def test_unused_partial_is_not_merged(
    operations: ops.AttentionOperations, device: torch.device
) -> None:
    outputs = torch.ones(2, 1, 4, device=device)
    outputs[0] = float("nan")
    lse = torch.tensor([[float("nan")], [0.0]], device=device)
    merged = operations.merge(outputs, lse, torch.tensor([[1, -1]], device=device))
    assert torch.equal(merged.cpu(), torch.ones(1, 1, 4))


def test_inference_mode_may_change_between_steps(
    operations: ops.AttentionOperations, device: torch.device
) -> None:
    planner = Planner(block_size=4, min_saved=0)
    tables = [[0, 1, 2], [0, 1, 3]]
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        keys, values = (operations.new_cache(4, 4, 1, 8, torch.float32) for _ in range(2))
    reference_caches = torch.zeros(2, 4, 4, 1, 8, device=device)  # keys, then values
    block = torch.tensor([0], device=device)
    for length, mode in ((9, True), (10, True), (11, False), (12, True)):
        plan = planner.plan([1, 1], [length] * 2, tables)
        slots = torch.from_numpy(plan.slots).to(device)
        new = torch.randn(3, 2, 1, 8, generator=generator).to(device)
        reference_caches.flatten(1, 2)[:, slots] = new[:2]
        with torch.inference_mode(mode):
            operations.store_kv(new[0], new[1], keys, values, slots)
            result = operations.attention(new[2], keys, values, plan, scale=0.5)
            operations.copy_blocks([keys], block, block)
        expected = ops.implementation("reference").attention(
            new[2], reference_caches[0], reference_caches[1], plan, scale=0.5
        )
        assert (result - expected).abs().max().item() <= BOUNDS[torch.float32]


def test_store_kv_writes_only_the_given_slots(
    operations: ops.AttentionOperations, device: torch.device
) -> None:
    keys, values = (torch.zeros(3, 4, 2, dim, device=device) for dim in (8, 6))
    key = torch.randn(2, 5, 8, device=device).transpose(0, 1)
    value = torch.randn(5, 2, 6, device=device)
    slots = torch.tensor([11, 0, 5, 6, 3], device=device)
    operations.store_kv(key, value, keys, values, slots)
    assert torch.equal(keys.view(12, 2, 8)[slots], key)
    assert torch.equal(values.view(12, 2, 6)[slots], value)
    rest = torch.ones(12, dtype=torch.bool, device=device)
    rest[slots] = False
    assert not keys.view(12, 2, 8)[rest].any()


def test_copy_blocks_reads_all_sources_first(
    operations: ops.AttentionOperations, device: torch.device
) -> None:
    cache = torch.arange(4.0)[:, None, None, None].expand(4, 2, 1, 3).contiguous().to(device)
    other = cache + 10
    source, destination = torch.tensor([[0, 1], [1, 2]], device=device)
    operations.copy_blocks([cache, other], source, destination)
    assert cache[:, 0, 0, 0].tolist() == [0, 0, 1, 3]
    assert other[:, 0, 0, 0].tolist() == [10, 10, 11, 13]
    operations.copy_blocks([cache], source[:0], source[:0])
    assert cache[:, 0, 0, 0].tolist() == [0, 0, 1, 3]


@pytest.mark.parametrize("variant", [{}, {"window": 5}, {"window": 33}, {"softcap": 2.0}])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_triton_windows_caps_and_sinks_equal_the_reference(
    variant: dict[str, Any], with_sinks: bool, dtype: torch.dtype
) -> None:
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]) if with_sinks else None
    for seed in range(2):
        arguments = inputs(seed + 7, levels=3)
        check(ops.implementation("triton"), dtype, arguments, sinks=sinks, **variant)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "value_dim"),
    [
        (1, 1, 64, 64),
        (4, 4, 80, 80),
        (8, 2, 128, 128),
        (6, 2, 96, 96),
        (5, 1, 192, 128),
        (14, 2, 64, 64),
        (24, 1, 256, 256),
        (16, 1, 48, 64),
    ],
)
@pytest.mark.parametrize("page", [16, 64])
def test_head_shapes_of_common_models(
    heads: int, kv_heads: int, head_dim: int, value_dim: int, page: int
) -> None:
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "value_dim": value_dim}
    arguments = inputs(heads + page, levels=2, block_size=page, **shape)
    query, keys, values, plan = arguments
    # The bounds assume scores of unit scale.
    arguments = (query * head_dim**-0.5, keys, values, plan)
    check(ops.implementation("triton"), torch.bfloat16, arguments)


def many(num_rows: int, prefix: int, own: int, *, num_new: int = 1) -> Rows:
    """Return rows with one prefix and `own` more tokens each, which include the new ones."""
    shared = [7 * block % 97 for block in range(prefix // BLOCK)]
    each = -(-own // BLOCK)
    tables = [
        [*shared, *range(100 + row * each, 100 + (row + 1) * each)] for row in range(num_rows)
    ]
    length = prefix + own
    return Rows([num_new] * num_rows, [length] * num_rows, tables, 100 + num_rows * each)


@pytest.mark.parametrize(
    "rows",
    [
        many(1, 640, 3),
        many(40, 320, 5),
        many(3, 64, 70, num_new=70),
        many(2, 0, 300, num_new=300),
    ],
    ids=["one-sharer", "many-sharers", "extend", "prefill"],
)
def test_triton_merges_tiles_and_chunks(rows: Rows) -> None:
    plan = build_plan(*rows[:3], block_size=BLOCK, min_saved=1)
    caches = random_caches(3, rows, block_size=BLOCK, kv_heads=1, head_dim=32, value_dim=32)
    generator = torch.Generator().manual_seed(4)
    query = torch.randn(plan.num_queries, 4, 32, generator=generator, dtype=torch.float64)
    check(ops.implementation("triton"), torch.float32, (query, *caches, plan))


def test_seven_levels_stay_exact_in_bfloat16(operations: ops.AttentionOperations) -> None:
    """Rounding the result alone costs 1.7e-3; merging level by level in bfloat16 costs 3.8e-3."""
    rows = comb(7, block_size=BLOCK)
    plan = build_plan(*rows[:3], block_size=BLOCK, min_saved=0)
    partials = Counter(query for item in plan.items() for query in item.queries.tolist())
    assert max(partials.values()) == 7
    caches = random_caches(2, rows, block_size=BLOCK, kv_heads=2, head_dim=64, value_dim=64)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(plan.num_queries, 4, 64, generator=generator, dtype=torch.float64)
    query, keys, values = (
        tensor.to(device_of(operations), torch.bfloat16) for tensor in (query, *caches)
    )
    expected = ops.implementation("reference").attention(
        query.double(), keys.double(), values.double(), plan, scale=0.125
    )
    result = operations.attention(query, keys, values, plan, scale=0.125)
    error = ((result.double() - expected).norm() / expected.norm()).item()
    assert error <= 2.5e-3
