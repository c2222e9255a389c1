"""Creation of nodes: unique names, the block that a node belongs to, and its place in the order.

A *flow* is the control flow of one job within one block. It records the nodes after which a call
runs (`barriers`), and those after which a `yield` or `kill` runs, too (`last_effects`).

Invariants: names are unique in the program, and at most MAX_COMPILED_NODES nodes are made.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from ...program.content import Expression, Json
from ...program.ir import ExprNode, Job, Node
from ..errors import Place, Position, SourceTooLargeError
from .values import Value

MAX_COMPILED_NODES = 10_000
MAX_LOWERED = 40_000
"""The most expressions that are lowered. Those of an inlined function count once per call, repeated
ones once per repetition."""
MAX_COMPILED_CHARACTERS = 4_194_304
"""Characters of literal texts that are lowered; inlined functions repeat theirs at every call."""
MAX_AFTER = 1_000
"""Nodes that `after` may list."""
MAX_LAST_NODES = 8
"""More nodes than this are joined by one node before they are listed in `after`."""
MAX_NAME = 100
"""Characters of a name; a number may be appended."""

_NOT_WORD = re.compile(r"\W")
_START = re.compile(r"[A-Za-z_]")


class Flow:
    """The control flow of one job within one block."""

    __slots__ = ("barriers", "has_effects", "has_waits", "job", "last_effects")

    def __init__(self, job: str, barriers: tuple[str, ...], last_effects: tuple[str, ...]) -> None:
        self.job = job
        self.barriers = barriers
        """Nodes that every later node runs after: explicit waits."""
        self.last_effects = last_effects
        """Nodes that the next `yield` or `kill` runs after, besides the barriers."""
        self.has_effects = False
        """Whether the block has a `yield`, `kill` or `wait`."""
        self.has_waits = False
        """Whether the block has a `wait`."""


class Emitter:
    """Creates the nodes of one program."""

    def __init__(self) -> None:
        self.block: list[Node] = []
        """The nodes of the block that is being compiled."""
        self.flow = Flow("main", (), ())
        self.jobs: dict[str, Job] = {}
        self.place: Place = Position(1, 1)
        """The statement that is being compiled."""
        self.priority = 0
        self.depth = 0
        """Bodies around the block."""
        self.bound: set[str] = set()
        """Items, indices and carried variables, which have a value when a body starts."""
        self.outputs: dict[str, None] = {}
        """Variables that `yield` and `return` read outside of bodies."""
        self.has_results = False
        self.node_ids: set[str] = set()
        """The ids of all nodes. A node that writes one variable has the variable's name as id."""
        self._taken: set[str] = set()
        self._next_suffix: dict[str, int] = {}
        self._num_nodes = 0
        self._num_characters = 0
        self._num_lowered = 0

    # --- names ----------------------------------------------------------------------------

    def reserve(self, *names: str) -> None:
        """Keep names for inputs or variables of the main program."""
        self._taken.update(names)

    def unique(self, hint: str) -> str:
        """Return a new name of a variable, a node or a job."""
        base = hint[:MAX_NAME]
        if not (base.isascii() and base.isidentifier()):
            base = _NOT_WORD.sub("_", base)
            if not _START.match(base):
                base = f"v_{base}"
        name = base
        while name in self._taken:
            number = self._next_suffix.get(base, 2)
            self._next_suffix[base] = number + 1
            name = f"{base}_{number}"
        self._taken.add(name)
        return name

    # --- nodes ----------------------------------------------------------------------------

    def add(self, node: Node) -> None:
        """Append a node to the block.

        Raises:
            SourceTooLargeError: `language.too_large`.
        """
        self._num_nodes += 1
        if self._num_nodes > MAX_COMPILED_NODES:
            self._refuse(f"more than {MAX_COMPILED_NODES:,} nodes: call fewer functions")
        self.block.append(node)
        self.node_ids.add(node.id)

    def count_work(self) -> None:
        """Count the lowering of one expression.

        Raises:
            SourceTooLargeError: `language.too_large`.
        """
        self._num_lowered += 1
        if self._num_lowered > MAX_LOWERED:
            advice = "call fewer functions, or assign parts of expressions to names"
            self._refuse(f"more than {MAX_LOWERED:,} expressions: {advice}")

    def count_repetition(self, expression: Expression) -> None:
        """Count an expression that is used a second time, with all its parts.

        Raises:
            SourceTooLargeError: `language.too_large`.
        """
        for _ in _parts(expression):
            self.count_work()
        self.count_texts(expression)

    def count_texts(self, value: Json) -> None:
        """Count the texts in a constant, keys included.

        Raises:
            SourceTooLargeError: `language.too_large`.
        """
        self.count_text(sum(len(part) for part in _parts(value) if isinstance(part, str)))

    def count_text(self, length: int) -> None:
        """Count literal text of nodes.

        Raises:
            SourceTooLargeError: `language.too_large`.
        """
        self._num_characters += length
        if self._num_characters > MAX_COMPILED_CHARACTERS:
            self._refuse("more than 4 MiB of text: assign repeated text to a name")

    def _refuse(self, what: str) -> NoReturn:
        message = f"the program would have {what}"
        raise SourceTooLargeError("language.too_large", message, self.place)

    def common(self, *, is_ordered: bool = False) -> dict[str, Any]:
        """Return the fields `job`, `after`, `priority` and `meta` of a node at this point.

        Args:
            is_ordered: the node is a `yield` or `kill`.
        """
        flow = self.flow
        fields: dict[str, Any] = {"meta": {"line": self.place.lineno}}
        if flow.job != "main":
            fields["job"] = flow.job
        after = flow.barriers + flow.last_effects if is_ordered else flow.barriers
        if after:
            fields["after"] = list(dict.fromkeys(after))
        if self.priority:
            fields["priority"] = self.priority
        return fields

    def mark_ordered(self, node_id: str) -> None:
        """Order later `yield`s and `kill`s after a `yield` or `kill`."""
        self.flow.last_effects = (node_id,)
        self.flow.has_effects = True

    def mark_wait(self, node_id: str) -> None:
        """Run all later nodes of the flow after a `wait`."""
        flow = self.flow
        flow.barriers = (node_id,)
        flow.last_effects = self._joined_if_many((*flow.last_effects, node_id))
        flow.has_effects = flow.has_waits = True

    def mark_control(self, node_id: str, bodies: list[Flow]) -> None:
        """Order later nodes after a node whose bodies have `yield`s, `kill`s or `wait`s."""
        flow = self.flow
        if any(body.has_effects for body in bodies):
            flow.has_effects = True
            flow.last_effects = self._joined_if_many((*flow.last_effects, node_id))
        if any(body.has_waits for body in bodies):
            flow.has_waits = True
            flow.barriers = self._joined_if_many((*flow.barriers, node_id))

    def _joined_if_many(self, nodes: tuple[str, ...]) -> tuple[str, ...]:
        """Return nodes that `after` will list, or the one node that joins them."""
        return (self.joined(nodes),) if len(nodes) > MAX_LAST_NODES else nodes

    def joined(self, nodes: tuple[str, ...]) -> str:
        """Add a node that ends after other nodes have ended."""
        while len(nodes) > MAX_AFTER:
            parts = (nodes[i : i + MAX_AFTER] for i in range(0, len(nodes), MAX_AFTER))
            nodes = tuple(self._join(part) for part in parts)
        return self._join(nodes)

    def _join(self, nodes: tuple[str, ...]) -> str:
        name = self.unique("join")
        fields: dict[str, Any] = {**self.common(), "after": list(nodes)}
        self.add(ExprNode(id=name, expr=None, output=name, **fields))
        return name

    def expr(self, expression: Expression, hint: str, *, is_named: bool = False) -> str:
        """Add a node that computes an expression, and return its variable.

        Args:
            expression: what to compute.
            hint: the name of the variable, if it is free.
            is_named: `hint` is a name that `unique` or `reserve` made.
        """
        name = hint if is_named else self.unique(hint)
        fields = self.common()
        self.add(ExprNode(id=name, expr=expression, output=name, **fields))
        return name

    def absent(self, hint: str) -> str:
        """Add a variable that never has a value, and return it."""
        name = self.unique(hint)
        self.add(ExprNode(id=name, expr=None, output=name, when=False, **self.common()))
        return name

    def variable_of(self, value: Value, hint: str) -> str:
        """Return the variable of a value; create one for any other expression."""
        return value.variable or self.expr(value.expression, hint)

    # --- blocks ---------------------------------------------------------------------------

    def body(self, *, is_ordered: bool = True) -> _BodyContext:
        """Compile into a new block, the body of a node; its order continues that of the flow."""
        return _BodyContext(self, is_ordered=is_ordered)

    @contextmanager
    def inside(self, block: list[Node]) -> Iterator[None]:
        """Add more nodes to a block that has been compiled."""
        outer, self.block = self.block, block
        try:
            yield
        finally:
            self.block = outer

    def job(self, name: str, job: Job) -> _JobContext:
        """Compile into a job: an independent control flow that starts at this point."""
        self.jobs[name] = job
        return _JobContext(self, name)

    @contextmanager
    def at(self, node: ast.stmt | ast.expr) -> Iterator[None]:
        """Give nodes the position of a statement."""
        outer, self.place = self.place, node
        try:
            yield
        finally:
            self.place = outer


def _parts(value: Json) -> Iterator[Json]:
    """Iterate over a JSON value and all keys and values in it."""
    stack = [value]
    while stack:
        part = stack.pop()
        yield part
        if isinstance(part, list):
            stack += part
        elif isinstance(part, dict):
            stack += part
            stack += part.values()


# Classes, because every `if` and every job enters such a context: as generators, the contexts take
# 5 % of the compilation of a program of jobs with branches.


class _BodyContext:
    """The context of `Emitter.body`: nodes go into the body of a node."""

    __slots__ = ("_block", "_emitter", "_flow", "_is_ordered")

    def __init__(self, emitter: Emitter, *, is_ordered: bool) -> None:
        self._emitter = emitter
        self._is_ordered = is_ordered

    def __enter__(self) -> tuple[list[Node], Flow]:
        emitter = self._emitter
        self._block, self._flow = emitter.block, emitter.flow
        last_effects = self._flow.last_effects if self._is_ordered else ()
        emitter.block, emitter.flow = [], Flow(self._flow.job, (), last_effects)
        emitter.depth += 1
        return emitter.block, emitter.flow

    def __exit__(self, *_: object) -> None:
        emitter = self._emitter
        emitter.depth -= 1
        emitter.block, emitter.flow = self._block, self._flow


class _JobContext:
    """The context of `Emitter.job`: nodes belong to a job."""

    __slots__ = ("_emitter", "_name", "_outer")

    def __init__(self, emitter: Emitter, name: str) -> None:
        self._emitter = emitter
        self._name = name

    def __enter__(self) -> None:
        self._outer = self._emitter.flow
        self._emitter.flow = Flow(self._name, self._outer.barriers, self._outer.last_effects)

    def __exit__(self, *_: object) -> None:
        inner = self._emitter.flow
        self._emitter.flow = self._outer
        self._outer.has_effects = self._outer.has_effects or inner.has_effects
