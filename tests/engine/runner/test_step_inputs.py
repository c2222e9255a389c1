"""The steps that are recorded in advance cover those that a server runs."""

from __future__ import annotations

import random
from itertools import count

import pytest

from conure.engine.protocol import EngineLimits
from conure.engine.runner import step_inputs
from conure.engine.runner.base import ScheduledSequence
from conure.engine.runner.cuda_graphs import MAX_RECORDINGS
from conure.engine.runner.step_inputs import AttentionLayerGroup
from conure.engine.runner.warmup import recorded_size, recorded_sizes, warmup_steps
from conure.kernels.planning.planner import Planner

configuration = pytest.importorskip("conure.kernels.gpu.configuration")
builder = pytest.importorskip("conure.kernels.gpu.work_table.builder")
launcher = pytest.importorskip("conure.kernels.gpu.launcher")

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

    def key(self, rows: list[ScheduledSequence], size: int | None = None) -> Key:
        plan = step_inputs.pack(rows, self.planner).plan
        window = plan.effective_window(self.group.window)
        shape = self.shape
        self.work = work = builder.WorkTableBuilder(
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
        size = size or recorded_size(plan.num_queries, LIMITS)
        assert size is not None
        return size, work.large, work.is_merged, window is not None

    def warmed(self) -> set[Key]:
        steps = warmup_steps(LIMITS, LIMITS.num_blocks, [self.group])
        found = set()
        for step in steps:
            found.add(self.key(step.rows, step.size))
            self.most_words = max(self.most_words, len(self.work.words))
            self.most_partials = max(self.most_partials, self.work.num_partials)
        return found

    most_words = 0
    most_partials: int = launcher.RECORDED_PARTIALS

    @property
    def fits(self) -> bool:
        """Whether the last step fits into the memory of recorded steps."""
        return (
            len(self.work.words) <= self.most_words and self.work.num_partials <= self.most_partials
        )


def mixed_step(rng: random.Random) -> list[ScheduledSequence]:
    """Return a step of up to 256 tokens in which prompts join some decoding rows."""
    rows = serving_step(rng)[: rng.randint(1, 127)]
    num_free = 256 - len(rows)
    blocks = count(40_000)
    for row in range(rng.randint(1, 4)):
        num_new = rng.randint(1, max(1, num_free // 4))
        # A prompt that follows a prefix of a decoding row, or begins.
        shared = rng.choice((rows[0].blocks[:-1], []))
        start = len(shared) * LIMITS.block_size
        width = -(-(start + num_new) // LIMITS.block_size)
        table = [*shared, *(next(blocks) for _ in range(width - len(shared)))]
        rows.append(ScheduledSequence(200 + row, [0] * (start + num_new), start, num_new, table))
    return rows[: LIMITS.max_sequences]


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
    missing = {recordings.key(serving_step(rng)) for _ in range(100)} - warmed
    assert missing == set()
    num_eager = 0
    for _ in range(60):
        key = recordings.key(mixed_step(rng))
        num_eager += key not in warmed or not recordings.fits
    assert num_eager == 0
    assert len(warmed) <= MAX_RECORDINGS


def test_warming_writes_no_block_that_a_context_may_have() -> None:
    group = AttentionLayerGroup(32, 8, 128, 128, 1024)
    for step in warmup_steps(LIMITS, LIMITS.num_blocks, [group]):
        assert sum(row.num_new for row in step.rows) <= step.size
        assert len(step.rows) <= LIMITS.max_sequences
        for row in step.rows:
            written = row.blocks[row.start // LIMITS.block_size :]
            assert {*written} == {LIMITS.num_blocks}


def test_padded_sizes_end_at_the_largest_step() -> None:
    assert recorded_sizes(LIMITS) == (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)
    small = EngineLimits(64, 4, 16, step_tokens=24, max_sequences=6)
    assert recorded_sizes(small) == (1, 2, 4, 6, 8, 16, 24)
    assert [recorded_size(num, small) for num in (1, 3, 6, 7, 24, 25)] == [1, 4, 6, 8, 24, None]
