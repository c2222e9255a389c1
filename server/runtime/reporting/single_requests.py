"""The counterfactual of a receipt: the same calls as single requests of a parallel client.

The client sends each call when its inputs are ready, to the engine that ran it, without network and
without shared prefixes. Requests use the event loop of the server one after another. An engine
fills one prompt after another while it has a row for the output. Each of its steps gives every
output one token and takes as long as the steps that the server has seen, by its tokens and by the
KV tokens of the outputs. Nodes without a model, and calls on engines whose steps are unknown, take
as long as they took.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from ...engines.step_costs import StepCosts
from ...program.ir import GenerateNode
from ..node_state import NodeState
from .request_times import RequestTimes


class EngineSpeed(NamedTuple):
    """An engine of the counterfactual."""

    costs: StepCosts
    step_tokens: int
    """Tokens that a step computes at most."""
    max_sequences: int
    """Outputs that a step decodes at most."""


class ServerSpeed(NamedTuple):
    """What single requests take on a server."""

    engines: Mapping[str, EngineSpeed]
    """The engines whose steps are known, by name."""
    request_times: RequestTimes = RequestTimes()
    """What each request takes outside the engines."""


class _Call(NamedTuple):
    """The work of a call."""

    engine: str
    num_prompt: int
    num_output: int


class _Delay(NamedTuple):
    """A node that is computed outside the engines, in parallel with all other nodes."""

    seconds: float


_Work: TypeAlias = _Call | _Delay


def estimate_s(
    states: Sequence[NodeState],
    waited_for: Callable[[NodeState], Iterable[NodeState]],
    speed: ServerSpeed,
) -> float:
    """Return the seconds from the start of the program to the end of its last node.

    Args:
        states: the nodes that have started and finished.
        waited_for: the nodes that a node waited for; others than `states` are ignored.
        speed: what single requests take on the server.
    """
    known = {state.node.id for state in states}
    work: dict[str, _Work] = {}
    before: dict[str, tuple[str, ...]] = {}
    for state in states:
        waited = [each for each in waited_for(state) if each.node.id in known]
        work[state.node.id] = _work(state, waited, speed.engines)
        before[state.node.id] = tuple({each.node.id: None for each in waited})
    return _Counterfactual(work, before, speed).run()


def _work(
    state: NodeState, before: Iterable[NodeState], engines: Mapping[str, EngineSpeed]
) -> _Work:
    if (
        isinstance(state.node, GenerateNode)
        and state.engine is not None
        and state.engine in engines
    ):
        usage = state.usage
        # Tokens that a constraint forces are computed like those of a prompt.
        return _Call(state.engine, usage.logical + usage.forced, usage.decoded)
    began = max((each.finished_at or 0.0 for each in before), default=0.0)
    began = max(began, state.started_at or 0.0)
    return _Delay(max((state.finished_at or 0.0) - began, 0.0))


class _Output(NamedTuple):
    """An output that is being decoded."""

    end_step: float
    name: str
    num_tokens: int
    """Tokens of its context at the end."""


class _Engine:
    """An engine that fills one prompt at a time, and gives each output one token per step.

    Steps are fractional: a prompt takes the part of a step that its tokens fill.
    """

    def __init__(self, speed: EngineSpeed) -> None:
        self._costs = speed.costs
        self._step_tokens = speed.step_tokens
        self._max_outputs = speed.max_sequences
        self._prompts: deque[tuple[str, _Call]] = deque()
        self._filling: tuple[str, _Call] | None = None
        self._fill_end = 0.0
        """The step at which the prompt is filled."""
        self._outputs: list[_Output] = []
        self._num_at_end = 0
        """Sum of `num_tokens` of the outputs."""
        self._end_steps = 0.0
        """Sum of `end_step` of the outputs."""
        self._step = 0.0
        self._now_s = 0.0
        self._next_step = 0.0
        """The step at which the next prompt or output ends, if `next_s` is not None."""
        self.next_s: float | None = None
        """The time of `next_step`; None if the engine has no work."""

    def add(self, name: str, call: _Call, now_s: float) -> None:
        """Queue the prompt of a call, at a time at which nothing ends before."""
        if self.next_s is not None and now_s > self._now_s:
            share = (now_s - self._now_s) / (self.next_s - self._now_s)
            self._step += share * (self._next_step - self._step)
        self._now_s = now_s
        self._prompts.append((name, call))
        self._schedule()

    def end_next(self) -> str | None:
        """Run until `next_s`; return the call whose output ends, None if a prompt is filled."""
        assert self.next_s is not None, "an engine without work"
        self._now_s, self._step = self.next_s, self._next_step
        ended = None
        if self._filling is not None and self._fill_end == self._step:
            (name, call), self._filling = self._filling, None
            output = _Output(self._step + call.num_output, name, call.num_prompt + call.num_output)
            heapq.heappush(self._outputs, output)
            self._num_at_end += output.num_tokens
            self._end_steps += output.end_step
        else:
            output = heapq.heappop(self._outputs)
            self._num_at_end -= output.num_tokens
            self._end_steps -= output.end_step
            ended = output.name
        self._schedule()
        return ended

    def _schedule(self) -> None:
        """Start the next prompt if none is being filled, and compute when something ends."""
        num_outputs = len(self._outputs)
        if self._filling is None and self._prompts and num_outputs < self._max_outputs:
            self._filling = self._prompts.popleft()
            self._fill_end = self._step + self._filling[1].num_prompt / self._step_tokens
        ends = [output.end_step for output in self._outputs[:1]]
        num_tokens, num_filled = num_outputs, 0.0
        if self._filling is not None:
            ends.append(self._fill_end)
            num_tokens += self._step_tokens
            num_filled = self._filling[1].num_prompt / 2
        if not ends:
            self.next_s = None
            return
        self._next_step = min(ends)
        num_steps = self._next_step - self._step
        # Contexts grow meanwhile: as many tokens as in the middle of the interval.
        middle = self._step + num_steps / 2
        num_held = num_filled + self._num_at_end - self._end_steps + num_outputs * middle
        costs = self._costs
        step_s = costs.step_s + num_tokens * costs.token_s + num_held * costs.held_token_s
        self.next_s = self._now_s + num_steps * step_s


class _Counterfactual:
    """Events of the counterfactual, in order of time."""

    def __init__(
        self,
        work: Mapping[str, _Work],
        before: Mapping[str, tuple[str, ...]],
        speed: ServerSpeed,
    ) -> None:
        self._work = work
        self._request_times = speed.request_times
        self._server_free_s = 0.0
        """When the event loop of the server is free for the next request."""
        self._num_open = {name: len(names) for name, names in before.items()}
        self._after: dict[str, list[str]] = {}
        for name, names in before.items():
            for each in names:
                self._after.setdefault(each, []).append(name)
        self._started: set[str] = set()
        self._events: list[tuple[float, int, str]] = []
        """Times at which prompts arrive at their engines and nodes outside the engines end.

        The number in the middle counts the events: equal times keep the order of the program.
        """
        self._num_events = 0
        self._engines = {name: _Engine(each) for name, each in speed.engines.items()}
        self._next: list[tuple[float, str]] = []
        """Times at which something may end on an engine; others than its `next_s` are ignored."""
        self._end_s = 0.0

    def run(self) -> float:
        """Return the end of the last node if every node starts as soon as it is ready.

        A prompt may wait for a node that reads one of its outputs. Of such a cycle, the node that
        is first in `work` starts without waiting for the others.
        """
        for name in self._work:
            if not self._num_open[name]:
                self._start(name, 0.0)
        waiting = iter(self._work)
        while True:
            if self._events and (not self._next or self._events[0][0] <= self._next[0][0]):
                at_s, _, name = heapq.heappop(self._events)
                self._handle(name, at_s)
            elif self._next:
                at_s, engine = heapq.heappop(self._next)
                self._run_engine(engine, at_s)
            elif len(self._started) < len(self._work):
                stuck = next(name for name in waiting if name not in self._started)
                self._start(stuck, self._end_s)
            else:
                return self._end_s

    def _start(self, name: str, now_s: float) -> None:
        if name in self._started:
            return
        self._started.add(name)
        work = self._work[name]
        if isinstance(work, _Delay):
            at_s = now_s + work.seconds
        else:
            times = self._request_times
            self._server_free_s = max(self._server_free_s, now_s) + times.busy_s
            at_s = self._server_free_s + times.wait_s
        self._num_events += 1
        heapq.heappush(self._events, (at_s, self._num_events, name))

    def _handle(self, name: str, now_s: float) -> None:
        """End a node outside the engines, or give the prompt of a call to its engine."""
        work = self._work[name]
        if isinstance(work, _Delay):
            self._finish(name, now_s)
            return
        self._engines[work.engine].add(name, work, now_s)
        self._note_next(work.engine)

    def _run_engine(self, key: str, now_s: float) -> None:
        engine = self._engines[key]
        if engine.next_s != now_s:
            return
        ended = engine.end_next()
        self._note_next(key)
        if ended is not None:
            self._finish(ended, now_s)

    def _note_next(self, key: str) -> None:
        next_s = self._engines[key].next_s
        if next_s is not None:
            heapq.heappush(self._next, (next_s, key))

    def _finish(self, name: str, now_s: float) -> None:
        self._end_s = max(self._end_s, now_s)
        for later in self._after.get(name, ()):
            self._num_open[later] -= 1
            if not self._num_open[later]:
                self._start(later, now_s)
