"""A server in miniature: speaks to an engine, and knows what every answer must be.

Holds a plain model of all contexts (ids in a dictionary, no blocks) and checks every report
against it, and every invariant of the engine after every command and step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from conure.engine import api
from conure.engine.engine import Engine
from conure.engine.fake import FakeRunner, default_text
from conure.engine.runner import Handle, Row

LIMITS = api.Limits(context_len=256, block_size=4, num_blocks=128, step_tokens=64, max_sequences=16)


class Late:
    """A step whose ids are kept from the engine until it reads them."""

    is_ready = False

    def __init__(self, spy: Spy, ids: list[int], *, fails: bool) -> None:
        self._spy = spy
        self._ids = ids
        self._fails = fails

    def read(self) -> list[int]:
        assert self._spy.flying.pop(0) is self, "steps are read in the order of their start"
        if self._fails:
            raise RuntimeError("told to fail late")
        return self._ids


class Spy(FakeRunner):
    """A fake runner that remembers what it ran and fails when told to.

    A late one is a device that computes by itself: it takes rows as they are when a step is
    started, knows what it sampled, and tells the engine only when that reads it.
    """

    def __init__(
        self, limits: api.Limits, *, late: bool = False, **options: Callable[[str], str | None]
    ) -> None:
        super().__init__(limits=limits, **options)  # type: ignore[arg-type]  # answer alone
        self.fails = False
        self.fails_late = False
        self.late = late
        self.flying: list[Late] = []
        self.num_ahead = 0
        """Steps that were started before the one before them was read."""
        self.steps: list[list[tuple[int, int, int]]] = []
        """(context, start, num_new) of every row."""
        self.copies: list[tuple[int, int]] = []

    def start(self, rows: Sequence[Row], copies: Sequence[tuple[int, int]]) -> Handle:
        assert len(rows) <= self.limits.max_sequences
        assert sum(row.num_new for row in rows) <= self.limits.step_tokens
        self.steps.append([(row.context, row.start, row.num_new) for row in rows])
        self.copies.extend(copies)
        if self.fails:
            raise RuntimeError("told to fail")
        follows = [row.follows is not None for row in rows]
        assert all(follows) if self.flying else not any(follows)
        assert len(self.flying) <= 1
        self.num_ahead += len(self.flying)
        done = super().start(rows, copies)
        if not self.late:
            return done
        handle = Late(self, done.read(), fails=self.fails_late)
        self.flying.append(handle)
        return handle


def expected_output(
    prompt: Sequence[int], sampling: api.Sampling, context_len: int
) -> tuple[str, str]:
    """Return text and reason of a Generate over single-byte text, worked out char by char."""
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
class Known:
    """What the server knows of a context."""

    ids: list[int]
    salt: str = ""
    num_fills: int = 0
    """Fills not answered yet."""
    num_owed: int = 0
    """Prompt tokens that Filled reports still have to account for."""
    num_seen: int = 0
    prompt: list[int] | None = None
    """Set while it generates."""
    sampling: api.Sampling | None = None
    text: str = ""
    generated: list[int] = field(default_factory=list)
    num_recomputed: int = 0
    filled: list[api.Filled] = field(default_factory=list)
    finished: list[api.Finished] = field(default_factory=list)


class ServerDouble:
    """One engine over a spied fake runner, and the model of what it holds."""

    def __init__(
        self,
        limits: api.Limits = LIMITS,
        *,
        late: bool = False,
        **options: Callable[[str], str | None],
    ) -> None:
        self.limits = limits
        self.runner = Spy(limits, late=late, **options)
        self.engine = Engine(self.runner, epoch=1)
        self.known: dict[int, Known] = {}
        self.failed: list[api.Failed] = []
        self.checks_text = not options
        self._num = 0

    def new_id(self) -> int:
        self._num += 1
        return self._num

    def apply(self, command: api.Command) -> None:
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
        """Make a context and fill it."""
        context = self.new_id()
        ids = self._prefix(parent, parent_len) + list(tokens)
        self.known[context] = Known(ids, salt, num_fills=1, num_owed=len(ids))
        self.apply(api.Fill(context, list(tokens), parent, parent_len, salt, rank))
        return context

    def extend(self, context: int, tokens: Sequence[int], *, rank: float = 0.0) -> None:
        known = self.known[context]
        known.ids = known.ids + list(tokens)
        known.num_fills += 1
        known.num_owed += len(tokens)
        self.apply(api.Fill(context, list(tokens), rank=rank))

    def generate(self, context: int, *, rank: float = 0.0, **sampling: Any) -> None:
        self._begin(context, sampling)
        chosen = self.known[context].sampling
        assert chosen is not None
        self.apply(api.Generate(context, chosen, rank=rank))

    def fork_generate(
        self, parent: int, parent_len: int, *, rank: float = 0.0, **sampling: Any
    ) -> int:
        context = self.new_id()
        ids = self._prefix(parent, parent_len)
        self.known[context] = Known(ids, self.known[parent].salt, num_owed=len(ids))
        self._begin(context, sampling)
        chosen = self.known[context].sampling
        assert chosen is not None
        self.apply(api.Generate(context, chosen, parent, parent_len, self.known[parent].salt, rank))
        return context

    def free(self, context: int, keep: int = 0) -> None:
        del self.known[context]
        self.apply(api.Free(context, keep))

    def abort(self, context: int) -> None:
        del self.known[context]
        self.apply(api.Abort(context))

    def step(self) -> api.Step | None:
        step = self.engine.step()
        self.engine.check()
        if step is not None:
            for report in step.reports:
                self._take(report)
        return step

    def run(self, most: int = 5000) -> None:
        """Step until the engine is idle, and see that everything is answered."""
        for _ in range(most):
            if self.step() is None:
                break
        else:
            raise AssertionError(f"no end after {most} steps")
        assert self.engine.is_idle
        for known in self.known.values():
            assert known.num_fills == 0
            assert known.prompt is None

    def generate_text(self, tokens: Sequence[int], **sampling: Any) -> str:
        """Fill, generate, run to the end and free; return the text."""
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
        known.sampling = api.Sampling(**{"max_tokens": 100, **sampling})
        known.text = ""
        known.generated = []

    def _take(self, report: api.Report) -> None:
        if isinstance(report, api.StatusReport | api.Pong | api.Checked):
            return
        known = self.known.get(report.context)
        assert known is not None, f"a report on a context that was freed: {report}"
        match report:
            case api.Filled():
                known.filled.append(report)
                known.num_fills -= 1
                known.num_seen += report.computed + report.shared + report.cached
                known.num_recomputed += report.recomputed
                if known.num_fills == 0:
                    assert known.num_seen == known.num_owed
                    known.num_seen = known.num_owed = 0
            case api.Tokens():
                known.text += report.text
                known.generated += report.ids
                known.ids = known.ids + report.ids
            case api.Finished():
                self._finish(known, report)
            case api.Failed():
                self.failed.append(report)
                del self.known[report.context]

    def _finish(self, known: Known, report: api.Finished) -> None:
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
