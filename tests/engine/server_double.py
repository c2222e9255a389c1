"""A test double of the server with the expected answer of every call.

It keeps a plain model of all contexts (ids in a dictionary, no blocks). It checks every report
against the model, and the engine's invariants after every command and step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from conure.engine import protocol
from conure.engine.core.engine import EngineCore
from conure.engine.runner.base import Handle, ScheduledSequence
from conure.engine.testing.scripted_runner import FakeRunner, default_text

LIMITS = protocol.EngineLimits(
    context_len=256, block_size=4, num_blocks=128, step_tokens=64, max_sequences=16
)


class LateStep:
    """A step whose ids are not ready until the engine reads them."""

    is_ready = False

    def __init__(self, spy: RecordingRunner, done: Handle, *, fails: bool) -> None:
        self._spy = spy
        self._done = done
        self._fails = fails

    def sample(self) -> None:
        assert self._spy.flying == [self], "the previous step is read before a step is sampled"
        self._done.sample()

    def read(self) -> list[int]:
        assert self._spy.flying.pop(0) is self, "steps are read in the order of their start"
        if self._fails:
            # Steps that were started after a failed one are not read.
            self._spy.flying.clear()
            raise RuntimeError("late test failure")
        return self._done.read()


class RecordingRunner(FakeRunner):
    """A fake runner that records its steps and fails on demand.

    With `late` it acts like an asynchronous device: it reads rows when a step is started, and
    returns the sampled ids only when the engine reads the step.
    """

    def __init__(
        self,
        limits: protocol.EngineLimits,
        *,
        late: bool = False,
        **options: Callable[[str], str | None],
    ) -> None:
        super().__init__(limits=limits, **options)  # type: ignore[arg-type]  # answer alone
        self.fails = False
        self.fails_late = False
        self.late = late
        self.flying: list[LateStep] = []
        self.num_ahead = 0
        """Steps that were started before the one before them was read."""
        self.num_deferred = 0
        """Steps that were sampled after the one before them was read."""
        self.steps: list[list[tuple[int, int, int]]] = []
        """(context, start, num_new) of every row."""
        self.copies: list[tuple[int, int]] = []

    def start(self, rows: Sequence[ScheduledSequence], copies: Sequence[tuple[int, int]]) -> Handle:
        assert len(rows) <= self.limits.max_sequences
        assert sum(row.num_new for row in rows) <= self.limits.step_tokens
        self.steps.append([(row.context, row.start, row.num_new) for row in rows])
        self.copies.extend(copies)
        if self.fails:
            raise RuntimeError("test failure")
        follows = [row.previous_id_index is not None for row in rows]
        assert self.flying or not any(follows)
        assert len(self.flying) <= 1
        self.num_deferred += any(row.is_deferred for row in rows)
        self.num_ahead += len(self.flying)
        done = super().start(rows, copies)
        if not self.late:
            return done
        handle = LateStep(self, done, fails=self.fails_late)
        self.flying.append(handle)
        return handle


def expected_output(
    prompt: Sequence[int], sampling: protocol.SamplingParams, context_len: int
) -> tuple[str, str]:
    """Return text and finish reason of a Generate, computed character by character."""
    text = default_text(prompt)
    script = text + " "
    output = ""
    for index in range(min(sampling.max_tokens, context_len - len(prompt))):
        wants_eos = index >= len(text) and not sampling.ignore_eos
        if wants_eos and index >= sampling.min_tokens:
            return output, "stop"
        output += script[index % len(script)]
        first = max(sampling.min_tokens - 1, 0)
        found = [at for stop in sampling.stop if (at := output.find(stop, first)) >= 0]
        if found:
            return output[: min(found)], "stop"
    return output, "length"


@dataclass
class ExpectedContext:
    """The expected state of a context."""

    ids: list[int]
    salt: str = ""
    num_fills: int = 0
    """Fills not answered yet."""
    num_owed: int = 0
    """Prompt tokens that Filled reports still have to account for."""
    num_seen: int = 0
    prompt: list[int] | None = None
    """Set while it generates."""
    sampling: protocol.SamplingParams | None = None
    text: str = ""
    generated: list[int] = field(default_factory=list)
    num_recomputed: int = 0
    filled: list[protocol.Filled] = field(default_factory=list)
    finished: list[protocol.Finished] = field(default_factory=list)


class ServerDouble:
    """One engine over a recording fake runner, and the model of its contexts."""

    def __init__(
        self,
        limits: protocol.EngineLimits = LIMITS,
        *,
        late: bool = False,
        **options: Callable[[str], str | None],
    ) -> None:
        self.limits = limits
        self.runner = RecordingRunner(limits, late=late, **options)
        self.engine = EngineCore(self.runner, epoch=1)
        self.known: dict[int, ExpectedContext] = {}
        self.failed: list[protocol.Failed] = []
        self.checks_text = not options
        self._num = 0

    def new_id(self) -> int:
        self._num += 1
        return self._num

    def apply(self, command: protocol.Command) -> None:
        self.engine.apply(command)
        self.engine.check()

    def fill(
        self,
        tokens: Sequence[int],
        parent: int | None = None,
        parent_len: int = 0,
        *,
        rank: float = 0.0,
        salt: str = "",
    ) -> int:
        """Create and fill a context."""
        context = self.new_id()
        ids = self._prefix(parent, parent_len) + list(tokens)
        self.known[context] = ExpectedContext(ids, salt, num_fills=1, num_owed=len(ids))
        self.apply(protocol.Fill(context, list(tokens), parent, parent_len, salt, rank))
        return context

    def extend(self, context: int, tokens: Sequence[int], *, rank: float = 0.0) -> None:
        known = self.known[context]
        known.ids = known.ids + list(tokens)
        known.num_fills += 1
        known.num_owed += len(tokens)
        self.apply(protocol.Fill(context, list(tokens), rank=rank))

    def generate(self, context: int, *, rank: float = 0.0, **sampling: Any) -> None:
        self._begin(context, sampling)
        chosen = self.known[context].sampling
        assert chosen is not None
        self.apply(protocol.GenerateCommand(context, chosen, rank=rank))

    def fork_generate(
        self, parent: int, parent_len: int, *, rank: float = 0.0, **sampling: Any
    ) -> int:
        context = self.new_id()
        ids = self._prefix(parent, parent_len)
        self.known[context] = ExpectedContext(ids, self.known[parent].salt, num_owed=len(ids))
        self._begin(context, sampling)
        chosen = self.known[context].sampling
        assert chosen is not None
        self.apply(
            protocol.GenerateCommand(
                context, chosen, parent, parent_len, self.known[parent].salt, rank
            )
        )
        return context

    def free(self, context: int, keep: int = 0, expected: int = 0) -> None:
        del self.known[context]
        self.apply(protocol.Free(context, keep, expected))

    def abort(self, context: int) -> None:
        del self.known[context]
        self.apply(protocol.Abort(context))

    def step(self) -> protocol.StepReport | None:
        step = self.engine.step()
        self.engine.check()
        if step is not None:
            for report in step.reports:
                self._take(report)
        return step

    def run(self, most: int = 5000) -> None:
        """Step until the engine is idle, and check that every command was answered."""
        for _ in range(most):
            if self.step() is None:
                break
        else:
            raise AssertionError(f"the engine is not idle after {most} steps")
        assert self.engine.is_idle
        for known in self.known.values():
            assert known.num_fills == 0
            assert known.prompt is None

    def generate_text(self, tokens: Sequence[int], **sampling: Any) -> str:
        """Run one call to its end. Return its text."""
        context = self.fill(tokens)
        self.generate(context, **sampling)
        self.run()
        text = self.known[context].finished[-1].text
        self.free(context)
        return text

    def _prefix(self, parent: int | None, parent_len: int) -> list[int]:
        return [] if parent is None else self.known[parent].ids[:parent_len]

    def _begin(self, context: int, sampling: dict[str, Any]) -> None:
        known = self.known[context]
        known.prompt = list(known.ids)
        known.sampling = protocol.SamplingParams(**{"max_tokens": 100, **sampling})
        known.text = ""
        known.generated = []

    def _take(self, report: protocol.Report) -> None:
        if not isinstance(report, protocol.ContextReport):
            return
        if isinstance(report, protocol.Aborted):
            assert report.context not in self.known
            return
        known = self.known.get(report.context)
        assert known is not None, f"report on a freed context: {report}"
        match report:
            case protocol.Filled():
                known.filled.append(report)
                known.num_fills -= 1
                known.num_seen += report.computed + report.shared + report.cached
                known.num_recomputed += report.recomputed
                if known.num_fills == 0:
                    assert known.num_seen == known.num_owed
                    known.num_seen = known.num_owed = 0
            case protocol.Tokens():
                known.text += report.text
                known.generated += report.ids
                known.ids = known.ids + report.ids
            case protocol.Finished():
                self._finish(known, report)
            case protocol.Failed():
                self.failed.append(report)
                del self.known[report.context]

    def _finish(self, known: ExpectedContext, report: protocol.Finished) -> None:
        assert known.prompt is not None
        assert known.sampling is not None
        assert known.text == report.text, "streamed and final text differ"
        if self.checks_text:
            expected = expected_output(known.prompt, known.sampling, self.limits.context_len)
            assert (report.text, report.reason) == expected
            assert (report.num_kept, report.leftover) == (len(report.text), "")
        known.finished.append(report)
        known.ids = known.prompt + known.generated[: report.num_kept]
        known.prompt = None
