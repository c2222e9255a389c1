"""The batch scheduler's choice of rows."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from conure.engine.core.batch_scheduler import schedule_step
from conure.engine.core.context import Context
from conure.engine.core.generation import GenerationState
from conure.engine.protocol import EngineLimits, SamplingParams
from conure.engine.text.byte_tokenizer import tokenizer_json
from conure.engine.text.detokenizer import Detokenizer, load_tokenizer

TOKENIZER = load_tokenizer(tokenizer_json())


@dataclass
class FakeKVAllocator:
    """Allocates up to `tokens` tokens; the contexts in `waiting` must wait."""

    tokens: int = 1_000_000
    waiting: set[int] = field(default_factory=set)

    def match_prefix(self, context: Context) -> bool:
        return context.id not in self.waiting

    def allocate(self, context: Context, begin: int, end: int) -> int:
        granted = min(end - begin, self.tokens)
        self.tokens -= granted
        return begin + granted


def context(number: int, length: int, computed: int = 0, *, generates: bool = False) -> Context:
    made = Context(number, "", 0.0, number, [0] * length, num_computed=computed)
    if generates:
        detokenizer = Detokenizer(TOKENIZER, [], ())
        made.generation = GenerationState(
            SamplingParams(9), length, length + 9, frozenset(), detokenizer
        )
    else:
        made.add_fill()
    return made


def limits(step_tokens: int = 100, max_sequences: int = 10) -> EngineLimits:
    return EngineLimits(1000, 16, 100, step_tokens, max_sequences)


def rows(
    work: list[Context], room: FakeKVAllocator | None = None, **bounds: int
) -> list[tuple[int, int, int]]:
    batch = schedule_step(work, room or FakeKVAllocator(), limits(**bounds))
    return [(c.row.context, c.row.start, c.row.num_new) for c in batch.scheduled]


def test_prompts_are_chunked_to_the_token_budget() -> None:
    work = [context(1, 30), context(2, 90), context(3, 50)]
    assert rows(work) == [(1, 0, 30), (2, 0, 70)]


def test_only_the_last_chunk_samples() -> None:
    work = [context(1, 150, generates=True)]
    batch = schedule_step(work, FakeKVAllocator(), limits())
    assert batch.scheduled[0].row.sampling is None
    work[0].num_computed = 100
    batch = schedule_step(work, FakeKVAllocator(), limits())
    assert batch.scheduled[0].row.sampling == SamplingParams(9)


def test_long_prompt_leaves_budget_for_decoding() -> None:
    work = [context(1, 500), *(context(i, 10, 9, generates=True) for i in range(2, 6))]
    assert rows(work) == [(1, 0, 96), *((i, 9, 1) for i in range(2, 6))]


def test_decoding_reserves_at_most_half_of_a_step() -> None:
    work = [context(1, 500), *(context(i, 10, 9, generates=True) for i in range(2, 30))]
    got = rows(work, step_tokens=20, max_sequences=100)
    assert got[0] == (1, 0, 10)
    assert len(got) == 11


def test_number_of_sequences_is_limited() -> None:
    work = [context(i, 5) for i in range(1, 9)]
    assert [row[0] for row in rows(work, max_sequences=3)] == [1, 2, 3]


def test_waiting_context_is_skipped() -> None:
    assert rows([context(1, 5), context(2, 5)], FakeKVAllocator(waiting={1})) == [(2, 0, 5)]


def test_failed_allocation_ends_the_batch() -> None:
    assert rows([context(1, 5), context(2, 5), context(3, 1)], FakeKVAllocator(tokens=7)) == [
        (1, 0, 5),
        (2, 0, 2),
    ]


def test_computed_context_is_complete_without_a_row() -> None:
    batch = schedule_step([context(1, 5, 5), context(2, 5, 4)], FakeKVAllocator(), limits())
    assert [c.id for c in batch.complete] == [1]
    assert [c.id for c in batch.scheduled] == [2]


def test_context_with_all_kv_reruns_its_last_token() -> None:
    assert rows([context(1, 8, 8, generates=True)]) == [(1, 7, 1)]


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60), st.booleans()), max_size=12),
    st.integers(1, 50),
    st.integers(1, 12),
    st.integers(1, 200),
)
def test_batch_is_ordered_limited_and_not_empty(
    shapes: list[tuple[int, int, bool]], step_tokens: int, max_sequences: int, room: int
) -> None:
    work = [
        context(i, length, min(computed, length), generates=generates)
        for i, (length, computed, generates) in enumerate(shapes)
    ]
    batch = schedule_step(work, FakeKVAllocator(room), limits(step_tokens, max_sequences))
    sizes = [c.row.num_new for c in batch.scheduled]
    assert sum(sizes) <= min(step_tokens, room)
    assert len(sizes) <= max_sequences
    assert all(size > 0 for size in sizes)
    numbers = [c.id for c in batch.scheduled]
    assert numbers == sorted(numbers)
    assert batch.scheduled or batch.complete or not work
