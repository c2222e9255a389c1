"""What the modules of the compiler offer each other."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ...program.content import Expression, Json
from .blocks import LoopReads
from .emitter import Emitter
from .scope import FunctionSource, NameScope
from .values import Value

Signatures = Mapping[str, Sequence[str]]
"""The functions of a server: their names to the names of their parameters."""


class Inliner(Protocol):
    """Inserts the body of a function of the text."""

    def __call__(
        self, source: FunctionSource, node: ast.Call, scope: NameScope, hint: str | None
    ) -> Value:
        """Return the value of a call."""
        ...


class Lowerer(Protocol):
    """Lowers expressions, and the calls in them."""

    emitter: Emitter
    signatures: Signatures | None
    """The functions that exist; None: unknown, any function may exist."""
    is_pure: int
    """Positive where no node can be made."""

    def lower(self, node: ast.expr, scope: NameScope, hint: str | None = None) -> Value:
        """Return the value of an expression."""
        ...

    def constant(self, node: ast.expr, scope: NameScope, what: str) -> Json:
        """Return the value of an expression that must be known when the text is compiled."""
        ...

    def text(self, node: ast.expr, scope: NameScope) -> Expression:
        """Return an expression for the text of a value."""
        ...

    @property
    def inline(self) -> Inliner:
        """Return what inserts the functions of the text."""
        ...


class StatementRunner(Protocol):
    """Compiles statements."""

    emitter: Emitter
    reads: LoopReads

    @property
    def expressions(self) -> Lowerer:
        """Return what lowers expressions."""
        ...

    def run(self, statements: list[ast.stmt], scope: NameScope) -> None:
        """Lower statements in order."""
        ...

    def emit_yield(self, value: Value, mode: Any) -> None:
        """Add a `yield` node at this point."""
        ...
