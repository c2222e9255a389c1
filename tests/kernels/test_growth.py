"""Attention over many steps: what is kept from one step to the next never shows in a result.

A model of a cache is run beside the implementation: contexts decode token by token, join,
leave, are written to from outside, and blocks are copied. Every step must equal the reference
on the same caches, which keeps nothing and computes in float64.

In 16 bits what is kept is of another form: keys turned over, of values only where they lie.
So what is true of float32 is asked of each of them again, with few and with many heads of a
group, for many do without.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conure.kernels import ops, stretch
from conure.kernels.bags import MOST_ROWS
from conure.kernels.cpu import Cpu
from conure.kernels.plan import Plan, build
from conure.kernels.tiles import COLUMNS

BLOCK, KV_HEADS, DIM = 4, 2, 8
NUM_BLOCKS = 400
FEW, MANY = MOST_ROWS * KV_HEADS, (MOST_ROWS + 1) * KV_HEADS
"""Query heads: as many as are multiplied by bags in 16 bits, and more than that."""
BOUNDS = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Of results up to 4, as in `test_ops`."""
HALVES = (torch.float16, torch.bfloat16)
each_dtype = pytest.mark.parametrize("dtype", BOUNDS, ids=str)
each_half = pytest.mark.parametrize("dtype", HALVES, ids=str)
KINDS = ("decode", "decode", "decode", "join", "leave", "overwrite", "copy", "prefill", "again")


@dataclass
class Contexts:
    """Block tables and lengths, on caches of one implementation."""

    seed: int
    dtype: torch.dtype
    window: int | None = None
    heads: int = FEW
    rng: random.Random = field(init=False)
    tables: list[list[int]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        torch.manual_seed(self.seed)
        self.free = list(range(NUM_BLOCKS))
        self.rng.shuffle(self.free)
        self.operations = ops.implementation("cpu")
        self.reference = ops.implementation("reference")
        self.keys, self.values = (
            self.operations.new_cache(NUM_BLOCKS, BLOCK, KV_HEADS, DIM, self.dtype)
            for _ in range(2)
        )
        self.keys.normal_()
        self.values.normal_()
        self.prefix = [self.free.pop() for _ in range(6)]
        for _ in range(3):
            self.join()

    @property
    def cpu(self) -> Cpu:
        """The implementation behind the operations."""
        kernels = self.operations._kernels
        assert isinstance(kernels, Cpu)
        return kernels

    def new(self, num: int) -> Tensor:
        """Return keys and values of so many new tokens, [2, num, K, D]."""
        return torch.randn(2, num, KV_HEADS, DIM).to(self.dtype)

    def join(self) -> None:
        """Begin a context behind the prefix, or behind a part of it."""
        shared = self.prefix[: self.rng.choice((0, 3, 6))]
        length = len(shared) * BLOCK + self.rng.choice((1, 5, 9))
        self.tables.append(list(shared))
        self.lengths.append(length)
        self.cover(len(self.tables) - 1)

    def cover(self, row: int) -> None:
        """Give a context blocks for all of its tokens."""
        while len(self.tables[row]) * BLOCK < self.lengths[row]:
            self.tables[row].append(self.free.pop())

    def step(self, num_new: list[int], *, is_stored: bool = True) -> Plan:
        """Lengthen every context and attend; compare with the reference."""
        for row, num in enumerate(num_new):
            self.lengths[row] += num
            self.cover(row)
        plan = build(num_new, self.lengths, self.tables, block_size=BLOCK, min_saved=0)
        key, value = self.new(plan.num_queries)
        slots = torch.from_numpy(plan.slots)
        if is_stored:
            self.operations.store_kv(key, value, self.keys, self.values, slots)
        self.compare(plan)
        return plan

    def compare(self, plan: Plan) -> None:
        query = torch.randn(plan.num_queries, self.heads, DIM).to(self.dtype)
        found, wanted = (
            one.attention(query, keys, values, plan, scale=0.3, window=self.window)
            for one, query, keys, values in (
                (self.operations, query, self.keys, self.values),
                (self.reference, query.double(), self.keys.double(), self.values.double()),
            )
        )
        error = float((found - wanted).abs().max())
        assert error <= BOUNDS[self.dtype], f"kv_len {plan.kv_len.tolist()}: {error}"

    def store(self, block: int) -> None:
        """Write a block anew, as a context that is computed again does."""
        slots = torch.arange(block * BLOCK, (block + 1) * BLOCK)
        key, value = self.new(BLOCK)
        self.operations.store_kv(key, value, self.keys, self.values, slots)

    def copy(self, destination: int) -> None:
        """Copy some block over one that is read."""
        source = torch.tensor([self.free[0]])
        caches = [self.keys, self.values]
        self.operations.copy_blocks(caches, source, torch.tensor([destination]))


@each_dtype
@given(
    st.integers(0, 2**32),
    st.sampled_from((None, 12, 40)),
    st.sampled_from((FEW, MANY)),
    st.lists(st.sampled_from(KINDS), min_size=4, max_size=40),
)
@settings(deadline=None, max_examples=40, database=None)
def test_every_step_equals_a_step_that_keeps_nothing(
    dtype: torch.dtype, seed: int, window: int | None, heads: int, kinds: list[str]
) -> None:
    contexts = Contexts(seed, dtype, window, heads)
    plan = contexts.step([1] * len(contexts.tables))
    for kind in kinds:
        rng = contexts.rng
        num_new = [1] * len(contexts.tables)
        read = [block for table in contexts.tables for block in table]
        match kind:
            case "join":
                contexts.join()
                num_new.append(1)
            case "leave" if len(num_new) > 1:
                row = rng.randrange(len(num_new))
                del contexts.tables[row], contexts.lengths[row]
                num_new.pop()
            case "overwrite":
                contexts.store(rng.choice(read))
            case "copy":
                contexts.copy(rng.choice(read))
            case "prefill":
                num_new[rng.randrange(len(num_new))] = 3
            case "again":
                contexts.compare(plan)
                continue
        plan = contexts.step(num_new)


@each_dtype
def test_an_earlier_plan_can_be_run_again(dtype: torch.dtype) -> None:
    contexts = Contexts(0, dtype)
    plans = [contexts.step([1] * 3) for _ in range(5)]
    for plan in plans[::-1]:
        contexts.compare(plan)


@each_dtype
def test_a_plan_that_is_run_again_reads_what_its_own_tokens_are_now(dtype: torch.dtype) -> None:
    # The row's slots are one stretch, that of its new token among them.
    contexts = Contexts(7, dtype)
    contexts.tables, contexts.lengths = [[*range(40)]], [159]
    plan = contexts.step([1])
    key, value = contexts.new(1)
    slots = torch.from_numpy(plan.slots)
    contexts.operations.store_kv(key, value, contexts.keys, contexts.values, slots)
    contexts.compare(plan)


@each_dtype
def test_a_plan_that_is_run_again_reads_what_other_plans_wrote(dtype: torch.dtype) -> None:
    contexts = Contexts(8, dtype)
    plan = contexts.step([1] * 3)
    kept = contexts.cpu._room.num_bytes
    block = contexts.tables[0][-1]
    other = build([BLOCK], [BLOCK], [[block]], block_size=BLOCK)
    for _ in range(3):
        contexts.store(block)
        contexts.compare(other)
        contexts.compare(plan)
    assert contexts.cpu._room.num_bytes == kept


@each_dtype
def test_values_may_be_the_first_part_of_the_keys(dtype: torch.dtype) -> None:
    contexts = Contexts(9, dtype)
    contexts.values = contexts.keys[..., : DIM // 2]
    for _ in range(3):
        for row in range(3):
            contexts.lengths[row] += 1
            contexts.cover(row)
        plan = build([1] * 3, contexts.lengths, contexts.tables, block_size=BLOCK, min_saved=0)
        for _ in range(2):
            key, _ = contexts.new(3)
            value, slots = key[..., : DIM // 2], torch.from_numpy(plan.slots)
            contexts.operations.store_kv(key, value, contexts.keys, contexts.values, slots)
            contexts.compare(plan)


@each_dtype
def test_what_is_written_from_outside_is_read(dtype: torch.dtype) -> None:
    contexts = Contexts(3, dtype)
    contexts.step([1] * 3)
    plan = contexts.step([1] * 3)
    contexts.store(contexts.tables[0][-1])
    contexts.compare(plan)
    contexts.store(contexts.tables[1][-1])
    contexts.step([1] * 3, is_stored=False)


@each_dtype
def test_blocks_that_change_hands_in_a_step_of_another_kind_are_read(dtype: torch.dtype) -> None:
    contexts = Contexts(5, dtype, window=30)
    contexts.tables, contexts.lengths = [[]], [0]
    contexts.step([9])
    for _ in range(3):
        contexts.step([1])
    # The context ends; another gets its blocks and fills them beside one beyond the window.
    contexts.lengths = [0]
    contexts.tables.append([])
    contexts.lengths.append(0)
    contexts.step([12, 40])
    del contexts.tables[1], contexts.lengths[1]
    contexts.step([1])


@each_dtype
def test_nothing_is_kept_of_steps_that_are_over(dtype: torch.dtype) -> None:
    contexts = Contexts(6, dtype)
    room = stretch.Room().num_bytes
    for _ in range(4):
        contexts.step([1] * 3)
    assert contexts.cpu._room.num_bytes < room
    contexts.step([2] * 3)
    contexts.step([2] * 3)
    assert contexts.cpu._room.num_bytes == room


@each_dtype
def test_decoding_gathers_only_what_is_new(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered: list[int] = []
    select = torch.index_select

    def count(rows: Tensor, dim: int, index: Tensor, **where: Tensor) -> Tensor:
        gathered.append(len(index))
        return select(rows, dim, index, **where)

    contexts = Contexts(1, dtype)
    contexts.step([1] * 3)
    contexts.step([1] * 3)
    monkeypatch.setattr(torch.Tensor, "index_select", count)
    monkeypatch.setattr(torch, "index_select", count)
    for _ in range(4):
        gathered.clear()
        contexts.step([1] * 3)
        rows = 3 * KV_HEADS
        assert sum(gathered) <= 3 + 2 * (rows + rows), "queries; of keys and values a token each"


@each_dtype
def test_what_does_not_fit_is_gathered_in_every_step(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts = Contexts(2, dtype)
    monkeypatch.setattr(contexts.cpu, "_room", stretch.Room(0))
    for _ in range(6):
        contexts.step([1] * 3)
    assert contexts.cpu._room.num_bytes == 0


@each_dtype
@pytest.mark.parametrize("heads", [FEW, MANY])
def test_rows_outgrow_their_columns(dtype: torch.dtype, heads: int) -> None:
    contexts = Contexts(10, dtype, heads=heads)
    for _ in range(2 * COLUMNS + 2):
        contexts.step([1] * 3)


@each_half
@pytest.mark.parametrize(("heads", "num_kept"), [(FEW, 1), (MANY, 2)])
def test_values_that_bags_read_in_place_are_not_kept(
    dtype: torch.dtype, heads: int, num_kept: int
) -> None:
    contexts = Contexts(11, dtype, heads=heads)
    contexts.tables, contexts.lengths = [[0, 1], [20, 22], [40, 43]], [5, 6, 7]
    room = contexts.cpu._room.num_bytes
    for _ in range(4):
        contexts.step([1] * 3)
        num_bytes = 3 * COLUMNS * KV_HEADS * DIM * dtype.itemsize
        assert room - contexts.cpu._room.num_bytes == num_kept * num_bytes


@each_dtype
@pytest.mark.parametrize("heads", [FEW, MANY])
def test_a_block_that_another_took_the_place_of_is_not_read(dtype: torch.dtype, heads: int) -> None:
    contexts = Contexts(12, dtype, heads=heads)
    contexts.lengths = [29, 30, 32]
    for _ in range(6):
        contexts.step([1] * 3)
        contexts.tables[1][-1] = contexts.free.pop()
