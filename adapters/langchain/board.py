"""One run of a chain beside its plan: which calls were planned, asked for, answered.

The server works through the plan while the chain runs; the chain's calls come here and find
the planned ones by what they ask: the whole prompt and all settings. A planned prompt is
known once the values that it is made of are: then it is rendered here as on the server. A
call that asks for something else is a *miss* and becomes a node of its own.

Knows plans, events and values. Refuses to know connections, Runnables and who waits how:
listeners are called with events, under no lock, from whatever thread brings them. Safe for
any number of threads. Kept true: a planned call is given away at most once, and only to a
call that asks for exactly what was planned.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from conure.server.program.errors import ConureError
from conure.server.program.expression import evaluate, input_expression
from conure.server.program.ir import Json
from conure.server.program.status import Event, EventType, ProgramStatus
from conure.server.program.value import text_of

from .plan import Awaited, Plan, PlannedCall
from .stream import ENDS
from .tally import Miss, Tally

Listener: TypeAlias = Callable[["Event | ConureError"], None]
"""Hears what happens to one call; an error if nothing more will be heard."""

HEARD: Final[frozenset[EventType]] = frozenset({*ENDS, "variable.committed"})
"""Events that a board makes something of, besides the last one."""
TEXTS: Final[frozenset[EventType]] = frozenset({"node.delta"})
"""Those that matter only where an answer is streamed."""

_MESSAGE = ("role", "content", "name", "tool_calls", "tool_call_id")


class Answer(NamedTuple):
    """Where the answer to a call of the chain will be."""

    variable: str
    node: str


class NotPlannedError(ConureError):
    """What was claimed was refused with a plan, or with others: claim it again, alone."""


@dataclass(slots=True)
class _Track:
    """One call on the server."""

    place: str
    reads: frozenset[str] = frozenset()
    miss: Miss | None = None
    """Why it was not in the plan; None if it was."""
    program: str = ""
    history: list[Event] = field(default_factory=list)
    listeners: list[Listener] = field(default_factory=list)
    refusal: ConureError | None = None
    """Why the server will not make it."""
    has_ended: bool = False
    is_claimed: bool = False


class Board:
    """The state of one run."""

    def __init__(self) -> None:
        self.tally = Tally()
        self._lock = threading.Lock()
        self._values: dict[str, Json] = {}
        self._unknown: list[PlannedCall] = []
        """Planned, and their prompts are not known yet."""
        self._known: dict[bytes, deque[PlannedCall]] = defaultdict(deque)
        """Planned, by what they ask."""
        self._tracks: dict[str, _Track] = {}
        self._variable_of: dict[str, str] = {}
        self._declared: set[str] = set()
        """Variables of plans that the server has not refused, whose values the chain gives."""
        self._awaited: dict[str, Awaited] = {}
        self._broken: dict[str, str] = {}
        self._names = 0
        self._failure: ConureError | None = None
        self._body: dict[str, Any] = _empty()
        self._is_whole = True
        self._sent: set[str] = set()

    # --- what the chain does --------------------------------------------------------------

    def prefix(self) -> str:
        """A prefix that the names of one plan have to themselves."""
        with self._lock:
            self._names += 1
            return "" if self._names == 1 else f"in{self._names}_"

    def add(self, plans: Iterable[tuple[Plan, Mapping[str, Json]]]) -> None:
        """The chain begins something that has a plan.

        Args:
            plans: each with the values that its input gives.
        """
        with self._lock:
            for plan, inputs in plans:
                self._values.update(inputs)
                self._body["inputs"].update(inputs)
                declared = dict.fromkeys(plan.declared())
                self._declared |= declared.keys()
                self._body["variables"].update({name: {} for name in declared})
                self._is_whole &= not plan.has_parts
                for call in plan.calls:
                    self._body["nodes"].append({**call.node, "on_error": "isolate"})
                    track = _Track(call.place, call.reads)
                    self._track(call.node["id"], call.variable, track)
                for awaited in plan.awaited.values():
                    self._awaited.update({view.variable: awaited for view in awaited.source.views})
                self._unknown += plan.calls
                self.tally.num_planned += len(plan.calls)
            self._render()

    def observe(self, awaited: Awaited, made: Any) -> None:
        """The chain made a value that calls of the plan wait for."""
        values, reason = awaited.values(made)
        with self._lock:
            if reason:
                self._broken[awaited.place] = reason
            self._values.update(values)
            wanted = values.keys() & self._declared
            self._body["inputs"].update({name: values[name] for name in wanted})
            self._render()

    def claim(self, node: dict[str, Json]) -> Answer:
        """The chain makes a call: find it in the plan, else add it."""
        key = _key(node, node["messages"])
        with self._lock:
            planned = self._known.get(key)
            if planned:
                call = planned.popleft()
                self.tally.num_served += 1
                self._tracks[call.variable].is_claimed = True
                return Answer(call.variable, call.node["id"])
            return self._miss(node)

    def claim_alone(self, before: Answer, node: dict[str, Json]) -> tuple[Answer, dict[str, Any]]:
        """A call that was claimed `before` and not made: what to send for it alone."""
        with self._lock:
            miss = self._tracks[before.variable].miss
            if miss is None:
                miss = self._reason()
                self.tally.misses.append(miss)
            answer, named = self._named(node, miss)
            self._sent.add(answer.variable)
            body = {**_empty(), "nodes": [named], "outputs": [answer.variable], "whole": False}
            return answer, body

    def _miss(self, node: dict[str, Json]) -> Answer:
        miss = self._reason()
        self.tally.misses.append(miss)
        answer, named = self._named(node, miss)
        self._body["nodes"].append(named)
        return answer

    def _named(self, node: dict[str, Json], miss: Miss) -> tuple[Answer, dict[str, Json]]:
        """A call that is in no plan, with names of its own."""
        self._is_whole = False  # where one call was not foreseen, others follow
        self._names += 1
        answer = Answer(f"miss{self._names}", f"miss{self._names}_call")
        output = {**node["output"], "variable": answer.variable}
        self._track(answer.node, answer.variable, _Track("", miss=miss, is_claimed=True))
        return answer, {**node, "id": answer.node, "output": output, "on_error": "isolate"}

    def _reason(self) -> Miss:
        """What stands in the way of the first planned call that nobody has asked for."""
        for call in self._unknown:
            for name in call.reads:
                awaited = self._awaited.get(name)
                if awaited is not None and name not in self._values:
                    why = self._broken.get(awaited.place, "its value has not come")
                    return Miss(call.place, f"{awaited.place} ({awaited.what}): {why}")
        for calls in self._known.values():
            if calls:
                return Miss(calls[0].place, f"{calls[0].place}: another prompt, or other settings")
        return Miss("", "not in the plan")

    def _track(self, node: str, variable: str, track: _Track) -> None:
        self._tracks[variable] = track
        self._variable_of[node] = variable

    # --- what the server is told ----------------------------------------------------------

    def take(self) -> dict[str, Any] | None:
        """What to send now: nodes, variables, inputs and outputs, and whether that is `whole`,
        so that nothing will follow; None if nothing could run by it.
        """
        with self._lock:
            body = self._body
            fresh = {self._variable_of[node["id"]] for node in body["nodes"]}
            unknown = {call.variable: call.reads for call in self._unknown}
            can_start = any(name not in unknown for name in fresh)
            # An input matters to nodes that are there already, if one of them reads it.
            waiting = self._sent - fresh
            is_read = any(
                name in reads
                for variable, reads in self._reads().items()
                if variable in waiting
                for name in body["inputs"]
            )
            if not can_start and not is_read:
                return None
            self._body = _empty()
            self._sent |= fresh
            outputs = [name for name in fresh if not self._is_read(name)]
            is_whole = self._is_whole and body["inputs"].keys() >= body["variables"].keys()
            return {**body, "outputs": outputs, "whole": is_whole}

    def _reads(self) -> dict[str, frozenset[str]]:
        return {call.variable: call.reads for call in self._all_planned}

    @property
    def _all_planned(self) -> Iterable[PlannedCall]:
        yield from self._unknown
        for calls in self._known.values():
            yield from calls

    def _is_read(self, name: str) -> bool:
        return any(name in call.reads for call in self._unknown)

    def sent(self, body: dict[str, Any], program: str) -> None:
        """The server took this, in this program."""
        with self._lock:
            self.tally.program = self.tally.program or program
            for node in body["nodes"]:
                self._tracks[self._variable_of[node["id"]]].program = program

    def has_calls_to_send(self) -> bool:
        """Whether there are calls that nobody has taken yet to send them."""
        with self._lock:
            return bool(self._body["nodes"])

    def drop(self, body: dict[str, Any], reason: ConureError) -> None:
        """The server takes this not: its calls were never planned.

        Nor were those that wait on the server for a value in it. Who claimed one of all these
        or an unplanned call along with others hears `NotPlannedError`; who sent one alone, the
        reason.
        """
        dropped = {self._variable_of[node["id"]] for node in body["nodes"]}
        lost = body["inputs"].keys() - body["variables"].keys()
        with self._lock:
            self.tally.refusals.append(reason.message)
            self._sent -= dropped
            self._declared -= body["variables"].keys()
            for name in body["variables"]:
                self._body["inputs"].pop(name, None)
            is_planned = bool(lost) or any(self._tracks[name].miss is None for name in dropped)
            variables = dropped | self._behind(lost)
            self._forget(variables)
            told = []
            for track in map(self._tracks.__getitem__, variables):
                track.refusal = reason
                if track.is_claimed and (is_planned or len(dropped) > 1):
                    track.refusal = NotPlannedError(reason.code, reason.message)
                    self.tally.num_served -= track.miss is None
                told += [(listener, track.refusal) for listener in track.listeners]
        for listener, refusal in told:
            listener(refusal)

    def _behind(self, names: AbstractSet[str]) -> set[str]:
        """Variables of the planned calls that wait for these, or for each other's answers."""
        found: set[str] = set()
        waiting = {name: each for name, each in self._tracks.items() if not each.has_ended}
        while more := {v for v, each in waiting.items() if each.reads & (names | found)} - found:
            found |= more
        return found

    def _forget(self, variables: AbstractSet[str]) -> None:
        """Give away no more what was planned for these."""
        self._unknown = [call for call in self._unknown if call.variable not in variables]
        for key, calls in self._known.items():
            self._known[key] = deque(call for call in calls if call.variable not in variables)

    # --- what the server tells ------------------------------------------------------------

    def listen(self, answer: Answer, listener: Listener) -> None:
        """Hear what happened to a call, and what happens from now on."""
        track = self._tracks[answer.variable]
        with self._lock:
            past = list(track.history)
            failure = track.refusal or self._failure
            if failure is None:
                track.listeners.append(listener)
        for event in past:
            listener(event)
        if failure is not None and not track.has_ended:
            listener(failure)

    def hear(self, event: Event) -> None:
        """An event of the program."""
        data = event.data
        variable = data.get("variable") or self._variable_of.get(data.get("node", ""), "")
        with self._lock:
            track = self._tracks.get(variable)
            listeners: list[Listener] = []
            if track is not None:
                listeners = list(track.listeners)
                if event.type == "variable.committed":
                    track.has_ended = True
                    track.history = [event]  # it has all the text that came before
                    self._values[variable] = data["value"]
                    self._render()
                elif not track.has_ended:  # else a text that came by another way than its end
                    track.has_ended = event.type in ENDS
                    if track.has_ended or event.type in TEXTS:
                        track.history.append(event)
            elif event.type == "program.finished":
                ended = [one for one in self._open() if one.program == data["program"]]
                listeners = [each for one in ended for each in one.listeners]
        for listener in listeners:
            listener(event)

    def fail(self, failure: ConureError) -> None:
        """Nothing more will be heard."""
        with self._lock:
            self._failure = failure
            listeners = [each for track in self._open() for each in track.listeners]
        for listener in listeners:
            listener(failure)

    def _open(self) -> list[_Track]:
        return [track for track in self._tracks.values() if not track.has_ended]

    def is_settled(self) -> bool:
        """Whether nothing that was sent is still to be answered."""
        with self._lock:
            return all(self._tracks[name].has_ended for name in self._sent)

    def end(self) -> Tally:
        """The chain is over: what became of its calls."""
        with self._lock:
            tracks = self._tracks.values()
            self.tally.wasted = [t.place for t in tracks if t.has_ended and not t.is_claimed]
            return self.tally

    def stopped(self, status: ProgramStatus) -> None:
        """A program was stopped after the end: which more of its calls an engine had."""
        with self._lock:
            for name, node in status.nodes.items():
                track = self._tracks.get(self._variable_of.get(name, ""))
                if track is None or track.is_claimed or node.engine is None:
                    continue
                if track.place not in self.tally.wasted:
                    self.tally.wasted.append(track.place)

    # --- rendering ------------------------------------------------------------------------

    def _render(self) -> None:
        """Move calls whose prompts are known now to where they are found by them."""
        still: list[PlannedCall] = []
        for call in self._unknown:
            if call.reads <= self._values.keys():
                messages = _rendered(call.node["messages"], self._values)
                self._known[_key(call.node, messages)].append(call)
            else:
                still.append(call)
        self._unknown = still


def _empty() -> dict[str, Any]:
    return {"nodes": [], "variables": {}, "inputs": {}}


def _key(node: Mapping[str, Json], messages: list[Json]) -> bytes:
    """What a call asks for, names aside."""
    asked = {k: v for k, v in node.items() if k not in ("id", "meta", "messages", "output")}
    output = {k: v for k, v in node["output"].items() if k != "variable"}
    return msgspec.json.encode([asked, output, messages], order="sorted")


def _rendered(messages: list[Json], values: Mapping[str, Json]) -> list[Json]:
    """The messages of a node with values in place of variables."""
    whole: list[Json] = []
    for message in messages:
        if "splice" in message:
            value = values[message["splice"]]
            whole += [
                {k: each[k] for k in _MESSAGE if each.get(k) is not None}
                for each in (value if isinstance(value, list) else [value])
            ]
        elif isinstance(message.get("content"), list):
            whole.append({**message, "content": _content(message["content"], values)})
        else:
            whole.append(message)
    return whole


def _content(segments: list[Json], values: Mapping[str, Json]) -> Json:
    if any("part" in segment for segment in segments):
        return segments
    texts = [
        segment["text"]
        if "text" in segment
        else text_of(evaluate(input_expression(segment["input"]), values))
        for segment in segments
    ]
    return "".join(texts)
