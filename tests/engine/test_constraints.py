"""Compiled grammars: shared by their text, bounded, and ready while the loop sleeps."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Iterator

import pytest

from conure.engine import api, bytelevel, constraints
from conure.engine.constraint import Constraint
from conure.engine.constraints import Constraints
from conure.engine.vetting import Question, Verdict, Vetter

from .constrained import lark, schema


class CountingVetter(Vetter):
    def __init__(self) -> None:
        super().__init__(["<|im_end|>"])
        self.questions: list[Question] = []
        self.threads: set[int] = set()

    def ask(self, question: Question) -> Verdict:
        self.questions.append(question)
        self.threads.add(threading.get_ident())
        return super().ask(question)


@pytest.fixture
def vetter() -> CountingVetter:
    return CountingVetter()


@pytest.fixture
def made(vetter: CountingVetter) -> Iterator[Constraints]:
    made = Constraints(bytelevel.tokenizer_json(), bytelevel.EOS_IDS, vetter=vetter)
    yield made
    made.close()


def wait(made: Constraints, count: int) -> list[Constraint | api.Checked]:
    """Collect `count` items, asleep until each is there."""
    ready: list[Constraint | api.Checked] = []
    while len(ready) < count:
        readable, _, _ = select.select([made.fileno()], [], [], 20)
        assert readable
        ready += made.collect()
    return ready


def test_a_grammar_is_vetted_and_compiled_once_for_all_that_ask(
    made: Constraints, vetter: CountingVetter
) -> None:
    sources = [lark('start: "a" | "b"'), lark("start: /[0-9]+/")]
    new = [made.new(sources[i % 2], 10) for i in range(10)]
    assert all(each.is_held for each in new)
    ready = wait(made, 10)
    assert {id(each) for each in ready} == {id(each) for each in new}
    assert not any(each.is_held for each in new)
    again = made.new(sources[0], 10)
    assert not again.is_held
    assert not made.is_pending
    assert [q.constraint for q in vetter.questions] == sources
    assert threading.get_ident() not in vetter.threads


def test_outputs_under_one_grammar_do_not_move_each_other(made: Constraints) -> None:
    first = made.new(lark("start: /[ab]c/"), 10)
    wait(made, 1)
    second = made.new(lark("start: /[ab]c/"), 10)
    made.take(first, ord("a"))
    assert (first.forced, first.is_over, first.is_met) == ([ord("c")], True, True)
    assert (second.forced, second.is_over) == ([], False)


def test_a_refusal_is_remembered(made: Constraints, vetter: CountingVetter) -> None:
    bad = lark("start: [")
    held = made.new(bad, 10)
    assert wait(made, 1) == [held]
    assert held.error is not None
    with pytest.raises(api.EngineError) as caught:
        made.new(bad, 10)
    assert caught.value.code == held.error.code == "constraint.invalid"
    made.check(api.Check(3, bad))
    assert wait(made, 1) == [api.Checked(3, held.error.code, held.error.message)]
    assert len(vetter.questions) == 1


def test_a_checked_constraint_is_compiled_when_it_is_used(
    made: Constraints, vetter: CountingVetter
) -> None:
    made.check(api.Check(1, lark('start: "a"')))
    assert wait(made, 1) == [api.Checked(1)]
    assert not made.new(lark('start: "a"'), 10).is_held


def test_what_is_kept_is_bounded_and_what_is_used_stays(
    made: Constraints, vetter: CountingVetter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraints, "MAX_CACHED_BYTES", 10 * constraints._ENTRY_BYTES)
    used = lark('start: "used"')
    for number in range(30):
        for source in (used, lark(f'start: "{number}"')):
            if made.new(source, 10).is_held:
                wait(made, 1)
    assert len(made._entries) < 10
    assert sum(entry.num_bytes for entry in made._entries.values()) == made._num_bytes
    assert [q.constraint for q in vetter.questions].count(used) == 1
    assert made.new(lark('start: "0"'), 10).is_held
    wait(made, 1)


def test_long_texts_make_their_grammar_count_for_more(
    made: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = lark("start: /[a-z]*/")
    first = made.new(source, 100_000)
    wait(made, 1)
    before = made._num_bytes
    for _ in range(50):
        made.take(first, ord("x"))
    made.retire(first)
    assert made._num_bytes == before + 50 * constraints._BYTES_PER_TOKEN
    monkeypatch.setattr(constraints, "MAX_CACHED_BYTES", made._num_bytes)
    made.new(lark("start: /[b-z]*/"), 10)
    wait(made, 1)
    assert made.new(source, 10).is_held
    wait(made, 1)


def test_masks_are_those_of_the_language(made: Constraints) -> None:
    held = made.new(lark('start: "a" ("b" | "c")?'), 10)
    wait(made, 1)
    assert (held.forced, held.is_met, held.is_over) == ([ord("a")], True, False)
    allowed = {i for i in range(len(held.mask) * 8) if held.mask[i >> 3] >> (i & 7) & 1}
    assert allowed == {ord("b"), ord("c"), *bytelevel.EOS_IDS}
    assert held.verdict == "met"
    without = held.without(bytelevel.EOS_IDS)
    assert {i for i in range(len(without) * 8) if without[i >> 3] >> (i & 7) & 1} == {98, 99}
    assert held.without([*allowed, 10_000]) == held.mask


def test_a_grammar_that_no_text_can_go_on_with_is_an_error() -> None:
    class Stuck:
        def get_error(self) -> str:
            return ""

        def is_error(self) -> bool:
            return False

        is_accepting = is_stopped = is_error

        def compute_ff_tokens(self) -> list[int]:
            return []

        def compute_bitmask(self) -> bytes:
            return bytes(8)

        def consume_tokens(self, sampled_tokens: list[int], /) -> bool:
            return True

    held = Constraint("", b"", (1,), 5)
    held.begin(Stuck(), Stuck)
    assert held.error is not None
    assert held.error.code == "constraint.invalid"


def test_a_move_costs_microseconds(made: Constraints) -> None:
    person = schema({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]})
    held = made.new(person, 5000)
    wait(made, 1)
    begin = time.thread_time()
    for _ in range(2000):
        made.take(held, ord("x"))
    # 15 us on a quiet machine; the bound is for a machine that does ten other things.
    assert time.thread_time() - begin < 2000 * 500e-6


def test_a_tokenizer_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="end token"):
        Constraints(bytelevel.tokenizer_json(), ())
    with pytest.raises(ValueError, match="tokenizer"):
        Constraints("{}", (1,))


def test_nothing_wakes_the_loop_once_all_is_collected(made: Constraints) -> None:
    for number in range(200):
        made.new(lark(f'start: "{number}"'), 10)
        made.new(lark('start: "same"'), 10)
        while made.is_pending:
            made.collect()
        readable, _, _ = select.select([made.fileno()], [], [], 0)
        assert not readable
