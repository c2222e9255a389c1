"""Which rows a step gets, decided over contexts alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from conure.engine.api import Limits, Sampling
from conure.engine.batcher import plan
from conure.engine.bytelevel import tokenizer_json
from conure.engine.context import Context, Tally
from conure.engine.detokenizer import Detokenizer, load_tokenizer
from conure.engine.generation import Generation

TOKENIZER = load_tokenizer(tokenizer_json())


@dataclass
class Room:
    """Memory that has room for so many tokens and lets some contexts wait."""

    tokens: int = 1_000_000
    waiting: set[int] = field(default_factory=set)

    def attach(self, context: Context) -> bool:
        return context.id not in self.waiting

    def reserve(self, context: Context, begin: int, end: int) -> int:
        granted = min(end - begin, self.tokens)
        self.tokens -= granted
        return begin + granted


def context(number: int, length: int, computed: int = 0, *, generates: bool = False) -> Context:
    made = Context(number, "", 0.0, number, [0] * length, num_computed=computed)
    if generates:
        detokenizer = Detokenizer(TOKENIZER, [], ())
        made.generation = Generation(Sampling(9), length, length + 9, frozenset(), detokenizer)
    else:
        made.tallies = [Tally(length), Tally()]
    return made


def limits(step_tokens: int = 100, max_sequences: int = 10) -> Limits:
    return Limits(1000, 16, 100, step_tokens, max_sequences)


def rows(
    work: list[Context], room: Room | None = None, **bounds: int
) -> list[tuple[int, int, int]]:
    batch = plan(work, room or Room(), limits(**bounds))
    return [(c.row.context, c.row.start, c.row.num_new) for c in batch.chosen]


def test_prompts_are_cut_to_what_the_step_has_left() -> None:
    work = [context(1, 30), context(2, 90), context(3, 50)]
    assert rows(work) == [(1, 0, 30), (2, 0, 70)]


def test_only_a_row_that_reaches_the_end_of_a_generating_context_samples() -> None:
    work = [context(1, 150, generates=True)]
    batch = plan(work, Room(), limits())
    assert batch.chosen[0].row.sampling is None
    work[0].num_computed = 100
    batch = plan(work, Room(), limits())
    assert batch.chosen[0].row.sampling == Sampling(9)


def test_a_long_prompt_leaves_room_for_decoding_behind_it() -> None:
    work = [context(1, 500), *(context(i, 10, 9, generates=True) for i in range(2, 6))]
    assert rows(work) == [(1, 0, 96), *((i, 9, 1) for i in range(2, 6))]


def test_decoding_takes_at_most_half_of_a_step_from_a_better_prompt() -> None:
    work = [context(1, 500), *(context(i, 10, 9, generates=True) for i in range(2, 30))]
    got = rows(work, step_tokens=20, max_sequences=100)
    assert got[0] == (1, 0, 10)
    assert len(got) == 11


def test_no_more_sequences_than_the_limit() -> None:
    work = [context(i, 5) for i in range(1, 9)]
    assert [row[0] for row in rows(work, max_sequences=3)] == [1, 2, 3]


def test_whoever_waits_sits_out_and_others_go_on() -> None:
    assert rows([context(1, 5), context(2, 5)], Room(waiting={1})) == [(2, 0, 5)]


def test_without_room_for_the_better_the_worse_get_nothing() -> None:
    assert rows([context(1, 5), context(2, 5), context(3, 1)], Room(tokens=7)) == [
        (1, 0, 5),
        (2, 0, 2),
    ]


def test_what_is_computed_already_is_complete_without_a_row() -> None:
    batch = plan([context(1, 5, 5), context(2, 5, 4)], Room(), limits())
    assert [c.id for c in batch.complete] == [1]
    assert [c.id for c in batch.chosen] == [2]


def test_a_context_with_all_its_kv_runs_its_last_token_for_the_logits() -> None:
    assert rows([context(1, 8, 8, generates=True)]) == [(1, 7, 1)]


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60), st.booleans()), max_size=12),
    st.integers(1, 50),
    st.integers(1, 12),
    st.integers(1, 200),
)
@settings(deadline=None, database=None)
def test_a_step_is_within_its_limits_in_order_and_never_empty(
    shapes: list[tuple[int, int, bool]], step_tokens: int, max_sequences: int, room: int
) -> None:
    work = [
        context(i, length, min(computed, length), generates=generates)
        for i, (length, computed, generates) in enumerate(shapes)
    ]
    batch = plan(work, Room(room), limits(step_tokens, max_sequences))
    sizes = [c.row.num_new for c in batch.chosen]
    assert sum(sizes) <= min(step_tokens, room)
    assert len(sizes) <= max_sequences
    assert all(size > 0 for size in sizes)
    numbers = [c.id for c in batch.chosen]
    assert numbers == sorted(numbers)
    assert batch.chosen or batch.complete or not work
