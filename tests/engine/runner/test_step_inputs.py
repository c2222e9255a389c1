"""The decode steps that are recorded in advance cover those that a server runs."""

from __future__ import annotations

import random
from itertools import count

import pytest

from conure.engine.protocol import EngineLimits
from conure.engine.runner import step_inputs
from conure.engine.runner.base import ScheduledSequence
from conure.engine.runner.cuda_graphs import bucket_size, bucket_sizes
from conure.engine.runner.step_inputs import AttentionLayerGroup
from conure.kernels.planning.planner import Planner

configuration = pytest.importorskip("conure.kernels.gpu.configuration")
builder = pytest.importorskip("conure.kernels.gpu.work_table.builder")

LIMITS = EngineLimits(
    context_len=8192, block_size=16, num_blocks=53_000, step_tokens=4096, max_sequences=128
)
Key = tuple[int, int, bool, bool]
"""Padded rows, rows of large items, whether partials are merged, and whether a window is used."""


class Recordings:
    """The keys that recordings of a model's decode steps have on a GPU of 132 processors."""

    def __init__(self, heads: int, kv_heads: int, window: int | None) -> None:
        import torch

        self.group = AttentionLayerGroup(heads, kv_heads, 128, 128, window)
        self.shape = configuration.AttentionShape(
            torch.bfloat16, kv_heads, heads // kv_heads, 128, 128, LIMITS.block_size
        )
        self.planner = Planner(block_size=LIMITS.block_size)

    def key(self, rows: list[ScheduledSequence]) -> Key:
        plan = step_inputs.pack(rows, self.planner).plan
        window = plan.effective_window(self.group.window)
        shape = self.shape
        work = builder.WorkTableBuilder(
            builder.LayerGroup(
                kv_heads=shape.kv_heads,
                group=shape.group,
                window=window,
                small=configuration.small_rows(shape.group),
                large=configuration.large_rows(shape),
                processors=132,
                programs=(3, 2, 1),
            )
        )
        work.update(plan)
        size = bucket_size(len(rows), LIMITS.max_sequences)
        assert size is not None
        return size, work.large, work.is_merged, window is not None

    def warmed(self) -> set[Key]:
        return {
            self.key(rows)
            for size in bucket_sizes(LIMITS.max_sequences)
            for rows in step_inputs.decode_warmup_batches(
                size, LIMITS, LIMITS.num_blocks, [self.group]
            )
        }


def serving_step(rng: random.Random) -> list[ScheduledSequence]:
    """Return a decode step in which some rows share a prefix, and some of them a longer one."""
    blocks = count(1)
    prefix = [next(blocks) for _ in range(rng.choice((4, 16, 64, 256)))]
    longer = [*prefix, *(next(blocks) for _ in range(rng.choice((8, 32))))]
    num_rows = rng.randint(1, LIMITS.max_sequences)
    num_sharing = rng.choice((0, 1, 2, 3, 8, num_rows // 2, num_rows))
    rows = []
    for row in range(num_rows):
        shared = rng.choice((prefix, longer)) if row < num_sharing else []
        length = len(shared) * LIMITS.block_size + rng.choice((1, 17, 100, 500, 1500))
        width = -(-length // LIMITS.block_size)
        table = [*shared, *(next(blocks) for _ in range(width - len(shared)))]
        rows.append(ScheduledSequence(row, [0] * length, length - 1, 1, table))
    return rows


@pytest.mark.parametrize(
    ("heads", "kv_heads", "window"),
    [(32, 8, None), (28, 4, None), (32, 8, 1024), (8, 8, None), (48, 1, None)],
)
def test_serving_never_waits_for_a_recording(heads: int, kv_heads: int, window: int | None) -> None:
    recordings = Recordings(heads, kv_heads, window)
    warmed = recordings.warmed()
    rng = random.Random(heads)
    missing = {recordings.key(serving_step(rng)) for _ in range(150)} - warmed
    assert missing == set()


def test_warming_writes_no_block_that_a_context_may_have() -> None:
    group = AttentionLayerGroup(32, 8, 128, 128, 1024)
    for size in bucket_sizes(LIMITS.max_sequences):
        for rows in step_inputs.decode_warmup_batches(size, LIMITS, LIMITS.num_blocks, [group]):
            assert len(rows) == size
            assert {row.blocks[row.start // LIMITS.block_size] for row in rows} == {
                LIMITS.num_blocks
            }
