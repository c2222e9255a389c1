"""Constrained calls on an engine: what they are asked, and a loop that waits for grammars."""

from __future__ import annotations

import json
import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from conure.engine import api
from conure.engine.constraints import Constraints
from conure.engine.engine import Engine
from conure.engine.runner import Runner

PATIENCE_S = 20.0


def lark(grammar: str) -> str:
    """A constraint of a Lark grammar."""
    return json.dumps({"grammars": [{"lark_grammar": grammar}]})


def schema(content: Any) -> str:
    """A constraint of a JSON schema, compact as the server asks for it."""
    compact = {**content, "x-guidance": {"whitespace_flexible": False}}
    return json.dumps({"grammars": [{"json_schema": compact}]})


AMBIGUOUS = lark('start: e\ne: e e e | e e | "a" | "b"')
"""Its moves take longer and longer: 10 ms after some 100 tokens."""


@dataclass
class Outcome:
    """Everything that was reported on one call, in order."""

    reports: list[api.Report] = field(default_factory=list)

    @property
    def end(self) -> api.Finished | api.Failed:
        last = self.reports[-1]
        assert isinstance(last, api.Finished | api.Failed)
        return last

    @property
    def finished(self) -> api.Finished:
        assert isinstance(self.end, api.Finished), self.end
        return self.end

    @property
    def failed(self) -> api.Failed:
        assert isinstance(self.end, api.Failed), self.end
        return self.end

    @property
    def ids(self) -> list[int]:
        return [i for r in self.reports if isinstance(r, api.Tokens) for i in r.ids]

    @property
    def text(self) -> str:
        return "".join(r.text for r in self.reports if isinstance(r, api.Tokens))


class Bench:
    """An engine with constraints, and calls on it."""

    def __init__(self, runner: Runner, constraints: Constraints | None = None) -> None:
        self.constraints = constraints or Constraints(runner.tokenizer_json, runner.eos_ids)
        self.engine = Engine(runner, epoch=1, constraints=self.constraints)
        self.outcomes: dict[int, Outcome] = {}
        self.checked: dict[int, api.Checked] = {}
        self.open: set[int] = set()
        self._num = 0

    def start(self, prompt: Sequence[int], constraint: str | None, **sampling: Any) -> int:
        """Fill a context and let it generate; returns its id."""
        context = self.fill(prompt)
        self.generate(context, constraint, **sampling)
        return context

    def fill(self, prompt: Sequence[int]) -> int:
        self._num += 1
        self.outcomes[self._num] = Outcome()
        self.apply(api.Fill(self._num, list(prompt)))
        return self._num

    def generate(self, context: int, constraint: str | None, **sampling: Any) -> None:
        chosen = api.Sampling(**{"max_tokens": 100, **sampling})
        self.open.add(context)
        self.apply(api.Generate(context, chosen, constraint=constraint))

    def free(self, context: int) -> None:
        self.open.discard(context)
        self.apply(api.Free(context))

    def apply(self, command: api.Command) -> None:
        self.engine.apply(command)
        self.engine.check()

    def step(self) -> bool:
        """One step; false where the engine has nothing to do for now."""
        step = self.engine.step()
        self.engine.check()
        for report in [] if step is None else step.reports:
            if isinstance(report, api.Checked):
                self.checked[report.nonce] = report
            elif not isinstance(report, api.Pong | api.StatusReport):
                self.outcomes[report.context].reports.append(report)
                if isinstance(report, api.Finished | api.Failed):
                    self.open.discard(report.context)
        return step is not None

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Step until every call has ended, or `until` says so; sleep while all are held."""
        while not until() if until else self.open:
            if not self.step() and self.engine.is_idle:
                readable, _, _ = select.select([self.constraints.fileno()], [], [], PATIENCE_S)
                assert readable, "nothing comes any more"

    def call(
        self, constraint: str | None, prompt: Sequence[int] = b"hello", **sampling: Any
    ) -> Outcome:
        """One call from beginning to end."""
        context = self.start(list(prompt), constraint, **sampling)
        self.run()
        outcome = self.outcomes[context]
        self.free(context)
        return outcome

    def close(self) -> None:
        self.constraints.close()
