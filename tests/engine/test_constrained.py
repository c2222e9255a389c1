"""Constrained outputs on the engine core: what is forced, what ends them, who waits for whom."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer

from conure.engine import api, grammar
from conure.engine import constraint as constraint_file
from conure.engine.constraints import Constraints
from conure.engine.engine import Engine
from conure.engine.fake import FakeRunner, default_text
from conure.engine.grammar import compile_grammar
from conure.engine.runner import Done, Handle, Row
from conure.engine.vetting import Question, Verdict, Vetter

from .constrained import AMBIGUOUS, Bench, lark, schema

LIMITS = api.Limits(context_len=256, block_size=4, num_blocks=128, step_tokens=64, max_sequences=16)
EOS = (258, 256)
OBJECT = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
YES_NO = lark('start: "yes" | "no"')


class Gate(Vetter):
    """A vetter that lets nobody through before it is told to."""

    def __init__(self) -> None:
        super().__init__([])
        self.is_open = threading.Event()

    def ask(self, question: Question) -> Verdict:
        assert self.is_open.wait(20)
        return super().ask(question)


def fake(answer: str | None = None, limits: api.Limits = LIMITS) -> FakeRunner:
    return FakeRunner(limits=limits, answer=(lambda _: answer) if answer is not None else None)


@pytest.fixture(scope="module")
def shared() -> Iterator[Constraints]:
    runner = fake()
    constraints = Constraints(runner.tokenizer_json, runner.eos_ids)
    yield constraints
    constraints.close()


MakeBench = Callable[..., Bench]


@pytest.fixture
def bench_of(shared: Constraints) -> MakeBench:
    """Benches over one set of compiled grammars: no test leaves anything to collect."""

    def make(answer: str | None = None, limits: api.Limits = LIMITS) -> Bench:
        return Bench(fake(answer, limits), shared)

    return make


@pytest.fixture
def gated() -> Iterator[tuple[Bench, Gate]]:
    runner, gate = fake(), Gate()
    bench = Bench(runner, Constraints(runner.tokenizer_json, runner.eos_ids, vetter=gate))
    yield bench, gate
    gate.is_open.set()
    bench.close()


# What comes out.


def test_the_hello_says_that_constraints_can_be_kept(shared: Constraints) -> None:
    assert "constraints" in Engine(fake(), 1, constraints=shared).hello().capabilities
    assert "constraints" not in Engine(fake(), 1).hello().capabilities


def test_without_constraints_a_generate_under_one_is_refused_and_a_check_answered() -> None:
    engine = Engine(fake(), 1)
    engine.apply(api.Fill(1, [1, 2, 3]))
    engine.apply(api.Generate(1, api.Sampling(5), constraint=YES_NO))
    engine.apply(api.Check(9, YES_NO))
    step = engine.step()
    assert step is not None
    failed, checked = step.reports
    assert isinstance(failed, api.Failed)
    assert isinstance(checked, api.Checked)
    assert (failed.code, checked.code) == ("engine.unsupported_constraint",) * 2


def test_a_scripted_text_is_forced_into_the_grammar(bench_of: MakeBench) -> None:
    end = bench_of("n-o").call(YES_NO).finished
    assert (end.text, end.reason, end.stop, end.constraint) == ("no", "stop", None, "met")


def test_text_that_the_grammar_allows_comes_as_it_would_without(bench_of: MakeBench) -> None:
    bench = bench_of("some words")
    free = bench.call(None).finished
    held = bench.call(lark("start: /[a-z ]*/")).finished
    assert held.text == free.text == "some words"
    assert held.num_decoded == free.num_decoded
    assert (free.constraint, held.constraint) == ("none", "met")


def test_what_is_forced_needs_no_step_of_the_model_and_is_counted(bench_of: MakeBench) -> None:
    bench = bench_of('{"name":"Jo","age":42}')
    bench.call(schema(OBJECT))
    before = bench.engine.status().num_steps
    outcome = bench.call(schema(OBJECT))
    end = outcome.finished
    assert end.text == '{"name":"Jo","age":42}'
    # The model says J, o and the quote, 4, 2 and the brace; the first five ride in the prefill.
    assert (end.num_decoded, end.num_forced) == (6, len('{"name":"') + len(',"age":'))
    assert bench.engine.status().num_steps - before == 6
    assert outcome.ids == list(end.text.encode())
    assert end.num_kept == len(outcome.ids)
    assert isinstance(outcome.reports[-2], api.Tokens)


def test_forced_tokens_are_no_prompt_tokens(bench_of: MakeBench) -> None:
    outcome = bench_of('{"name":"Jo","age":42}').call(schema(OBJECT), b"0123456789")
    [filled] = [r for r in outcome.reports if isinstance(r, api.Filled)]
    assert (filled.computed, filled.shared, filled.cached, filled.recomputed) == (10, 0, 0, 0)


def test_an_output_without_a_choice_ends_without_the_model_and_after_its_prompt(
    bench_of: MakeBench,
) -> None:
    bench = bench_of()
    for prompt in (b"0123456789" * 20, b"x"):
        outcome = bench.call(lark('start: "only this"'), prompt)
        assert [type(r) for r in outcome.reports] == [api.Tokens, api.Filled, api.Finished]
        end = outcome.finished
        assert (end.text, end.num_decoded, end.num_forced) == ("only this", 0, 9)
        assert end.constraint == "met"


def test_an_empty_text_may_be_all_there_is(bench_of: MakeBench) -> None:
    end = bench_of().call(lark('start: ""')).finished
    assert (end.text, end.num_decoded, end.num_forced, end.constraint) == ("", 0, 0, "met")


def test_eos_comes_only_where_the_grammar_lets_the_text_end(bench_of: MakeBench) -> None:
    end = bench_of("ab").call(lark("start: /[a-z]{5}[a-z]*/")).finished
    assert len(end.text) == 5
    assert end.text.startswith("ab")
    assert end.constraint == "met"


def test_the_next_slot_goes_on_behind_a_constrained_output(bench_of: MakeBench) -> None:
    bench = bench_of("yes")
    context = bench.start(list(b"abc"), YES_NO)
    bench.run()
    bench.apply(api.Fill(context, list(b" and ")))
    bench.generate(context, lark("start: /[0-9]+/"), max_tokens=3)
    bench.run()
    outcome = bench.outcomes[context]
    fills = [r for r in outcome.reports if isinstance(r, api.Filled)]
    # Of "yes" all but the last token has KV, if any has: it was forced behind the y.
    assert [f.computed for f in fills] == [3, 5]
    assert outcome.finished.constraint == "met"
    bench.free(context)


# What ends it early.


def test_length_cuts_an_output_and_says_so(bench_of: MakeBench) -> None:
    bench = bench_of('{"name":"Jo","age":42}')
    for most in (1, 9, 10, 12, 20, 21):
        end = bench.call(schema(OBJECT), max_tokens=most).finished
        assert (end.reason, end.constraint, len(end.text)) == ("length", "cut", most)
    end = bench.call(schema(OBJECT), max_tokens=22).finished
    assert (end.reason, end.constraint) == ("stop", "met")


def test_an_output_that_could_end_where_length_cuts_it_is_met(bench_of: MakeBench) -> None:
    end = bench_of("abcdef").call(lark("start: /[a-z]+/"), max_tokens=4).finished
    assert (end.text, end.reason, end.constraint) == ("abcd", "length", "met")


def test_a_stop_string_cuts_an_output_among_forced_tokens_too(bench_of: MakeBench) -> None:
    bench = bench_of('{"name":"Jo","age":42}')
    end = bench.call(schema(OBJECT), stop=("age",)).finished
    assert (end.text, end.stop, end.constraint) == ('{"name":"Jo","', "age", "cut")
    assert end.num_kept == len(end.text)


def test_a_stop_token_ends_an_output_where_the_grammar_allows_it(bench_of: MakeBench) -> None:
    end = bench_of("ab.cd").call(lark("start: /[a-z.]+/"), stop_token_ids=(ord("."),)).finished
    assert (end.text, end.stop, end.constraint) == ("ab", ord("."), "met")


def test_min_tokens_and_ignore_eos_yield_to_a_finished_grammar(bench_of: MakeBench) -> None:
    bench = bench_of("a")
    end = bench.call(YES_NO, min_tokens=10, ignore_eos=True).finished
    assert (end.text in {"yes", "no"}, end.constraint) == (True, "met")
    words = lark("start: /[a-z]+/")
    assert len(bench.call(words, min_tokens=5).finished.text) == 5
    assert len(bench.call(words, ignore_eos=True, max_tokens=7).finished.text) == 7
    # All that may come is a stop token: the grammar wins over min_tokens.
    end = bench.call(lark('start: "." | "!"'), min_tokens=5, stop_token_ids=(46, 33)).finished
    assert end.reason == "stop"


def test_the_end_of_the_context_cuts_an_output(bench_of: MakeBench) -> None:
    bench = bench_of("")
    end = bench.call(lark("start: /[a-z]{100}/"), b"x" * 200).finished
    assert (end.reason, end.constraint, len(end.text)) == ("length", "cut", 56)
    end = bench.call(YES_NO, b"x" * 256).finished
    assert (end.reason, end.constraint, end.text) == ("length", "cut", "")


# Compiled elsewhere.


def test_other_calls_go_on_while_a_grammar_is_compiled(gated: tuple[Bench, Gate]) -> None:
    bench, gate = gated
    held = bench.start(list(b"first"), YES_NO)
    free = bench.start(list(b"second"), None)
    bench.run(until=lambda: free not in bench.open)
    assert bench.outcomes[free].finished.text == default_text(list(b"second"))
    assert bench.outcomes[held].reports == []
    while bench.step():
        pass
    # All of the prompt but the last token is computed; the engine may sleep.
    assert bench.engine.is_idle
    assert bench.engine.status().num_computed_tokens == len("second") + len("first") - 1
    gate.is_open.set()
    bench.run()
    filled, *_, end = bench.outcomes[held].reports
    assert filled == api.Filled(held, 5, 0, 0)
    assert isinstance(end, api.Finished)
    assert end.constraint == "met"


def test_a_fork_does_not_wait_for_a_parent_that_waits_for_its_grammar(
    gated: tuple[Bench, Gate],
) -> None:
    bench, _ = gated
    parent = bench.start(list(b"0123456"), YES_NO)
    child = parent + 1
    bench.outcomes[child] = bench.outcomes.pop(parent).__class__()
    bench.outcomes[parent] = bench.outcomes[child].__class__()
    bench.open.add(child)
    bench._num = child
    bench.apply(api.Generate(child, api.Sampling(9), parent=parent, parent_len=7))
    bench.run(until=lambda: child not in bench.open)
    assert bench.outcomes[child].finished.text == default_text(list(b"0123456"))[:9]


@pytest.mark.parametrize("command", [api.Free, api.Abort])
def test_a_call_is_given_up_while_its_grammar_is_compiled(
    gated: tuple[Bench, Gate], command: Callable[[int], api.Command]
) -> None:
    bench, gate = gated
    held, other = bench.start(list(b"first"), YES_NO), bench.start(list(b"other"), YES_NO)
    bench.step()
    bench.open.discard(held)
    bench.apply(command(held))
    gate.is_open.set()
    bench.run()
    assert bench.outcomes[held].reports == []
    assert bench.outcomes[other].finished.constraint == "met"
    bench.free(other)
    assert bench.engine.status().num_held == 0


def test_a_grammar_that_is_none_fails_its_calls_alone(bench_of: MakeBench) -> None:
    bench = bench_of()
    bad = lark("start: (")
    calls = [bench.start(list(b"some"), each) for each in (bad, bad, None, YES_NO)]
    bench.run()
    ends = [bench.outcomes[call].end for call in calls]
    assert [isinstance(end, api.Failed) for end in ends] == [True, True, False, False]
    failed = bench.outcomes[calls[0]].failed
    assert failed.code == "constraint.invalid"
    assert "Expected token" in failed.message
    # Known by now: refused at once.
    assert bench.call(bad).failed == api.Failed(bench._num, failed.code, failed.message)
    for call in calls:
        bench.free(call)


def test_a_constraint_is_checked_with_and_without_a_text(bench_of: MakeBench) -> None:
    bench = bench_of()
    unique = schema({"type": "array", "uniqueItems": True})
    commands = [
        api.Check(1, YES_NO),
        api.Check(2, YES_NO, "yes"),
        api.Check(3, YES_NO, "maybe"),
        api.Check(4, lark("start: [")),
        api.Check(5, unique, "[1,1]"),
        api.Check(6, unique, "[1,2]"),
    ]
    for command in commands:
        bench.apply(command)
    bench.run(until=lambda: len(bench.checked) == len(commands))
    found = bench.checked
    assert [found[n].matches for n in range(1, 7)] == [None, True, False, None, False, True]
    assert [found[n].is_relaxed for n in (2, 5, 6)] == [False, True, True]
    assert [found[n].code for n in (1, 4)] == ["", "constraint.invalid"]


# Relaxed ones.


def test_a_relaxed_constraint_is_held_against_the_finished_text(bench_of: MakeBench) -> None:
    unique = schema(
        {"type": "array", "items": {"type": "integer", "maximum": 9}, "uniqueItems": True}
    )
    end = bench_of("[1,2]").call(unique).finished
    assert (end.text, end.constraint) == ("[1,2]", "relaxed")
    end = bench_of("[1,1]").call(unique).finished
    assert (end.text, end.constraint) == ("[1,1]", "broken")
    end = bench_of("[1,1]").call(unique, max_tokens=3).finished
    assert (end.text, end.constraint) == ("[1,", "cut")


def test_a_call_that_is_freed_while_its_text_is_validated_is_gone(
    gated: tuple[Bench, Gate],
) -> None:
    bench, gate = gated
    unique = schema({"type": "array", "items": {"type": "integer"}, "uniqueItems": True})
    gate.is_open.set()
    bench.call(unique)
    gate.is_open.clear()
    context = bench.start(list(b"x"), unique)
    while bench.step():
        pass
    assert bench.outcomes[context].text
    assert context in bench.open
    bench.free(context)
    gate.is_open.set()
    assert bench.call(unique).finished.constraint == "relaxed"
    assert not any(isinstance(r, api.Finished) for r in bench.outcomes[context].reports)


# Slow ones.


class Letters(FakeRunner):
    """Says a or b as the seed has it, and counts the rows of each step."""

    def __init__(self) -> None:
        super().__init__(limits=api.Limits(2048, 16, 512, 256, 16))
        self.num_rows: list[int] = []

    def start(self, rows: Sequence[Row], copies: Sequence[tuple[int, int]]) -> Handle:
        super().start(rows, copies)
        self.num_rows.append(len(rows))
        return Done(
            [
                random.Random(1000 * row.sampling.seed + len(row.ids)).choice(b"ab")
                for row in rows
                if row.sampling is not None
            ]
        )


def test_a_slow_grammar_goes_on_aside_and_fails_before_it_takes_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(constraint_file, "SLOW_S", 0.002)
    monkeypatch.setattr(constraint_file, "BUDGET_S", 0.2)
    runner = Letters()
    bench = Bench(runner)
    slow = bench.start(list(b"slow"), AMBIGUOUS, max_tokens=1000)
    bench.run(until=lambda: bool(runner.num_rows))
    fast = bench.start(list(b"fast"), None, max_tokens=1000, ignore_eos=True)
    bench.run()
    assert bench.outcomes[slow].failed.code == "constraint.too_complex"
    assert len(bench.outcomes[fast].finished.text) == 1000
    # The slow one sat out steps that the fast one made.
    assert runner.num_rows.count(1) > 500
    bench.close()


def test_a_slow_grammar_says_the_same_as_a_fast_one(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for slow_s in (10.0, -1.0):
        monkeypatch.setattr(constraint_file, "SLOW_S", slow_s)
        monkeypatch.setattr(constraint_file, "BUDGET_S", 100.0)
        bench = Bench(fake('{"name":"Jo","age":42}'))
        ends = [bench.call(schema(OBJECT), max_tokens=most).finished for most in (100, 12)]
        texts.append([(e.text, e.reason, e.constraint, e.num_forced) for e in ends])
        bench.close()
    assert texts[0] == texts[1]


def test_outputs_that_use_up_what_a_grammar_may_hold_do_not_end_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[str] = []

    def compile_and_count(tokenizer: LLTokenizer, source: str) -> grammar.Compiled:
        compiled.append(source)
        return compile_grammar(tokenizer, source)

    monkeypatch.setattr(grammar, "MAX_STATES", 300)
    monkeypatch.setattr(grammar, "compile_grammar", compile_and_count)
    bench = Bench(Letters())
    states = lark("start: /(a|b)*a(a|b){60}/")
    for seed in range(20):
        end = bench.call(states, max_tokens=100, seed=seed).finished
        assert (len(end.text), end.constraint == "met") == (100, end.text[-61] == "a")
    assert len(compiled) > 3
    bench.close()


# Against a model of it.


TEXTS = st.text(alphabet='{}[]":, abé🦜019.-\n', max_size=30)
CONSTRAINTS: dict[str, Callable[[str], bool]] = {
    YES_NO: lambda text: text in {"yes", "no"},
    lark("start: /[a-z]{2,5}[0-9]*/"): lambda text: text[:2].isalpha(),
    schema(OBJECT): lambda text: jsonschema.Draft202012Validator(OBJECT).is_valid(json.loads(text)),
    schema({"type": "array", "items": {"type": "boolean"}, "maxItems": 3}): (
        lambda text: all(isinstance(each, bool) for each in json.loads(text))
    ),
}
CALLS = st.lists(
    st.tuples(
        st.sampled_from([None, *CONSTRAINTS]),
        st.integers(1, 60),
        st.binary(min_size=1, max_size=40),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=6,
)


@given(TEXTS, CALLS, st.integers(26, 60))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_calls_together_say_what_they_say_alone_also_where_memory_is_short(
    shared: Constraints, answer: str, calls: list[tuple[Any, int, bytes, int]], num_blocks: int
) -> None:
    alone = []
    wide = Bench(fake(answer), shared)
    for constraint, most, prompt, _ in calls:
        end = wide.call(constraint, prompt, max_tokens=most).finished
        alone.append((end.text, end.reason, end.constraint, end.num_kept))
        if constraint is not None and end.constraint == "met":
            assert CONSTRAINTS[constraint](end.text)
    narrow = Bench(fake(answer, api.Limits(256, 4, num_blocks, 24, 4)), shared)
    started = []
    for constraint, most, prompt, delay in calls:
        started.append(narrow.start(list(prompt), constraint, max_tokens=most))
        for _ in range(delay):
            narrow.step()
    narrow.run()
    for context, expected in zip(started, alone, strict=True):
        outcome = narrow.outcomes[context]
        end = outcome.finished
        assert (end.text, end.reason, end.constraint, end.num_kept) == expected
        assert outcome.text == end.text
        [filled] = [r for r in outcome.reports if isinstance(r, api.Filled)]
        assert outcome.reports.index(filled) < len(outcome.reports) - 1
        narrow.free(context)
    assert narrow.engine.status().num_held == 0
