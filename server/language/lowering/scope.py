"""The names in a text, and their meaning at one point of the text.

Each assignment to a name creates a new *version*, because a semantic variable has one value. At a
point of the text, a name means the version of the last assignment before that point. The variables
of a job are visible in the whole program: a name that only a later job assigns means the variable
of that job.

Out of scope: nodes. `blocks` merges the versions of branches.
"""

from __future__ import annotations

import ast
import difflib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

from ...program.checks import is_name
from ..errors import Position, SourceNameError, position_of
from ..options import Kind
from .emitter import Emitter
from .values import Value, var

BREAK = "%break"
"""An internal name, which no text can contain: whether the loop ends after this round."""
RETURN = "%return"
"""An internal name, which no text can contain: the value that the function returns."""

PREDEFINED = {"model_name": Value("default", "text")}
"""`model_name` is the server's default model unless the text assigns it."""


class Unassigned(NamedTuple):
    """A name that may have no value at this point."""

    reason: str


class JobHandle(NamedTuple):
    """The name of `with job() as name`."""

    job: str
    nodes: tuple[str, ...]
    """The nodes of the job, outside of bodies."""


class FunctionSource(NamedTuple):
    """A `def` of the text."""

    definition: ast.FunctionDef


Binding: TypeAlias = Value | Unassigned | JobHandle | FunctionSource


class NameUses:
    """The assignments of names in the main program of a text."""

    def __init__(self, body: list[ast.stmt]) -> None:
        self.assigned: Counter[str] = Counter()
        """Number of top-level statements, inside and outside of jobs, that assign each name."""
        self.in_jobs: Counter[str] = Counter()
        """Number of these statements that are in jobs."""
        self._collect(body, is_in_job=False)

    def _collect(self, statements: list[ast.stmt], *, is_in_job: bool) -> None:
        for statement in statements:
            if isinstance(statement, ast.With):
                self._collect(statement.body, is_in_job=True)
                continue
            names = assigned_names([statement])
            self.assigned.update(names)
            if is_in_job:
                self.in_jobs.update(names)

    def is_forward(self, name: str) -> bool:
        """Whether a name that is not assigned yet means the variable of a later job."""
        return self.assigned[name] == 1 and self.in_jobs[name] == 1


def assigned_names(statements: Iterable[ast.stmt]) -> set[str]:
    """Return the names that statements assign, except inside function definitions."""
    names: set[str] = set()
    stack: list[ast.AST] = list(statements)
    while stack:
        node = stack.pop()
        match node:
            case ast.Name(id=name):
                names.add(name)
            case ast.Assign(targets=targets) | ast.Tuple(elts=targets) | ast.List(elts=targets):
                stack += targets
            case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
                stack.append(target)
            case ast.Expr(value=ast.Call(func=ast.Attribute(ast.Name(name), "append"))):
                names.add(name)
            case ast.If(body=body, orelse=otherwise):
                stack += [*body, *otherwise]
            case ast.For(target=target, body=body, orelse=otherwise):
                stack += [target, *body, *otherwise]
            case ast.With(items=items, body=body):
                stack += [each.optional_vars for each in items if each.optional_vars is not None]
                stack += body
            case ast.Try(body=body, handlers=handlers):
                stack += [*body, *(each for handler in handlers for each in handler.body)]
            case _:
                pass
    return names


class NameScope:
    """The names at one point of the text: of the main program, or of one inlined function."""

    def __init__(
        self,
        emitter: Emitter,
        uses: NameUses | None = None,
        outer: NameScope | None = None,
        bindings: Mapping[str, Binding] | None = None,
    ) -> None:
        self.emitter = emitter
        self.bindings: dict[str, Binding] = dict(bindings or {})
        """The meaning of each name. Changed only by `bind`."""
        self.changed: dict[str, None] = {}
        """The names that were bound in this scope, in order, as keys."""
        self.result_hint: str | None = None
        """In a function: the variable that its result may get."""
        self.is_function = False
        self._uses = uses
        """The assignments of the main program; None in a branch or a function."""
        self._outer = outer
        """The scope in which names are looked up that have no binding here."""
        self.inputs: set[str] = set()
        self._num_versions: Counter[str] = Counter()
        self._forward: dict[str, str] = {}
        """The job that read each name that was read before its assignment."""
        for name in uses.assigned if uses is not None else ():
            emitter.reserve(name)

    @property
    def is_main(self) -> bool:
        """Whether this is the main program outside of branches."""
        return self._uses is not None

    def declare_input(self, name: str, kind: Kind) -> None:
        """Make a name an input of the program."""
        self.inputs.add(name)
        self.emitter.reserve(name)
        self.bind(name, var(name, kind))

    def function(self, bindings: Mapping[str, Binding]) -> NameScope:
        """Return the scope of a function that is called here: inside that of the main program."""
        scope = self
        while scope.is_function and scope._outer is not None:
            scope = scope._outer
        inner = NameScope(self.emitter, None, scope, bindings)
        inner.is_function = True
        return inner

    # --- reading --------------------------------------------------------------------------

    def find(self, name: str) -> Binding | None:
        """Return what a name means here; None if it is unknown."""
        found = self.bindings.get(name)
        if found is None and self._uses is not None and self._uses.is_forward(name):
            self._forward.setdefault(name, self.emitter.flow.job)
            return var(name)
        if found is None and self._outer is not None:
            return self._outer.find(name)
        return PREDEFINED.get(name) if found is None else found

    def is_assigned(self, name: str) -> bool:
        """Whether a name has a meaning here, or gets one later in the text."""
        if self.find(name) is not None:
            return True
        scope: NameScope | None = self
        while scope is not None and scope._uses is None:
            scope = scope._outer
        return scope is not None and scope._uses is not None and name in scope._uses.assigned

    def read(self, node: ast.Name) -> Value:
        """Return the value of a name.

        Raises:
            SourceNameError: `language.undefined_name` or `language.maybe_unassigned`.
        """
        found = self.find(node.id)
        match found:
            case Value():
                return found
            case Unassigned(reason):
                raise SourceNameError(
                    "language.maybe_unassigned", f"`{node.id}` {reason}", position_of(node)
                )
            case FunctionSource():
                reason = f"`{node.id}` is a function: call it, as {node.id}(...)"
            case JobHandle():
                reason = f"`{node.id}` is a job: it has no value; write `{node.id}.kill()` or wait"
            case None:
                reason = f"`{node.id}` is not defined: {self._hint_for_unknown(node.id)}"
        raise SourceNameError("language.undefined_name", reason, position_of(node))

    def _hint_for_unknown(self, name: str) -> str:
        """Return advice for the author of a text that reads an undefined name."""
        if self._uses is not None and name in self._uses.assigned:
            return "it is assigned only later: move the assignment up"
        hint = f"assign it, or declare it as an input: `{name}: str`"
        similar = difflib.get_close_matches(name, self.known_names(), n=1)
        return f"did you mean `{similar[0]}`? Otherwise {hint}" if similar else hint

    def known_names(self) -> list[str]:
        """Return the names that have a meaning here."""
        known = [name for name in self.bindings if not name.startswith("%")]
        return known if self._outer is None else known + self._outer.known_names()

    # --- assigning ------------------------------------------------------------------------

    def bind(self, name: str, binding: Binding) -> None:
        """Set the meaning of a name from this point of the text on."""
        self.bindings[name] = binding
        self.changed[name] = None

    def version(self, name: str) -> str:
        """Create a version of a name, and return its variable.

        The variable of the last version in the main program, outside of bodies, has the same name.
        """
        if self._uses is not None and name in self._uses.assigned and name not in self.inputs:
            self._num_versions[name] += 1
            if self._num_versions[name] == self._uses.assigned[name] and is_name(name):
                return name
        return self.emitter.unique(name)

    def assign(self, name: str, value: Value, variable: str | None = None) -> None:
        """Assign a value to a name.

        Args:
            name: the name.
            value: the value.
            variable: the variable of the name's new version, if `version` has created it already.
        """
        if value.variable is not None and value.variable == variable:
            self.bind(name, value)
            return
        can_share = name not in self._forward and not self._needs_own(value, variable)
        if value.is_inline and can_share:
            if variable is None:
                self._num_versions[name] += 1
            self.bind(name, value)
            return
        variable = variable or self.version(name)
        made = self.emitter.expr(value.expression, variable, value.kind, is_named=True)
        definition = value.expression if value.definition is None else value.definition
        self.bind(name, made._replace(definition=definition))

    def _needs_own(self, value: Value, variable: str | None) -> bool:
        """Whether a value is copied to the new variable although it has a variable already.

        True if the author chose the name of the new variable, and the compiler generated the name
        of the existing one: the result then has the author's name.
        """
        if self._uses is None or variable not in self._uses.assigned or value.kind == "stream":
            return False
        return (
            value.variable is not None
            and value.variable not in self._uses.assigned
            and value.variable not in self.inputs
        )

    def check_forward(self, name: str, job: str, position: Position) -> None:
        """Reject an assignment in a job that has read the name before.

        Raises:
            SourceNameError: `language.undefined_name`.
        """
        if self._forward.get(name) == job:
            raise SourceNameError(
                "language.undefined_name", f"`{name}` is read before it is assigned", position
            )

    # --- branches -------------------------------------------------------------------------

    def branch(self) -> NameScope:
        """Return a scope for one branch, body or round; `blocks` merges what it assigns."""
        inner = NameScope(self.emitter, None, self, self.bindings)
        inner.is_function = self.is_function
        inner._forward = self._forward
        return inner
