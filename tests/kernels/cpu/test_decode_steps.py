"""CPU attention over many steps: no result depends on an earlier step.

A simulated cache runs with the implementation: contexts decode token by token, join and leave,
blocks are written from outside and copied. Every step must equal the reference on the same
caches, which computes in float64. Groups have few and many heads, which are computed differently.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conure.kernels import ops
from conure.kernels.planning.plan import Plan, build_plan

BLOCK, KV_HEADS, DIM = 4, 2, 8
NUM_BLOCKS = 400
FEW, MANY = 4 * KV_HEADS, 12 * KV_HEADS
"""Query heads."""
BOUNDS = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Maximum error of results up to 4, as in `test_ops`."""
each_dtype = pytest.mark.parametrize("dtype", BOUNDS, ids=str)
EVENTS = ("decode", "decode", "decode", "join", "leave", "overwrite", "copy", "prefill", "again")


@dataclass
class Contexts:
    """Block tables, lengths and caches of some contexts."""

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

    def new(self, num: int) -> Tensor:
        """Return keys and values of `num` new tokens, [2, num, K, D]."""
        return torch.randn(2, num, KV_HEADS, DIM).to(self.dtype)

    def join(self) -> None:
        """Add a context that forks from the prefix, or from a part of it."""
        shared = self.prefix[: self.rng.choice((0, 3, 6))]
        length = len(shared) * BLOCK + self.rng.choice((1, 5, 9))
        self.tables.append(list(shared))
        self.lengths.append(length)
        self.cover(len(self.tables) - 1)

    def cover(self, row: int) -> None:
        """Allocate blocks for all tokens of a context."""
        while len(self.tables[row]) * BLOCK < self.lengths[row]:
            self.tables[row].append(self.free.pop())

    def step(self, num_new: list[int], *, is_stored: bool = True) -> Plan:
        """Extend every context and attend; compare with the reference."""
        for row, num in enumerate(num_new):
            self.lengths[row] += num
            self.cover(row)
        plan = build_plan(num_new, self.lengths, self.tables, block_size=BLOCK, min_saved=0)
        key, value = self.new(plan.num_queries)
        slots = torch.from_numpy(plan.slots)
        if is_stored:
            self.operations.store_kv(key, value, self.keys, self.values, slots)
        self.compare(plan)
        return plan

    def compare(self, plan: Plan) -> None:
        query = torch.randn(plan.num_queries, self.heads, DIM).to(self.dtype)
        result, expected = (
            one.attention(query, keys, values, plan, scale=0.3, window=self.window)
            for one, query, keys, values in (
                (self.operations, query, self.keys, self.values),
                (self.reference, query.double(), self.keys.double(), self.values.double()),
            )
        )
        error = float((result - expected).abs().max())
        assert error <= BOUNDS[self.dtype], f"kv_len {plan.kv_len.tolist()}: {error}"

    def store(self, block: int) -> None:
        """Overwrite a block, as a recomputed context does."""
        slots = torch.arange(block * BLOCK, (block + 1) * BLOCK)
        key, value = self.new(BLOCK)
        self.operations.store_kv(key, value, self.keys, self.values, slots)

    def copy(self, destination: int) -> None:
        """Overwrite a block with a copy of an unused one."""
        source = torch.tensor([self.free[0]])
        caches = [self.keys, self.values]
        self.operations.copy_blocks(caches, source, torch.tensor([destination]))


@each_dtype
@given(
    st.integers(0, 2**32),
    st.sampled_from((None, 12, 40)),
    st.sampled_from((FEW, MANY)),
    st.lists(st.sampled_from(EVENTS), min_size=4, max_size=40),
)
@settings(max_examples=40)
def test_every_step_equals_the_reference(
    dtype: torch.dtype, seed: int, window: int | None, heads: int, events: list[str]
) -> None:
    contexts = Contexts(seed, dtype, window, heads)
    plan = contexts.step([1] * len(contexts.tables))
    for event in events:
        rng = contexts.rng
        num_new = [1] * len(contexts.tables)
        read = [block for table in contexts.tables for block in table]
        match event:
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
def test_values_may_be_part_of_the_keys(dtype: torch.dtype) -> None:
    contexts = Contexts(9, dtype)
    contexts.values = contexts.keys[..., : DIM // 2]
    for _ in range(3):
        for row in range(3):
            contexts.lengths[row] += 1
            contexts.cover(row)
        plan = build_plan([1] * 3, contexts.lengths, contexts.tables, block_size=BLOCK, min_saved=0)
        for _ in range(2):
            key, _ = contexts.new(3)
            value, slots = key[..., : DIM // 2], torch.from_numpy(plan.slots)
            contexts.operations.store_kv(key, value, contexts.keys, contexts.values, slots)
            contexts.compare(plan)
