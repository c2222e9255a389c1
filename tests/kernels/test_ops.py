"""Every implementation computes what the reference defines, and refuses what does not fit."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from conure.kernels import ops, tiles
from conure.kernels.plan import build
from conure.kernels.planner import Planner

from .trees import Rows, comb, random_caches, random_rows

BLOCK = 16
BOUNDS = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest error against the float64 reference on the same, already rounded, inputs of unit scale.

bfloat16 keeps 8 bits: results up to 4 round by up to 2**-7 twice (weights and output). float16
keeps 11: 2**-10. float32 keeps 24, and the sums are of some hundred terms."""
COMPUTED = [
    (name, dtype)
    for name in ops.NAMES
    for dtype in BOUNDS
    # A GPU's tensor cores know no float64, and `cpu` is not meant for float16.
    if (name, dtype) not in (("triton", torch.float64), ("cpu", torch.float16))
]


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


def num_seeds(operations: ops.Operations, wanted: int) -> int:
    """Fewer where kernels are interpreted: one takes 0.1 to 0.5 s."""
    return max(1, wanted // 3) if operations.name == "triton" else wanted


@pytest.mark.parametrize(("name", "dtype"), COMPUTED, ids=str)
@pytest.mark.parametrize("levels", range(1, 8))
@pytest.mark.parametrize("min_saved", [0, 10**9], ids=["shared", "plain"])
def test_attention_over_random_trees_is_what_the_reference_says(
    name: str, dtype: torch.dtype, levels: int, min_saved: int
) -> None:
    operations = ops.implementation(name)
    for seed in range(num_seeds(operations, 6 if levels < 5 else 2)):
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


@pytest.mark.parametrize("min_saved", [0, 10**9], ids=["shared", "plain"])
def test_values_may_have_another_size_than_keys(operations: ops.Operations, min_saved: int) -> None:
    for seed in range(num_seeds(operations, 4)):
        made = inputs(seed, levels=3, head_dim=24, value_dim=8, min_saved=min_saved)
        check(operations, torch.float32, made)


@pytest.mark.parametrize("block_size", [1, 3, 64, 128])
def test_any_block_size_works(operations: ops.Operations, block_size: int) -> None:
    for seed in range(num_seeds(operations, 3)):
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
    wanted = ops.implementation("reference").attention(query, keys, values, plan, scale=0.3)
    strided, keys, values = strided.float(), keys.float(), values.float()
    assert not strided.is_contiguous()
    got = operations.attention(strided, keys, values, plan, scale=0.3)
    assert (got - wanted).abs().max().item() <= BOUNDS[torch.float32]


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
    # Triton's parts are float32; the others keep float64 where they get it.
    dtype = torch.float32 if operations.name == "triton" else torch.float64
    stacked = torch.stack(outputs).to(dtype), torch.stack(lse).to(dtype)
    got = operations.merge(*stacked, table)
    wanted = torch.einsum("thk,khe->the", torch.softmax(scores, -1), values)
    assert got.dtype == dtype
    assert (got - wanted).abs().max().item() <= BOUNDS[dtype]
    got = operations.merge(*stacked, table, sinks=sinks)
    total = torch.logsumexp(scores, -1)
    share = torch.sigmoid(total - sinks.double())
    assert (got - wanted * share[..., None]).abs().max().item() <= BOUNDS[dtype]


def test_an_unused_part_never_leaks_into_a_merge(operations: ops.Operations) -> None:
    outputs = torch.ones(2, 1, 4)
    outputs[0] = float("nan")
    lse = torch.tensor([[float("nan")], [0.0]])
    merged = operations.merge(outputs, lse, torch.tensor([[1, -1]]))
    assert torch.equal(merged, torch.ones(1, 1, 4))


def test_a_step_outside_of_inference_mode_may_follow_one_inside(operations: ops.Operations) -> None:
    planner = Planner(block_size=4, min_saved=0)
    tables = [[0, 1, 2], [0, 1, 3]]
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        keys, values = (operations.new_cache(4, 4, 1, 8, torch.float32) for _ in range(2))
    kept = torch.zeros(2, 4, 4, 1, 8)  # keys, then values
    for length, mode in ((9, True), (10, True), (11, False), (12, True)):
        plan = planner.plan([1, 1], [length] * 2, tables)
        slots = torch.from_numpy(plan.slots)
        new = torch.randn(3, 2, 1, 8, generator=generator)
        kept.flatten(1, 2)[:, slots] = new[:2]
        with torch.inference_mode(mode):
            operations.store_kv(new[0], new[1], keys, values, slots)
            got = operations.attention(new[2], keys, values, plan, scale=0.5)
            operations.copy_blocks([keys], torch.tensor([0]), torch.tensor([0]))
        wanted = ops.implementation("reference").attention(
            new[2], kept[0], kept[1], plan, scale=0.5
        )
        assert (got - wanted).abs().max().item() <= BOUNDS[torch.float32]


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


@pytest.mark.parametrize("variant", [{}, {"window": 5}, {"window": 33}, {"softcap": 2.0}])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_windows_soft_caps_and_sinks_mean_the_same_in_triton(
    variant: dict[str, Any], with_sinks: bool, dtype: torch.dtype
) -> None:
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]) if with_sinks else None
    for seed in range(2):
        made = inputs(seed + 7, levels=3)
        check(ops.implementation("triton"), dtype, made, sinks=sinks, **variant)


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
def test_shapes_of_heads_that_models_have(
    heads: int, kv_heads: int, head_dim: int, value_dim: int, page: int
) -> None:
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "value_dim": value_dim}
    made = inputs(heads + page, levels=2, block_size=page, **shape)
    query, keys, values, plan = made
    # Scores of unit scale, as the bounds want them.
    made = (query * head_dim**-0.5, keys, values, plan)
    check(ops.implementation("triton"), torch.bfloat16, made)


def many(num_rows: int, prefix: int, own: int, *, num_new: int = 1) -> Rows:
    """Return rows over one prefix; each has `own` tokens more, the new ones among them."""
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
def test_triton_cuts_queries_and_stretches_and_puts_them_together(rows: Rows) -> None:
    plan = build(*rows[:3], block_size=BLOCK, min_saved=1)
    caches = random_caches(3, rows, block_size=BLOCK, kv_heads=1, head_dim=32, value_dim=32)
    generator = torch.Generator().manual_seed(4)
    query = torch.randn(plan.num_queries, 4, 32, generator=generator, dtype=torch.float64)
    check(ops.implementation("triton"), torch.float32, (query, *caches, plan))


@pytest.mark.parametrize(("name", "bound"), [("triton", 2.5e-3), ("cpu", 4.6e-3)])
def test_seven_levels_in_bfloat16_stay_exact(name: str, bound: float) -> None:
    """Rounding the result alone costs 1.7e-3; a merge in bfloat16 level by level 3.8e-3.

    `cpu` rounds scores (2.9e-3) and each of 7 sums of values (1.7e-3 together) as well: the
    library's products of bfloat16 end in it.
    """
    rows = comb(7, block_size=BLOCK)
    plan = build(*rows[:3], block_size=BLOCK, min_saved=0)
    parts = Counter(query for item in plan.items() for query in item.queries.tolist())
    assert max(parts.values()) == 7
    caches = random_caches(2, rows, block_size=BLOCK, kv_heads=2, head_dim=64, value_dim=64)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(plan.num_queries, 4, 64, generator=generator, dtype=torch.float64)
    query, keys, values = (tensor.to(torch.bfloat16) for tensor in (query, *caches))
    wanted = ops.implementation("reference").attention(
        query.double(), keys.double(), values.double(), plan, scale=0.125
    )
    got = ops.implementation(name).attention(query, keys, values, plan, scale=0.125)
    error = ((got.double() - wanted).norm() / wanted.norm()).item()
    assert error <= bound
