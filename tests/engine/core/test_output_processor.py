"""Constrained outputs on the engine core: masks, forced tokens, ends and waiting."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer
from tokenizers import Tokenizer, decoders, models

from conure.engine import protocol
from conure.engine.constraints import grammar
from conure.engine.constraints import state as constraint_file
from conure.engine.constraints.compiler import ConstraintCompiler
from conure.engine.constraints.grammar import compile_grammar
from conure.engine.constraints.sandbox import SandboxedGrammarCheck, SandboxReply, SandboxRequest
from conure.engine.core.engine import EngineCore
from conure.engine.core.generation import GenerationState
from conure.engine.runner.base import CompletedStep, Handle, ScheduledSequence
from conure.engine.testing.scripted_runner import FakeRunner, default_text
from conure.engine.text.detokenizer import Detokenizer

from ..constraint_harness import AMBIGUOUS, ConstraintHarness, lark, schema
from ..server_double import RecordingRunner

LIMITS = protocol.EngineLimits(
    context_len=256, block_size=4, num_blocks=128, step_tokens=64, max_sequences=16
)
EOS = (258, 256)
OBJECT = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
YES_NO = lark('start: "yes" | "no"')


class GatedSandbox(SandboxedGrammarCheck):
    """A sandbox that blocks every request until `is_open` is set."""

    def __init__(self) -> None:
        super().__init__([])
        self.is_open = threading.Event()

    def validate(self, request: SandboxRequest) -> SandboxReply:
        assert self.is_open.wait(60)
        return super().validate(request)


def fake(answer: str | None = None, limits: protocol.EngineLimits = LIMITS) -> FakeRunner:
    return FakeRunner(limits=limits, answer=(lambda _: answer) if answer is not None else None)


@pytest.fixture(scope="module")
def shared() -> Iterator[ConstraintCompiler]:
    runner = fake()
    constraints = ConstraintCompiler(runner.tokenizer_json, runner.eos_ids)
    yield constraints
    constraints.close()


MakeHarness = Callable[..., ConstraintHarness]


@pytest.fixture
def harness_of(shared: ConstraintCompiler) -> MakeHarness:
    """Harnesses that share one compiler. Every test must collect all its work."""

    def make(
        answer: str | None = None, limits: protocol.EngineLimits = LIMITS
    ) -> ConstraintHarness:
        return ConstraintHarness(fake(answer, limits), shared)

    return make


@pytest.fixture
def gated() -> Iterator[tuple[ConstraintHarness, GatedSandbox]]:
    runner, gate = fake(), GatedSandbox()
    harness = ConstraintHarness(
        runner,
        ConstraintCompiler(runner.tokenizer_json, runner.eos_ids, sandbox=gate, text_sandbox=gate),
    )
    yield harness, gate
    gate.is_open.set()
    harness.close()


# Outputs.


def test_hello_announces_constraint_support(shared: ConstraintCompiler) -> None:
    assert "constraints" in EngineCore(fake(), 1, constraints=shared).hello().capabilities
    assert "constraints" not in EngineCore(fake(), 1).hello().capabilities


def test_engine_without_constraints_rejects_constrained_commands() -> None:
    engine = EngineCore(fake(), 1)
    engine.apply(protocol.Fill(1, [1, 2, 3]))
    engine.apply(protocol.GenerateCommand(1, protocol.SamplingParams(5), constraint=YES_NO))
    engine.apply(protocol.ValidateConstraint(9, YES_NO))
    step = engine.step()
    assert step is not None
    failed, checked = step.reports
    assert isinstance(failed, protocol.Failed)
    assert isinstance(checked, protocol.Checked)
    assert (failed.code, checked.code) == ("engine.unsupported_constraint",) * 2


def test_mask_forces_text_into_the_grammar(harness_of: MakeHarness) -> None:
    end = harness_of("n-o").call(YES_NO).finished
    assert (end.text, end.reason, end.stop, end.constraint) == ("no", "stop", None, "met")


def test_permissive_grammar_does_not_change_the_text(harness_of: MakeHarness) -> None:
    harness = harness_of("some words")
    free = harness.call(None).finished
    held = harness.call(lark("start: /[a-z ]*/")).finished
    assert held.text == free.text == "some words"
    assert held.num_decoded == free.num_decoded
    assert (free.constraint, held.constraint) == ("none", "met")


def test_forced_tokens_take_no_step_and_are_counted(harness_of: MakeHarness) -> None:
    harness = harness_of('{"name":"Jo","age":42}')
    harness.call(schema(OBJECT))
    before = harness.engine.status().num_steps
    outcome = harness.call(schema(OBJECT))
    end = outcome.finished
    assert end.text == '{"name":"Jo","age":42}'
    # The model samples J, o, the quote, 4, 2 and the brace. The forced prefix is prefilled.
    assert (end.num_decoded, end.num_forced) == (6, len('{"name":"') + len(',"age":'))
    assert harness.engine.status().num_steps - before == 6
    assert outcome.ids == list(end.text.encode())
    assert end.num_kept == len(outcome.ids)
    assert isinstance(outcome.reports[-2], protocol.Tokens)


def test_forced_tokens_do_not_count_as_prompt(harness_of: MakeHarness) -> None:
    outcome = harness_of('{"name":"Jo","age":42}').call(schema(OBJECT), b"0123456789")
    [filled] = [r for r in outcome.reports if isinstance(r, protocol.Filled)]
    assert (filled.computed, filled.shared, filled.cached, filled.recomputed) == (10, 0, 0, 0)


def test_fully_forced_output_finishes_after_its_prompt(
    harness_of: MakeHarness,
) -> None:
    harness = harness_of()
    forced = lark('start: "only this"')
    harness.call(forced)  # From here on, the grammar is cached.
    for prompt in (b"0123456789" * 20, b"x"):
        outcome = harness.call(forced, prompt)
        assert [type(r) for r in outcome.reports] == [
            protocol.Tokens,
            protocol.Filled,
            protocol.Finished,
        ]
        end = outcome.finished
        assert (end.text, end.num_decoded, end.num_forced) == ("only this", 0, 9)
        assert end.constraint == "met"


@pytest.mark.parametrize("constraint", [None, YES_NO, lark('start: ""'), AMBIGUOUS])
def test_output_of_a_full_context_finishes_after_its_prompt(
    harness_of: MakeHarness, constraint: str | None
) -> None:
    harness = harness_of(limits=msgspec.structs.replace(LIMITS, context_len=100))
    for prompt in (b"0123456789" * 10, b"9876543210" * 10):  # the second grammar is cached
        outcome = harness.call(constraint, prompt)
        assert [type(r) for r in outcome.reports] == [protocol.Filled, protocol.Finished]
        assert (outcome.finished.text, outcome.finished.num_decoded) == ("", 0)


def test_empty_text_can_satisfy_a_grammar(harness_of: MakeHarness) -> None:
    end = harness_of().call(lark('start: ""')).finished
    assert (end.text, end.num_decoded, end.num_forced, end.constraint) == ("", 0, 0, "met")


def test_eos_waits_until_the_grammar_allows_an_end(harness_of: MakeHarness) -> None:
    end = harness_of("ab").call(lark("start: /[a-z]{5}[a-z]*/")).finished
    assert len(end.text) == 5
    assert end.text.startswith("ab")
    assert end.constraint == "met"


def test_next_output_continues_after_a_constrained_one(harness_of: MakeHarness) -> None:
    harness = harness_of("yes")
    context = harness.start(list(b"abc"), YES_NO)
    harness.run()
    harness.apply(protocol.Fill(context, list(b" and ")))
    harness.generate(context, lark("start: /[0-9]+/"), max_tokens=3)
    harness.run()
    outcome = harness.outcomes[context]
    fills = [r for r in outcome.reports if isinstance(r, protocol.Filled)]
    # "es" was forced after "y": the last token of "yes" has no KV yet.
    assert [f.computed for f in fills] == [3, 5]
    assert outcome.finished.constraint == "met"
    harness.free(context)


def test_forced_token_that_the_model_lacks_fails_the_output(
    shared: ConstraintCompiler,
) -> None:
    runner = fake()
    runner.num_ids = ord("y")
    harness = ConstraintHarness(runner, shared)
    assert harness.call(lark('start: "yes"')).failed.code == "engine.unknown_token"


# Early ends.


def test_length_reports_a_cut_output(harness_of: MakeHarness) -> None:
    harness = harness_of('{"name":"Jo","age":42}')
    for most in (1, 9, 10, 12, 20, 21):
        end = harness.call(schema(OBJECT), max_tokens=most).finished
        assert (end.reason, end.constraint, len(end.text)) == ("length", "cut", most)
    end = harness.call(schema(OBJECT), max_tokens=22).finished
    assert (end.reason, end.constraint) == ("stop", "met")


def test_complete_text_at_max_tokens_is_met(harness_of: MakeHarness) -> None:
    end = harness_of("abcdef").call(lark("start: /[a-z]+/"), max_tokens=4).finished
    assert (end.text, end.reason, end.constraint) == ("abcd", "length", "met")


def test_stop_string_cuts_forced_tokens(harness_of: MakeHarness) -> None:
    harness = harness_of('{"name":"Jo","age":42}')
    end = harness.call(schema(OBJECT), stop=("age",)).finished
    assert (end.text, end.stop, end.constraint) == ('{"name":"Jo","', "age", "cut")
    assert end.num_kept == len(end.text)


@pytest.mark.parametrize(
    ("constraint", "answer", "stop", "outcome"),
    [
        (lark("start: /[a-z.]+/"), "ab.cd", ".", "met"),
        (lark("start: /[a-z.]{3,}/"), "ab.cd", ".", "cut"),
        (lark('start: "N" | "NY, NY"'), "NY, NY", "Y,", "met"),
        (schema({"type": "number", "not": {"const": 9}}), "12.5", ".", "relaxed"),
        (schema({"type": "number", "not": {"const": 12}}), "12.5", ".", "broken"),
    ],
)
@pytest.mark.parametrize("slow_s", [10.0, -1.0])
def test_complete_text_before_a_stop_string_is_met(
    monkeypatch: pytest.MonkeyPatch,
    harness_of: MakeHarness,
    slow_s: float,
    constraint: str,
    answer: str,
    stop: str,
    outcome: str,
) -> None:
    monkeypatch.setattr(constraint_file, "SLOW_S", slow_s)
    end = harness_of(answer).call(constraint, stop=(stop,)).finished
    text = answer[: answer.index(stop)]
    assert (end.text, end.reason, end.stop, end.constraint) == (text, "stop", stop, outcome)


def test_stop_string_in_the_withheld_text_ends_an_output() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, ".â": 1}, unk_token="a"))
    tokenizer.decoder = decoders.ByteLevel()
    for end, stop_ids in ((3, frozenset[int]()), (9, frozenset({2}))):
        detokenizer = Detokenizer(tokenizer, [0], (".",))
        generation = GenerationState(protocol.SamplingParams(9), 1, end, stop_ids, detokenizer)
        generation.append([0], [0, 1, 2])
        finished = generation.report(1)
        assert (finished.text, finished.reason, finished.stop) == ("a", "stop", ".")


def test_stop_token_ends_where_the_grammar_allows_it(harness_of: MakeHarness) -> None:
    end = harness_of("ab.cd").call(lark("start: /[a-z.]+/"), stop_token_ids=(ord("."),)).finished
    assert (end.text, end.stop, end.constraint) == ("ab", ord("."), "met")


@pytest.mark.parametrize("choices", ['"New York, NY" | "Boston, MA"', '"N," | "Boston, MA"'])
def test_stop_token_cuts_forced_tokens(harness_of: MakeHarness, choices: str) -> None:
    end = harness_of("N").call(lark(f"start: {choices}"), stop_token_ids=(ord(","),)).finished
    assert (end.reason, end.stop, end.constraint) == ("stop", ord(","), "cut")


@pytest.mark.parametrize("slow_s", [10.0, -1.0])
@pytest.mark.parametrize("text", ['"a"', "/[a-z]+/"], ids=["forced", "sampled"])
@pytest.mark.parametrize(("rest", "outcome"), [("", "met"), (' "b"', "cut")])
def test_end_token_in_a_grammar_ends_the_output(
    monkeypatch: pytest.MonkeyPatch,
    harness_of: MakeHarness,
    slow_s: float,
    text: str,
    rest: str,
    outcome: str,
) -> None:
    monkeypatch.setattr(constraint_file, "SLOW_S", slow_s)
    end = harness_of("a").call(lark(f"start: {text} <|im_end|>{rest}")).finished
    assert (end.text, end.stop, end.constraint) == ("a", None, outcome)


def test_complete_grammar_overrides_min_tokens_and_ignore_eos(harness_of: MakeHarness) -> None:
    harness = harness_of("a")
    end = harness.call(YES_NO, min_tokens=10, ignore_eos=True).finished
    assert (end.text in {"yes", "no"}, end.constraint) == (True, "met")
    words = lark("start: /[a-z]+/")
    assert len(harness.call(words, min_tokens=5).finished.text) == 5
    assert len(harness.call(words, ignore_eos=True, max_tokens=7).finished.text) == 7
    # Only stop tokens are allowed: the grammar overrides min_tokens.
    end = harness.call(lark('start: "." | "!"'), min_tokens=5, stop_token_ids=(46, 33)).finished
    assert end.reason == "stop"


def test_context_length_cuts_an_output(harness_of: MakeHarness) -> None:
    harness = harness_of("")
    end = harness.call(lark("start: /[a-z]{100}/"), b"x" * 200).finished
    assert (end.reason, end.constraint, len(end.text)) == ("length", "cut", 56)
    end = harness.call(YES_NO, b"x" * 256).finished
    assert (end.reason, end.constraint, end.text) == ("length", "cut", "")


# Compilation in a thread.


def test_other_calls_continue_during_compilation(
    gated: tuple[ConstraintHarness, GatedSandbox],
) -> None:
    harness, gate = gated
    held = harness.start(list(b"first"), YES_NO)
    free = harness.start(list(b"second"), None)
    harness.run(until=lambda: free not in harness.open)
    assert harness.outcomes[free].finished.text == default_text(list(b"second"))
    while harness.step():
        pass
    # The prompt is filled; the engine may sleep.
    assert harness.engine.is_idle
    assert harness.outcomes[held].reports == [protocol.Filled(held, 5, 0, 0)]
    assert harness.engine.status().num_computed_tokens == len("second") + len("first")
    gate.is_open.set()
    harness.run()
    filled, *_, end = harness.outcomes[held].reports
    assert filled == protocol.Filled(held, 5, 0, 0)
    assert isinstance(end, protocol.Finished)
    assert end.constraint == "met"


def test_fill_is_answered_while_the_grammar_of_a_later_output_compiles() -> None:
    for late in (False, True):
        runner, gate = RecordingRunner(LIMITS, late=late), GatedSandbox()
        harness = ConstraintHarness(
            runner, ConstraintCompiler(runner.tokenizer_json, runner.eos_ids, sandbox=gate)
        )
        calls = [harness.start(list(b"some text"), YES_NO) for _ in range(2)]
        while harness.step():
            pass
        assert harness.engine.is_idle
        for call in calls:
            (filled,) = harness.outcomes[call].reports
            assert isinstance(filled, protocol.Filled)
        gate.is_open.set()
        harness.run()
        assert {harness.outcomes[call].finished.constraint for call in calls} == {"met"}
        harness.close()


def fill_memory(harness: ConstraintHarness) -> tuple[list[int], int]:
    """Start two blocked calls that hold the memory, and one that needs more than the rest."""
    held = [harness.start([number] * 250, YES_NO) for number in range(2)]
    free = harness.start(list(b"more than the rest of the memory"), None)
    for _ in range(2 * len(held) * 250 // LIMITS.step_tokens):
        harness.step()
    assert not harness.step()
    return held, free


def test_engine_sleeps_while_blocked_calls_hold_the_memory(
    gated: tuple[ConstraintHarness, GatedSandbox],
) -> None:
    harness, gate = gated
    held, free = fill_memory(harness)
    assert harness.engine.is_idle
    assert harness.open == {*held, free}
    harness.apply(protocol.Ping(1))
    assert not harness.engine.is_idle
    gate.is_open.set()
    harness.run()
    assert harness.outcomes[free].finished.reason == "stop"


def test_step_that_gets_no_memory_is_not_counted(
    gated: tuple[ConstraintHarness, GatedSandbox],
) -> None:
    harness, _ = gated
    fill_memory(harness)
    before = harness.engine.status().num_steps
    harness.apply(protocol.Ping(1))
    assert harness.step()
    assert harness.engine.status().num_steps == before


def test_fork_does_not_wait_for_a_blocked_parent(
    gated: tuple[ConstraintHarness, GatedSandbox],
) -> None:
    harness, _ = gated
    parent = harness.start(list(b"0123456"), YES_NO)
    child = parent + 1
    harness.outcomes[child] = harness.outcomes.pop(parent).__class__()
    harness.outcomes[parent] = harness.outcomes[child].__class__()
    harness.open.add(child)
    harness._num = child
    harness.apply(
        protocol.GenerateCommand(child, protocol.SamplingParams(9), parent=parent, parent_len=7)
    )
    harness.run(until=lambda: child not in harness.open)
    assert harness.outcomes[child].finished.text == default_text(list(b"0123456"))[:9]


@pytest.mark.parametrize("command", [protocol.Free, protocol.Abort])
def test_call_can_be_discarded_during_compilation(
    gated: tuple[ConstraintHarness, GatedSandbox], command: Callable[[int], protocol.Command]
) -> None:
    harness, gate = gated
    held, other = harness.start(list(b"first"), YES_NO), harness.start(list(b"other"), YES_NO)
    harness.step()
    harness.open.discard(held)
    harness.apply(command(held))
    gate.is_open.set()
    harness.run()
    filled, *later = harness.outcomes[held].reports
    assert isinstance(filled, protocol.Filled)
    assert later == ([protocol.Aborted(held)] if command is protocol.Abort else [])
    assert harness.outcomes[other].finished.constraint == "met"
    harness.free(other)
    assert harness.engine.status().num_held == 0


def test_invalid_grammar_fails_only_its_calls(harness_of: MakeHarness) -> None:
    harness = harness_of()
    bad = lark("start: (")
    calls = [harness.start(list(b"some"), each) for each in (bad, bad, None, YES_NO)]
    harness.run()
    ends = [harness.outcomes[call].end for call in calls]
    assert [isinstance(end, protocol.Failed) for end in ends] == [True, True, False, False]
    failed = harness.outcomes[calls[0]].failed
    assert failed.code == "constraint.invalid"
    assert "Expected token" in failed.message
    # The error is cached: the next call fails at once.
    assert harness.call(bad).failed == protocol.Failed(harness._num, failed.code, failed.message)
    for call in calls:
        harness.free(call)


def test_constraint_is_validated_with_and_without_text(harness_of: MakeHarness) -> None:
    harness = harness_of()
    unique = schema({"type": "array", "uniqueItems": True})
    commands = [
        protocol.ValidateConstraint(1, YES_NO),
        protocol.ValidateConstraint(2, YES_NO, "yes"),
        protocol.ValidateConstraint(3, YES_NO, "maybe"),
        protocol.ValidateConstraint(4, lark("start: [")),
        protocol.ValidateConstraint(5, unique, "[1,1]"),
        protocol.ValidateConstraint(6, unique, "[1,2]"),
    ]
    for command in commands:
        harness.apply(command)
    harness.run(until=lambda: len(harness.checked) == len(commands))
    found = harness.checked
    assert [found[n].matches for n in range(1, 7)] == [None, True, False, None, False, True]
    assert [found[n].is_relaxed for n in (2, 5, 6)] == [False, True, True]
    assert [found[n].code for n in (1, 4)] == ["", "constraint.invalid"]


# Relaxed constraints.


def test_relaxed_constraint_validates_the_finished_text(harness_of: MakeHarness) -> None:
    unique = schema(
        {"type": "array", "items": {"type": "integer", "maximum": 9}, "uniqueItems": True}
    )
    end = harness_of("[1,2]").call(unique).finished
    assert (end.text, end.constraint) == ("[1,2]", "relaxed")
    end = harness_of("[1,1]").call(unique).finished
    assert (end.text, end.constraint) == ("[1,1]", "broken")
    end = harness_of("[1,1]").call(unique, max_tokens=3).finished
    assert (end.text, end.constraint) == ("[1,", "cut")


def test_failed_validation_fails_the_output(
    gated: tuple[ConstraintHarness, GatedSandbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(request: SandboxRequest) -> SandboxReply:
        raise protocol.EngineError("constraint.unavailable", "no sandbox")

    harness, gate = gated
    unique = schema({"type": "array", "items": {"type": "integer"}, "uniqueItems": True})
    gate.is_open.set()
    harness.call(unique)
    monkeypatch.setattr(gate, "validate", fail)
    assert harness.call(unique).failed.code == "constraint.unavailable"


def test_call_freed_during_validation_reports_nothing(
    gated: tuple[ConstraintHarness, GatedSandbox],
) -> None:
    harness, gate = gated
    unique = schema({"type": "array", "items": {"type": "integer"}, "uniqueItems": True})
    gate.is_open.set()
    harness.call(unique)
    gate.is_open.clear()
    context = harness.start(list(b"x"), unique)
    while harness.step():
        pass
    assert harness.outcomes[context].text
    assert context in harness.open
    harness.free(context)
    gate.is_open.set()
    assert harness.call(unique).finished.constraint == "relaxed"
    assert not any(isinstance(r, protocol.Finished) for r in harness.outcomes[context].reports)


# Slow grammars.


class LetterRunner(FakeRunner):
    """Samples a or b depending on the seed, and records the rows of each step."""

    def __init__(self) -> None:
        super().__init__(limits=protocol.EngineLimits(2048, 16, 512, 256, 16))
        self.num_rows: list[int] = []

    def start(self, rows: Sequence[ScheduledSequence], copies: Sequence[tuple[int, int]]) -> Handle:
        super().start(rows, copies)
        self.num_rows.append(len(rows))
        return CompletedStep(
            [
                random.Random(1000 * row.sampling.seed + len(row.ids)).choice(b"ab")
                for row in rows
                if row.sampling is not None
            ]
        )


def test_slow_grammar_runs_in_a_thread_and_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(constraint_file, "SLOW_S", 0.002)
    monkeypatch.setattr(constraint_file, "BUDGET_S", 0.2)
    runner = LetterRunner()
    harness = ConstraintHarness(runner)
    slow = harness.start(list(b"slow"), AMBIGUOUS, max_tokens=1000)
    harness.run(until=lambda: bool(runner.num_rows))
    fast = harness.start(list(b"fast"), None, max_tokens=1000, ignore_eos=True)
    harness.run()
    assert harness.outcomes[slow].failed.code == "constraint.too_complex"
    assert len(harness.outcomes[fast].finished.text) == 1000
    # The slow context was not in steps that ran the fast one.
    assert runner.num_rows.count(1) > 500
    harness.close()


def test_slow_grammar_gives_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for slow_s in (10.0, -1.0):
        monkeypatch.setattr(constraint_file, "SLOW_S", slow_s)
        monkeypatch.setattr(constraint_file, "BUDGET_S", 100.0)
        harness = ConstraintHarness(fake('{"name":"Jo","age":42}'))
        ends = [harness.call(schema(OBJECT), max_tokens=most).finished for most in (100, 22, 12)]
        texts.append([(e.text, e.reason, e.constraint, e.num_forced) for e in ends])
        harness.close()
    assert texts[0] == texts[1]


@pytest.mark.parametrize("slow_s", [10.0, -1.0])
@pytest.mark.parametrize(
    ("sampling", "reason"), [({"max_tokens": 3}, "length"), ({"stop": ("b",)}, "stop")]
)
def test_error_after_the_last_token_fails_no_output(
    monkeypatch: pytest.MonkeyPatch, slow_s: float, sampling: dict[str, Any], reason: str
) -> None:
    """The budget is used up by the token that ends the output."""
    advance = constraint_file.ConstraintState.advance

    def advance_and_fail(constraint: constraint_file.ConstraintState, token_id: int) -> None:
        advance(constraint, token_id)
        if constraint.num_tokens == 3:
            constraint.error = protocol.EngineError("constraint.too_complex", "used up")

    monkeypatch.setattr(constraint_file, "SLOW_S", slow_s)
    monkeypatch.setattr(constraint_file, "BUDGET_S", 100.0)
    monkeypatch.setattr(constraint_file.ConstraintState, "advance", advance_and_fail)
    harness = ConstraintHarness(fake("aab"))
    end = harness.call(lark("start: /[ab]+/"), **sampling).finished
    assert end.reason == reason
    assert harness.call(lark("start: /[ab]+/")).failed.code == "constraint.too_complex"
    harness.close()


@pytest.mark.parametrize("slow_s", [10.0, -1.0])
def test_exhausted_lexer_is_recompiled_for_all_outputs(
    monkeypatch: pytest.MonkeyPatch, slow_s: float
) -> None:
    threads: list[int] = []

    def compile_and_count(tokenizer: LLTokenizer, source: str) -> grammar.CompiledGrammar:
        threads.append(threading.get_ident())
        return compile_grammar(tokenizer, source)

    monkeypatch.setattr(constraint_file, "SLOW_S", slow_s)
    monkeypatch.setattr(grammar, "MAX_STATES", 1000)
    monkeypatch.setattr(grammar, "compile_grammar", compile_and_count)
    harness = ConstraintHarness(LetterRunner())
    states = lark("start: /(a|b)*a(a|b){60}/")
    for seed in range(20):
        end = harness.call(states, max_tokens=100, seed=seed).finished
        assert (len(end.text), end.constraint == "met") == (100, end.text[-61] == "a")
    # The lexer has room for several outputs.
    assert 1 < len(threads) < 10
    assert threading.get_ident() not in threads
    harness.close()


# Comparison with separate calls.


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
@settings(max_examples=60)
def test_concurrent_calls_match_separate_calls(
    shared: ConstraintCompiler,
    answer: str,
    calls: list[tuple[Any, int, bytes, int]],
    num_blocks: int,
) -> None:
    alone = []
    wide = ConstraintHarness(fake(answer), shared)
    for constraint, most, prompt, _ in calls:
        end = wide.call(constraint, prompt, max_tokens=most).finished
        alone.append((end.text, end.reason, end.constraint, end.num_kept))
        if constraint is not None and end.constraint == "met":
            assert CONSTRAINTS[constraint](end.text)
    narrow = ConstraintHarness(
        fake(answer, protocol.EngineLimits(256, 4, num_blocks, 24, 4)), shared
    )
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
        [filled] = [r for r in outcome.reports if isinstance(r, protocol.Filled)]
        assert outcome.reports.index(filled) < len(outcome.reports) - 1
        narrow.free(context)
    assert narrow.engine.status().num_held == 0
