"""The constraint compiler: caching, bounds and waking of the step loop."""

from __future__ import annotations

import select
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from conure.engine import protocol
from conure.engine.constraints import compiler, grammar
from conure.engine.constraints.compiler import ConstraintCompiler
from conure.engine.constraints.sandbox import SandboxedGrammarCheck, SandboxReply, SandboxRequest
from conure.engine.constraints.state import ConstraintState
from conure.engine.text import byte_tokenizer

from ..constraint_harness import lark, schema


class CountingSandbox(SandboxedGrammarCheck):
    def __init__(self) -> None:
        super().__init__(["<|im_end|>"])
        self.requests: list[SandboxRequest] = []
        self.threads: set[int] = set()
        self.is_open = threading.Event()
        self.is_open.set()

    def validate(self, request: SandboxRequest) -> SandboxReply:
        assert self.is_open.wait(60)
        self.requests.append(request)
        self.threads.add(threading.get_ident())
        return super().validate(request)


@pytest.fixture
def sandbox() -> CountingSandbox:
    return CountingSandbox()


MakeCompiler = Callable[..., ConstraintCompiler]


@pytest.fixture
def text_sandbox() -> CountingSandbox:
    return CountingSandbox()


@pytest.fixture
def make(sandbox: CountingSandbox, text_sandbox: CountingSandbox) -> Iterator[MakeCompiler]:
    """Compilers over the byte tokenizer, closed at the end of the test."""
    with ExitStack() as stack:

        def make(**options: Any) -> ConstraintCompiler:
            constraints = ConstraintCompiler(
                byte_tokenizer.tokenizer_json(),
                byte_tokenizer.EOS_IDS,
                sandbox=sandbox,
                text_sandbox=text_sandbox,
                **options,
            )
            stack.callback(constraints.close)
            return constraints

        yield make


@pytest.fixture
def constraints(make: MakeCompiler) -> ConstraintCompiler:
    return make()


def wait(constraints: ConstraintCompiler, count: int) -> list[ConstraintState | protocol.Checked]:
    """Collect `count` items, sleeping until they are ready."""
    ready: list[ConstraintState | protocol.Checked] = []
    while len(ready) < count:
        readable, _, _ = select.select([constraints.fileno()], [], [], 20)
        assert readable
        ready += constraints.collect()
    return ready


def test_grammar_is_compiled_once_for_all_outputs(
    constraints: ConstraintCompiler, sandbox: CountingSandbox
) -> None:
    sources = [lark('start: "a" | "b"'), lark("start: /[0-9]+/")]
    new = [constraints.create(sources[i % 2], 10) for i in range(10)]
    assert all(each.is_busy for each in new)
    ready = wait(constraints, 10)
    assert {id(each) for each in ready} == {id(each) for each in new}
    assert not any(each.is_busy for each in new)
    again = constraints.create(sources[0], 10)
    assert not again.is_busy
    assert not constraints.is_pending
    assert [q.constraint for q in sandbox.requests] == sources
    assert threading.get_ident() not in sandbox.threads


def test_outputs_of_one_grammar_are_independent(constraints: ConstraintCompiler) -> None:
    first = constraints.create(lark("start: /[ab]c/"), 10)
    wait(constraints, 1)
    second = constraints.create(lark("start: /[ab]c/"), 10)
    constraints.advance(first, ord("a"))
    assert (first.forced, first.is_complete, first.is_satisfied) == ([ord("c")], True, True)
    assert (second.forced, second.is_complete) == ([], False)


def test_compile_error_is_cached(constraints: ConstraintCompiler, sandbox: CountingSandbox) -> None:
    bad = lark("start: [")
    state = constraints.create(bad, 10)
    assert wait(constraints, 1) == [state]
    assert state.error is not None
    with pytest.raises(protocol.EngineError) as caught:
        constraints.create(bad, 10)
    assert caught.value.code == state.error.code == "constraint.invalid"
    constraints.submit_check(protocol.ValidateConstraint(3, bad))
    assert wait(constraints, 1) == [protocol.Checked(3, state.error.code, state.error.message)]
    assert len(sandbox.requests) == 1


def test_cached_error_keeps_no_caller(constraints: ConstraintCompiler) -> None:
    bad = lark("start: [")
    constraints.create(bad, 10)
    wait(constraints, 1)
    callers: list[weakref.ref[set[int]]] = []

    def call() -> None:
        local = {1}
        callers.append(weakref.ref(local))
        with suppress(protocol.EngineError):
            constraints.create(bad, 10)

    call()
    assert callers[0]() is None


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (protocol.EngineError("constraint.unavailable", "no sandbox"), "constraint.unavailable"),
        (OSError("no process is available"), "constraint.failed"),
    ],
)
def test_failure_that_no_constraint_causes_is_not_cached(
    constraints: ConstraintCompiler,
    sandbox: CountingSandbox,
    text_sandbox: CountingSandbox,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    code: str,
) -> None:
    def fail(request: SandboxRequest) -> SandboxReply:
        raise error

    source = lark('start: "a"')
    with monkeypatch.context() as broken:
        broken.setattr(sandbox, "validate", fail)
        state = constraints.create(source, 10)
        assert wait(constraints, 1) == [state]
        assert state.error is not None
        assert state.error.code == code
    constraints.submit_check(protocol.ValidateConstraint(1, source))
    assert wait(constraints, 1) == [protocol.Checked(1)]
    with monkeypatch.context() as broken:
        broken.setattr(text_sandbox, "validate", fail)
        constraints.submit_check(protocol.ValidateConstraint(2, source, "a"))
        [checked] = wait(constraints, 1)
        assert isinstance(checked, protocol.Checked)
        assert checked.code == code
    constraints.submit_check(protocol.ValidateConstraint(3, source, "a"))
    assert wait(constraints, 1) == [protocol.Checked(3, matches=True)]


def test_failure_that_takes_long_is_kept_for_a_time(
    constraints: ConstraintCompiler, sandbox: CountingSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0

    def fail(request: SandboxRequest) -> SandboxReply:
        nonlocal now_s
        now_s += 8
        raise protocol.EngineError("constraint.unavailable", "no answer")

    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    check = protocol.ValidateConstraint(1, lark('start: "a"'))
    with monkeypatch.context() as broken:
        broken.setattr(sandbox, "validate", fail)
        for _ in range(2):
            constraints.submit_check(check)
            assert wait(constraints, 1) == [
                protocol.Checked(1, code="constraint.unavailable", message="no answer")
            ]
    assert now_s == 108
    with pytest.raises(protocol.EngineError, match="no answer"):
        constraints.create(check.constraint, 10)
    now_s += compiler.RETRY_S
    state = constraints.create(check.constraint, 10)
    assert wait(constraints, 1) == [state]
    assert state.error is None


def test_compilation_does_not_wait_for_texts(
    constraints: ConstraintCompiler, text_sandbox: CountingSandbox
) -> None:
    source = lark('start: "a"')
    constraints.submit_check(protocol.ValidateConstraint(1, source))
    wait(constraints, 1)
    text_sandbox.is_open.clear()
    constraints.submit_check(protocol.ValidateConstraint(2, source, "a"))
    state = constraints.create(lark('start: "b"'), 10)
    assert wait(constraints, 1) == [state]
    text_sandbox.is_open.set()
    assert wait(constraints, 1) == [protocol.Checked(2, matches=True)]


def test_text_of_an_ended_output_is_not_validated(
    constraints: ConstraintCompiler, text_sandbox: CountingSandbox
) -> None:
    states = [constraints.create(lark('start: "a"'), 10) for _ in range(2)]
    wait(constraints, 2)
    text_sandbox.is_open.clear()
    for state in states:
        constraints.validate_text(state, "a")
    constraints.release(states[1])
    text_sandbox.is_open.set()
    wait(constraints, 2)
    assert len(text_sandbox.requests) == 1


def test_schema_under_which_a_text_takes_too_long_is_remembered(
    constraints: ConstraintCompiler,
    text_sandbox: CountingSandbox,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_tried, now_s = 0, 100.0

    def fail(request: SandboxRequest) -> SandboxReply:
        nonlocal num_tried
        num_tried += 1
        raise protocol.EngineError("constraint.too_complex", "too slow")

    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(text_sandbox, "validate", fail)
    for _ in range(2):
        constraints.submit_check(protocol.ValidateConstraint(1, lark('start: "a"'), "a"))
        [checked] = wait(constraints, 1)
        assert isinstance(checked, protocol.Checked)
        assert checked.code == "constraint.too_complex"
    assert num_tried == 1
    now_s += compiler.RETRY_S
    constraints.submit_check(protocol.ValidateConstraint(1, lark('start: "a"'), "a"))
    wait(constraints, 1)
    assert num_tried == 2


def test_thread_survives_a_job_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    worker, done = compiler._WorkerThread("test"), threading.Event()
    worker.submit(lambda: time.sleep(-1))
    worker.submit(done.set)
    assert done.wait(20)
    worker.stop()
    assert "a job of the thread to test failed" in caplog.text


def test_outputs_are_compiled_before_checks(
    constraints: ConstraintCompiler, sandbox: CountingSandbox
) -> None:
    first, checked, last = (lark(f'start: "{number}"') for number in range(3))
    sandbox.is_open.clear()
    constraints.create(first, 10)
    constraints.submit_check(protocol.ValidateConstraint(1, checked))
    constraints.create(last, 10)
    sandbox.is_open.set()
    wait(constraints, 3)
    assert [q.constraint for q in sandbox.requests] == [first, last, checked]


def test_grammar_without_outputs_is_not_compiled(
    constraints: ConstraintCompiler, sandbox: CountingSandbox
) -> None:
    first, aborted, last = (lark(f'start: "{number}"') for number in range(3))
    sandbox.is_open.clear()
    constraints.create(first, 10)
    constraints.release(constraints.create(aborted, 10))
    constraints.create(last, 10)
    sandbox.is_open.set()
    wait(constraints, 2)
    assert not constraints.is_pending
    assert [q.constraint for q in sandbox.requests] == [first, last]


def test_check_that_waited_too_long_is_not_made(
    constraints: ConstraintCompiler, sandbox: CountingSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    sandbox.is_open.clear()
    constraints.create(lark('start: "a"'), 10)
    constraints.submit_check(protocol.ValidateConstraint(1, lark('start: "b"')))
    now_s += compiler.CHECK_S + 1
    sandbox.is_open.set()
    [checked] = [each for each in wait(constraints, 2) if isinstance(each, protocol.Checked)]
    assert checked.code == "constraint.unavailable"
    assert len(sandbox.requests) == 1


def test_checked_constraint_is_cached(
    constraints: ConstraintCompiler, sandbox: CountingSandbox
) -> None:
    constraints.submit_check(protocol.ValidateConstraint(1, lark('start: "a"')))
    assert wait(constraints, 1) == [protocol.Checked(1)]
    assert not constraints.create(lark('start: "a"'), 10).is_busy


def test_cache_is_bounded_and_retains_used_grammars(
    make: MakeCompiler, sandbox: CountingSandbox
) -> None:
    constraints = make(max_cached_bytes=10 * compiler._ENTRY_BYTES)
    used = lark('start: "used"')
    for number in range(30):
        for source in (used, lark(f'start: "{number}"')):
            if constraints.create(source, 10).is_busy:
                wait(constraints, 1)
    cached = constraints._grammars
    assert len(cached) < 10
    assert sum(entry.num_bytes for entry in cached.values()) == cached.currsize <= cached.maxsize
    assert [q.constraint for q in sandbox.requests].count(used) == 1
    assert constraints.create(lark('start: "0"'), 10).is_busy
    wait(constraints, 1)


def test_long_texts_increase_cached_size(make: MakeCompiler) -> None:
    source = lark("start: /[a-z]*/")
    num_bytes = compiler._ENTRY_BYTES + compiler._BYTES_PER_CHARACTER * len(source)
    growth = 50 * compiler._BYTES_PER_TOKEN
    constraints = make(max_cached_bytes=num_bytes + growth)
    first = constraints.create(source, 100_000)
    wait(constraints, 1)
    assert constraints._grammars.currsize == num_bytes
    for _ in range(50):
        constraints.advance(first, ord("x"))
    constraints.release(first)
    assert constraints._grammars.currsize == num_bytes + growth
    constraints.create(lark("start: /[b-z]*/"), 10)
    wait(constraints, 1)
    assert constraints.create(source, 10).is_busy
    wait(constraints, 1)


def test_mask_allows_exactly_the_language(constraints: ConstraintCompiler) -> None:
    state = constraints.create(lark('start: "a" ("b" | "c")?'), 10)
    wait(constraints, 1)
    assert (state.forced, state.is_satisfied, state.is_complete) == ([ord("a")], True, False)
    allowed = {i for i in range(len(state.mask) * 8) if state.mask[i >> 3] >> (i & 7) & 1}
    assert allowed == {ord("b"), ord("c"), *byte_tokenizer.EOS_IDS}
    assert state.outcome == "met"
    without = state.mask_without(byte_tokenizer.EOS_IDS)
    assert {i for i in range(len(without) * 8) if without[i >> 3] >> (i & 7) & 1} == {98, 99}
    assert state.mask_without([*allowed, 10_000]) == state.mask


def test_dead_end_of_a_grammar_is_an_error() -> None:
    class DeadEndMatcher:
        def get_error(self) -> str:
            return ""

        def is_error(self) -> bool:
            return False

        is_accepting = is_stopped = is_error

        def rollback(self, num_tokens: int, /) -> bool:
            return True

        def compute_ff_tokens(self) -> list[int]:
            return []

        def compute_bitmask(self) -> bytes:
            return bytes(8)

        def consume_tokens(self, sampled_tokens: list[int], /) -> bool:
            return True

    state = ConstraintState("", b"", (1,), 5)
    state.start(DeadEndMatcher())
    assert state.error is not None
    assert state.error.code == "constraint.invalid"


class GatedLexer:
    """The lexer of a fake grammar. Masks wait for `is_open`; only one thread may use it at once."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_open = threading.Event()
        self.is_open.set()
        self.is_used = threading.Event()


class FakeMatcher:
    """A matcher of any text. Its copies share its lexer."""

    def __init__(self, lexer: GatedLexer) -> None:
        self._lexer = lexer

    def deep_copy(self) -> FakeMatcher:
        return FakeMatcher(self._lexer)

    def compute_bitmask(self) -> bytes:
        lexer = self._lexer
        assert lexer.lock.acquire(blocking=False), "two threads use the lexer"
        lexer.is_used.set()
        is_open = lexer.is_open.wait(20)
        lexer.lock.release()
        assert is_open
        return b"\xff"

    def consume_tokens(self, sampled_tokens: list[int], /) -> bool:
        assert not self._lexer.lock.locked(), "two threads use the lexer"
        return True

    def rollback(self, num_tokens: int, /) -> bool:
        return True

    def compute_ff_tokens(self) -> list[int]:
        return []

    def is_error(self) -> bool:
        return False

    is_accepting = is_stopped = is_error

    def get_error(self) -> str:
        return ""


@pytest.fixture
def lexer(monkeypatch: pytest.MonkeyPatch) -> Iterator[GatedLexer]:
    """The lexer of every grammar."""
    lexer = GatedLexer()
    fake: Any = FakeMatcher(lexer)
    monkeypatch.setattr(
        grammar, "compile_grammar", lambda _, source: grammar.CompiledGrammar(fake, source)
    )
    yield lexer
    lexer.is_open.set()


def test_no_output_waits_for_the_lexer_in_the_step_loop(
    constraints: ConstraintCompiler, lexer: GatedLexer
) -> None:
    source = lark('start: "a"')
    slow, other = (constraints.create(source, 10) for _ in range(2))
    wait(constraints, 2)
    slow.is_slow = True
    lexer.is_open.clear()
    lexer.is_used.clear()
    constraints.advance(slow, 1)
    assert lexer.is_used.wait(20)
    constraints.advance(other, 1)
    new = constraints.create(source, 10)
    assert slow.is_busy
    assert other.is_busy
    assert new.is_busy
    lexer.is_open.set()
    wait(constraints, 3)
    assert [each.error for each in (slow, other, new)] == [None] * 3
    assert not other.is_slow
    # The lexer is free again.
    constraints.advance(other, 1)
    assert not other.is_busy
    assert not constraints.create(source, 10).is_busy


def test_step_loop_leaves_the_lexer_to_outputs_that_start(
    constraints: ConstraintCompiler, lexer: GatedLexer, sandbox: CountingSandbox
) -> None:
    source = lark('start: "a"')
    sandbox.is_open.clear()
    waiting = [constraints.create(source, 10) for _ in range(2)]
    lexer.is_open.clear()
    sandbox.is_open.set()
    assert lexer.is_used.wait(20)
    waiting.append(constraints.create(source, 10))
    assert waiting[-1].is_busy
    lexer.is_open.set()
    wait(constraints, 3)
    assert [each.error for each in waiting] == [None] * 3


def test_lexer_is_free_after_an_output_that_ended_early(
    constraints: ConstraintCompiler, lexer: GatedLexer
) -> None:
    source = lark('start: "a"')
    slow = constraints.create(source, 10)
    wait(constraints, 1)
    slow.is_slow = True
    lexer.is_open.clear()
    constraints.advance(slow, 1)
    ended = constraints.create(source, 10)
    assert ended.is_busy
    constraints.release(ended)
    lexer.is_open.set()
    wait(constraints, 2)
    assert not constraints.create(source, 10).is_busy


@pytest.mark.parametrize(
    ("slow_s", "num_slow", "fails"),
    [(0.011, 1, False), (0.011, 190, True), (1.5, 1, False), (1.5, 2, True), (3.0, 1, True)],
)
def test_budget_is_for_slow_advances(
    monkeypatch: pytest.MonkeyPatch, slow_s: float, num_slow: int, fails: bool
) -> None:
    num_reads, now_s = 0, 0.0
    durations_s = [slow_s] * num_slow + [0.0001] * 30_000

    def clock() -> float:
        # Read once before and once after each advance.
        nonlocal num_reads, now_s
        if num_reads % 2:
            now_s += durations_s[num_reads // 2]
        num_reads += 1
        return now_s

    monkeypatch.setattr(time, "thread_time", clock)
    state = ConstraintState("", b"", (1,), 40_000)
    state.start(FakeMatcher(GatedLexer()))
    for _ in range(len(durations_s) - 1):
        state.advance(2)
    assert state.is_slow
    assert (state.error is not None) == fails


def test_advancing_takes_microseconds(constraints: ConstraintCompiler) -> None:
    person = schema({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]})
    state = constraints.create(person, 5000)
    wait(constraints, 1)
    begin = time.thread_time()
    for _ in range(2000):
        constraints.advance(state, ord("x"))
    # 15 us on an idle machine; the bound allows for a loaded one.
    assert time.thread_time() - begin < 2000 * 500e-6


def test_tokenizer_without_end_token_is_rejected() -> None:
    with pytest.raises(ValueError, match="end token"):
        ConstraintCompiler(byte_tokenizer.tokenizer_json(), ())
    with pytest.raises(ValueError, match="tokenizer"):
        ConstraintCompiler("{}", (1,))


def test_collected_work_does_not_wake_the_loop(constraints: ConstraintCompiler) -> None:
    for number in range(200):
        constraints.create(lark(f'start: "{number}"'), 10)
        constraints.create(lark('start: "same"'), 10)
        while constraints.is_pending:
            constraints.collect()
        readable, _, _ = select.select([constraints.fileno()], [], [], 0)
        assert not readable
