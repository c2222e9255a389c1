"""Constrained calls on an engine core: constraints, and a loop that waits for grammars."""

from __future__ import annotations

import json
import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from conure.engine import protocol
from conure.engine.constraints.compiler import ConstraintCompiler
from conure.engine.core.engine import EngineCore
from conure.engine.runner.base import Runner

PATIENCE_S = 60.0


def lark(grammar: str) -> str:
    """Return the constraint of a Lark grammar."""
    return json.dumps({"grammars": [{"lark_grammar": grammar}]})


def schema(content: Any) -> str:
    """Return the constraint of a JSON schema for compact JSON, as the server sends it."""
    compact = {**content, "x-guidance": {"whitespace_flexible": False}}
    return json.dumps({"grammars": [{"json_schema": compact}]})


AMBIGUOUS = lark('start: e\ne: e e e | e e | "a" | "b"')
"""Advancing it takes longer with every token: 10 ms after about 100 tokens."""


@dataclass
class ReportedCall:
    """All reports of one call, in order."""

    reports: list[protocol.Report] = field(default_factory=list)

    @property
    def end(self) -> protocol.Finished | protocol.Failed:
        last = self.reports[-1]
        assert isinstance(last, protocol.Finished | protocol.Failed)
        return last

    @property
    def finished(self) -> protocol.Finished:
        assert isinstance(self.end, protocol.Finished), self.end
        return self.end

    @property
    def failed(self) -> protocol.Failed:
        assert isinstance(self.end, protocol.Failed), self.end
        return self.end

    @property
    def ids(self) -> list[int]:
        return [i for r in self.reports if isinstance(r, protocol.Tokens) for i in r.ids]

    @property
    def text(self) -> str:
        return "".join(r.text for r in self.reports if isinstance(r, protocol.Tokens))


class ConstraintHarness:
    """An engine with constraints, and its calls."""

    def __init__(self, runner: Runner, constraints: ConstraintCompiler | None = None) -> None:
        self.constraints = constraints or ConstraintCompiler(runner.tokenizer_json, runner.eos_ids)
        self.engine = EngineCore(runner, epoch=1, constraints=self.constraints)
        self.outcomes: dict[int, ReportedCall] = {}
        self.checked: dict[int, protocol.Checked] = {}
        self.open: set[int] = set()
        self._num = 0

    def start(self, prompt: Sequence[int], constraint: str | None, **sampling: Any) -> int:
        """Fill a context and generate. Return its id."""
        context = self.fill(prompt)
        self.generate(context, constraint, **sampling)
        return context

    def fill(self, prompt: Sequence[int]) -> int:
        self._num += 1
        self.outcomes[self._num] = ReportedCall()
        self.apply(protocol.Fill(self._num, list(prompt)))
        return self._num

    def generate(self, context: int, constraint: str | None, **sampling: Any) -> None:
        chosen = protocol.SamplingParams(**{"max_tokens": 100, **sampling})
        self.open.add(context)
        self.apply(protocol.GenerateCommand(context, chosen, constraint=constraint))

    def free(self, context: int) -> None:
        self.open.discard(context)
        self.apply(protocol.Free(context))

    def apply(self, command: protocol.Command) -> None:
        self.engine.apply(command)
        self.engine.check()

    def step(self) -> bool:
        """Run one step. Return False if the engine has nothing to do."""
        step = self.engine.step()
        self.engine.check()
        for report in [] if step is None else step.reports:
            if isinstance(report, protocol.Checked):
                self.checked[report.nonce] = report
            elif not isinstance(report, protocol.Pong | protocol.StatusReport):
                self.outcomes[report.context].reports.append(report)
                if isinstance(report, protocol.Finished | protocol.Failed):
                    self.open.discard(report.context)
        return step is not None

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Step until every call has ended or `until` is true; sleep while all are blocked."""
        while not until() if until else self.open:
            if not self.step() and self.engine.is_idle:
                readable, _, _ = select.select([self.constraints.fileno()], [], [], PATIENCE_S)
                assert readable, "no constraint became ready"

    def call(
        self, constraint: str | None, prompt: Sequence[int] = b"hello", **sampling: Any
    ) -> ReportedCall:
        """Run one call to its end."""
        context = self.start(list(prompt), constraint, **sampling)
        self.run()
        outcome = self.outcomes[context]
        self.free(context)
        return outcome

    def close(self) -> None:
        self.constraints.close()
