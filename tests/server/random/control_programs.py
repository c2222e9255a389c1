"""Random programs with control flow, and a sequential interpreter for them.

`random_program` generates a program. `Reading` interprets it sequentially, with the fake engine's
published text, and computes the expected variables of every instance. It shares only expressions
with the server. Where the outcome is open (the winner of a race, the time of a kill), it uses the
observed outcome and checks that it was possible.

Invariant: nodes are in an order in which they can be interpreted; `shuffled` mixes them for the
server.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from conure.server.program.errors import ExpressionError
from conure.server.program.expressions.evaluate import evaluate

from ..inprocess import answer, expr, var

Json = Any

HEADS = ("The same beginning, long enough for a few blocks of memory. " * 2, "Another. ", "s ")
MAX_TEXT = 80
MAX_CALLS = 60
"""About as many calls as one program makes."""


@dataclass
class Names:
    """The variables that can be read at one point of a program."""

    texts: list[str]
    lists: list[str]

    def inner(self) -> Names:
        return Names(list(self.texts), list(self.lists))


class Writer:
    """Generates one random program."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._count = 0
        self._weight = 1
        self._calls = 0

    def program(self) -> list[Json]:
        names = Names(["given"], ["things"])
        return self.nodes(names, depth=0)

    def nodes(self, names: Names, depth: int) -> list[Json]:
        """Generate nodes that read known names, and add their outputs to the names."""
        kinds = ["call"] * 4 + ["expr", "when", "race", "kill"]
        if depth < 3:
            kinds += ["map", "map", "if", "if", "loop", "try"]
        nodes: list[Json] = []
        for _ in range(self._rng.randint(1, 4 if depth else 5)):
            if self._calls < MAX_CALLS:
                nodes += getattr(self, self._rng.choice(kinds))(names, depth)
        return nodes

    # --- single nodes ---------------------------------------------------------------------

    def call(self, names: Names, depth: int) -> list[Json]:
        name = self._name()
        self._calls += self._weight
        segments: list[Json] = [{"text": self._rng.choice(HEADS)}]
        reads = self._rng.choices(names.texts, k=self._rng.randint(0, 2))
        segments += ({"input": name} for name in reads)
        segments.append({"output": f"v{name}", "max_tokens": self._rng.choice((1, 6, 40))})
        names.texts.append(f"v{name}")
        return [{"id": name, "op": "generate", "prompt": segments}]

    def expr(self, names: Names, depth: int) -> list[Json]:
        name, text = self._name(), self._text(names)
        names.texts.append(f"v{name}")
        return [expr(name, text, f"v{name}")]

    def when(self, names: Names, depth: int) -> list[Json]:
        """Generate a call that may be skipped, and a reader that tolerates this."""
        condition = self._condition(names)
        (call,) = self.call(names, depth)
        call["when"] = condition
        name = self._name()
        skipped = names.texts.pop()
        names.texts.append(f"v{name}")
        return [call, expr(name, {"first": [var(skipped), "nothing"]}, f"v{name}")]

    def race(self, names: Names, depth: int) -> list[Json]:
        """Generate two calls. The first to finish kills the other."""
        one, other = self.call(names, depth), self.call(names, depth)
        racers = [names.texts.pop(), names.texts.pop()]
        wait, kill, pick = self._name(), self._name(), self._name()
        names.texts.append(f"v{pick}")
        return [
            *one,
            *other,
            {"id": wait, "op": "wait", "variables": racers, "mode": "any"},
            {"id": kill, "op": "kill", "targets": racers, "after": [wait]},
            expr(pick, {"first": [var(name) for name in racers]}, f"v{pick}", after=[kill]),
        ]

    def kill(self, names: Names, depth: int) -> list[Json]:
        """Generate a call that is killed once another variable exists, unless it is faster."""
        (call,) = self.call(names, depth)
        target = names.texts.pop()
        name, kill = self._name(), self._name()
        reads = self._rng.choice(names.texts)
        names.texts.append(f"v{name}")
        when = {"eq": [var(reads), var(reads)]}
        return [
            call,
            {"id": kill, "op": "kill", "targets": [target], "when": when},
            expr(name, {"first": [var(target), "killed"]}, f"v{name}"),
        ]

    def bomb(self, names: Names) -> list[Json]:
        name = self._name()
        return [expr(name, {"parse_json": {"concat": ["{", var(names.texts[-1])]}}, f"v{name}")]

    # --- nodes with bodies ----------------------------------------------------------------

    def map(self, names: Names, depth: int) -> list[Json]:
        name, item, index = self._name(), self._name("x"), self._name("i")
        items = self._rng.choice(names.lists)
        inner = names.inner()
        inner.texts += [item, index]
        body = self._body(inner, depth, weight=3)
        fail = "any"
        if self._rng.random() < 0.3:
            fail = "all"
            body += self._maybe_bomb(inner, index)
        given = self._rng.choice(inner.texts)
        names.lists.append(f"v{name}")
        return [
            {
                "id": name,
                "op": "map",
                "items": self._rng.choice(
                    (items, {"slice": [var(items), 0, self._rng.randint(0, 3)]})
                ),
                "as": item,
                "index": index,
                "body": body,
                "collect": {f"v{name}": given},
                "fail": fail,
            }
        ]

    def _maybe_bomb(self, names: Names, index: str) -> list[Json]:
        bomb = self.bomb(names)
        bomb[0]["when"] = {"eq": [var(index), self._rng.randint(0, 2)]}
        return bomb

    def loop(self, names: Names, depth: int) -> list[Json]:
        name, index, carried = self._name(), self._name("i"), self._name("r")
        inner = names.inner()
        inner.texts += [carried, index]
        body = self._body(inner, depth, weight=3)
        after = self._rng.choice(inner.texts)
        following = {"slice": [{"concat": [self._as_text(carried), self._as_text(after)]}, 0, 60]}
        node = {
            "id": name,
            "op": "loop",
            "index": index,
            "carry": {carried: [self._text(names), following]},
            "body": body,
            "until": {"gt": [{"len": var(carried)}, self._rng.randint(10, 80)]},
            "max_iter": 3,
        }
        if self._rng.random() < 0.7:
            node["count"] = self._rng.randint(0, 3)
        names.texts.append(carried)
        return [node]

    def _as_text(self, name: str) -> Json:
        """Return a value as text; also an index, or a skipped value."""
        return {"first": [{"concat": [{"json": var(name)}, ""]}, ""]}

    def __getattr__(self, kind: str) -> Any:
        if kind in ("if", "try"):
            return getattr(self, f"write_{kind}")
        raise AttributeError(kind)

    def write_if(self, names: Names, depth: int) -> list[Json]:
        name = self._name()
        then, otherwise = names.inner(), names.inner()
        sides = [self._body(then, depth), self._body(otherwise, depth)]
        names.texts.append(f"v{name}")
        return [
            {
                "id": name,
                "op": "if",
                "cond": self._condition(names, last=-1),
                "then": sides[0],
                "else": sides[1],
                "merge": {
                    f"v{name}": [self._produced(then, names), self._produced(otherwise, names)]
                },
            }
        ]

    def write_try(self, names: Names, depth: int) -> list[Json]:
        name = self._name()
        inner, handler = names.inner(), names.inner()
        body = self._body(inner, depth)
        if self._rng.random() < 0.7:
            body += self.bomb(inner)
        handlers = [{"codes": ["expr.json", "loop.exhausted"], "body": self._body(handler, depth)}]
        names.texts.append(f"v{name}")
        return [
            {
                "id": name,
                "op": "try",
                "retries": self._rng.choice((0, 0, 1)),
                "body": body,
                "handlers": handlers,
                "merge": {
                    f"v{name}": [self._produced(inner, names), self._produced(handler, names)]
                },
            }
        ]

    def _body(self, names: Names, depth: int, weight: int = 1) -> list[Json]:
        self._weight *= weight
        nodes = self.nodes(names, depth + 1)
        self._weight //= weight
        return nodes

    def _produced(self, inner: Names, outer: Names) -> str:
        made = [name for name in inner.texts if name not in outer.texts and name[0] == "v"]
        return self._rng.choice(made or ["given"])

    # --- expressions ----------------------------------------------------------------------

    def _condition(self, names: Names, last: int | None = None) -> Json:
        name = self._rng.choice(names.texts[:last])
        return {"contains": [{"json": var(name)}, self._rng.choice("aeiouz0")]}

    def _text(self, names: Names) -> Json:
        one, other = (self._rng.choice(names.texts) for _ in range(2))
        joined: Json = {"concat": [{"json": var(one)}, "+", {"json": var(other)}]}
        if self._rng.random() < 0.3:
            shadow = self._rng.choice(names.texts)
            items = {"split": [{"json": var(one)}, "a"]}
            joined = {"join": [{"each": [items, shadow, {"concat": [var(shadow), "-"]}]}, "+"]}
        return {"slice": [joined, 0, MAX_TEXT]}

    def _name(self, kind: str = "n") -> str:
        self._count += 1
        return f"{kind}{self._count}"


def random_program(rng: random.Random) -> list[Json]:
    """Return the nodes of a program with the inputs `given` (text) and `things` (texts)."""
    return Writer(rng).program()


def shuffled(nodes: Json, rng: random.Random) -> Json:
    """Return the program with the nodes of every body in another order."""
    mixed = copy.deepcopy(nodes)
    _shuffle(mixed, rng)
    return mixed


def _shuffle(nodes: list[Json], rng: random.Random) -> None:
    rng.shuffle(nodes)
    for node in nodes:
        for key in ("body", "then", "else"):
            _shuffle(node.get(key, []), rng)
        for handler in node.get("handlers", []):
            _shuffle(handler["body"], rng)


class FailureError(Exception):
    """A node failed and no surrounding node has handled it; the message is its code."""


@dataclass
class Reading:
    """The expected variables of a program, instance by instance."""

    observed: Mapping[str, Json]
    """Values from the server, by name, for variables that cannot be predicted."""
    killed: Collection[str] = ()
    """Nodes that the server killed: they need not fail, even if they would have later."""
    values: dict[str, Json] = field(default_factory=dict)
    open: set[str] = field(default_factory=set)
    """Variables that may or may not have a value: of losers, killed nodes and failed bodies."""
    unwritten: set[str] = field(default_factory=set)
    """Variables of nodes that would have failed, and were killed before."""
    never: set[str] = field(default_factory=set)
    """Nodes that must not have started."""
    readers: dict[str, set[tuple[str, ...]]] = field(default_factory=dict)
    """The paths of the nodes that read each variable."""
    bodies: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The path of the node in whose body each variable is."""
    path: tuple[str, ...] = ()
    """The current node, after the nodes around it."""
    depth: int = 0
    """Nesting depth of `try`."""

    def expected(self) -> set[str]:
        """Return the variables that have a value, unless they are `open` or their readers ended."""
        return self.values.keys() | self.unwritten

    def run(self, nodes: list[Json], scope: dict[str, Json], suffix: str) -> None:
        """Interpret nodes in order; their outputs are added to `scope`.

        Raises:
            FailureError: if one fails.
        """
        outside = self.path
        for node in nodes:
            self.path = (*outside, node["id"] + suffix)
            try:
                self._note_reads(node, scope)
                getattr(self, f"_{node['op']}")(node, scope, suffix)
            except (FailureError, ExpressionError):  # the latter where a value is unwritten
                if self.path[-1] not in self.killed:
                    raise
                self._leave_unwritten(node, scope, suffix)
            finally:
                self.path = outside

    def _leave_unwritten(self, node: Json, scope: dict[str, Json], suffix: str) -> None:
        """Bind the names of the node's variables, for their readers, but no values."""
        outputs = [part["output"] for part in (*node.get("prompt", ()), node) if "output" in part]
        for field_name in ("merge", "collect", "carry"):
            outputs += node.get(field_name, ())
        for name in outputs:
            scope[f"#{name}"] = name + suffix
            self.unwritten.add(name + suffix)
            self.bodies[name + suffix] = self.path[:-1]

    def _note_reads(self, node: Json, scope: dict[str, Json]) -> None:
        """Record what a node reads, but not what the nodes in its bodies read."""
        others = ("body", "then", "else", "handlers", "merge", "collect", "carry", "until")
        fields = json.dumps({key: value for key, value in node.items() if key not in others})
        for name in re.findall(r'"(\w+)"', fields):
            if full := scope.get(f"#{name}"):
                self.readers.setdefault(full, set()).add(self.path)

    def _set(self, name: str, value: Json, scope: dict[str, Json], suffix: str) -> None:
        scope[name], scope[f"#{name}"] = value, name + suffix
        self.values[name + suffix] = value
        is_of_round = suffix.count(".") > self.path[-1].count(".")
        self.bodies[name + suffix] = self.path if is_of_round else self.path[:-1]

    def _generate(self, node: Json, scope: dict[str, Json], suffix: str) -> None:
        if "when" in node and not self._evaluate(node["when"], scope):
            self.never.add(node["id"] + suffix)
            return
        text = ""
        for segment in node["prompt"]:
            if "text" in segment:
                text += segment["text"]
            elif "input" in segment:
                if segment["input"] not in scope:
                    self.never.add(node["id"] + suffix)
                    return
                value = scope[segment["input"]]
                text += (
                    value
                    if isinstance(value, str)
                    else str(self._evaluate({"json": {"lit": value}}, scope))
                )
            else:
                self._set(segment["output"], answer(text)[: segment["max_tokens"]], scope, suffix)

    def _evaluate(self, expression: Json, scope: dict[str, Json]) -> Json:
        return evaluate(expression, scope)

    def _expr(self, node: Json, scope: dict[str, Json], suffix: str) -> None:
        if "when" in node and not self._evaluate(node["when"], scope):
            return
        try:
            value = self._evaluate(node["expr"], scope)
        except ExpressionError as error:
            if error.code == "variable.absent":
                return
            raise FailureError(error.code) from error
        self._set(node["output"], value, scope, suffix)

    def _wait(self, node: Json, scope: dict[str, Json], suffix: str) -> None:
        """Interpret a race; the winner is the one that the server reported."""

    def _kill(self, node: Json, scope: dict[str, Json], suffix: str) -> None:
        for name in node["targets"]:
            self.open.add(name + suffix)
            if name + suffix not in self.observed:
                scope.pop(name, None)

    def _map(self, node: Json, scope: dict[str, Json], suffix: str) -> None:
        items = node["items"]
        listed = self._evaluate(var(items) if isinstance(items, str) else items, scope)
        ((outer, inner),) = node["collect"].items()
        found: list[Json] = []
        failures: list[FailureError] = []
        assert isinstance(listed, list)
        for index, item in enumerate(listed):
            within = {**scope, node["as"]: item, node["index"]: index}
            before = self.expected()
            try:
                self.run(node["body"], within, f"{suffix}.{index}")
                self._note_reads({"id": node["id"], "output": inner}, within)
                found.append(within.get(inner))
            except FailureError as failure:
                if node["fail"] == "any":
                    raise
                failures.append(failure)
                found.append(None)
                self.open |= self.expected() - before
        if failures and len(failures) == len(listed):
            raise failures[0]
        self._set(outer, found, scope, suffix)

    def _if(self, node: Json, scope: dict[str, Json], suffix: str) -> None:
        taken, other = ("then", "else") if self._evaluate(node["cond"], scope) else ("else", "then")
        self.never |= {each["id"] + suffix for each in node[other]}
        within = dict(scope)
        self.run(node[taken], within, suffix)
        ((outer, sides),) = node["merge"].items()
        inner = sides[taken == "else"]
        self._note_reads({"id": node["id"], "output": inner}, within)
        if inner in within:
            self._set(outer, within[inner], scope, suffix)

    def _loop(self, node: Json, scope: dict[str, Json], suffix: str) -> None:
        ((name, (init, following)),) = node["carry"].items()
        count = node.get("count")
        value = self._evaluate(init, scope)
        self._note_reads({"id": node["id"], "output": init}, scope)
        self._set(name, value, {}, f"{suffix}.0")
        index = 0
        while index != count:
            if index == node["max_iter"]:
                raise FailureError("loop.exhausted")
            within = {**scope, name: value, node["index"]: index}
            self.run(node["body"], within, f"{suffix}.{index}")
            ends = {"id": node["id"], "output": [following, node["until"]]}
            self._note_reads(ends, within)
            is_over = self._evaluate(node["until"], within)
            value = self._evaluate(following, within)
            index += 1
            self._set(name, value, {}, f"{suffix}.{index}")
            if is_over:
                break
        self._set(name, value, scope, suffix)

    def _try(self, node: Json, scope: dict[str, Json], suffix: str) -> None:
        self.depth += 1
        try:
            self._attempts(node, scope, suffix)
        finally:
            self.depth -= 1

    def _attempts(self, node: Json, scope: dict[str, Json], suffix: str) -> None:
        ((outer, sides),) = node["merge"].items()
        for attempt in range(node["retries"] + 1):
            within = dict(scope)
            inside = f"{suffix}.{'r' * self.depth}{attempt}" if attempt else suffix
            before = self.expected()
            try:
                self.run(node["body"], within, inside)
            except FailureError as failure:
                self.open |= self.expected() - before
                is_last = attempt == node["retries"]
                if is_last and str(failure) not in node["handlers"][0]["codes"]:
                    raise
                continue
            self.never |= {each["id"] + suffix for each in node["handlers"][0]["body"]}
            inner = sides[0]
            break
        else:
            within = dict(scope)
            self.run(node["handlers"][0]["body"], within, suffix)
            inner = sides[1]
        self._note_reads({"id": node["id"], "output": inner}, within)
        if inner in within:
            self._set(outer, within[inner], scope, suffix)
