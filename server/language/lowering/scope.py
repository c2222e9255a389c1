"""The names in a text, and their meaning at one point of the text.

Each assignment to a name creates a new *version*, because a semantic variable has one value. At a
point of the text, a name means the version of the last assignment before that point. The variables
of a job are visible in the whole program: a name that only a later job assigns means the variable
of that job.

Out of scope: nodes. `blocks` merges the versions of branches.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from ...program.checks import MAX_NAME, is_name
from ...program.suggestion import suggestion
from ..errors import Place, SourceNameError
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
    """The nodes of the job and of the jobs in it, outside of bodies."""


class FunctionSource(NamedTuple):
    """A `def` of the text."""

    definition: ast.FunctionDef
    scope: NameScope
    """The names at the `def`, in which defaults and options of outputs are evaluated."""


Binding: TypeAlias = Value | Unassigned | JobHandle | FunctionSource


class NameUses:
    """The assignments of names in the main program of a text."""

    def __init__(self, body: list[ast.stmt]) -> None:
        self.assigned: dict[str, int] = {}
        """Number of top-level statements, inside and outside of jobs, that assign each name."""
        self._in_jobs: set[str] = set()
        """Names that jobs of the main program assign."""
        self.jobs: set[str] = set()
        """The names of jobs of the main program: `name` in `with job() as name`."""
        self._collect(body, is_in_job=False)
        self.returned = _returned_names(body)
        """Names that `return` gives to values other than the variables of these names."""
        self.forward = {name for name in self._in_jobs - self.returned if self.assigned[name] == 1}
        """Names that mean the variable of a later job before their assignment."""
        self.num_versions = {
            name: self.assigned.get(name, 0) + (name in self.returned)
            for name in (*self.assigned, *self.returned)
        }
        """How many versions names get in the main program. An estimate until `recount`: a statement
        that assigns a name in its blocks may make no version, and the statements that a jump moves
        into a branch make one together."""

    def recount(self, made: Mapping[str, int]) -> bool:
        """Set the numbers of versions to those that were made; return whether one was wrong."""
        wrong = {
            name: number
            for name, number in made.items()
            if self.num_versions.get(name, number) != number
        }
        self.num_versions |= wrong
        return bool(wrong)

    def _collect(self, statements: list[ast.stmt], *, is_in_job: bool) -> None:
        for statement in statements:
            if type(statement) is ast.With:
                for item in statement.items:
                    if isinstance(item.optional_vars, ast.Name):
                        self.jobs.add(item.optional_vars.id)
                self._collect(statement.body, is_in_job=True)
                continue
            for name in assigned_names([statement]):
                self.assigned[name] = self.assigned.get(name, 0) + 1
                if is_in_job:
                    self._in_jobs.add(name)


def _returned_names(body: list[ast.stmt]) -> set[str]:
    """Return the keys of the dicts that a program returns, if they need their own variables.

    `{"name": name}` is the variable itself. Dicts with different keys become one result.
    """
    dicts: list[dict[str, ast.expr]] = []
    stack = list(body)
    while stack:
        match stack.pop():
            case ast.Return(value=ast.Dict(keys=keys, values=values)):
                pairs = zip(keys, values, strict=True)
                dicts.append({_text_of(key): value for key, value in pairs})
            case ast.Return():
                return set()
            case ast.If(body=then, orelse=otherwise):
                stack += [*then, *otherwise]
            case _:
                pass
    if any(each.keys() != dicts[0].keys() for each in dicts):
        return set()
    return {
        key
        for each in dicts
        for key, value in each.items()
        if is_name(key) and not (isinstance(value, ast.Name) and value.id == key)
    }


def _text_of(key: ast.expr | None) -> str:
    """Return a literal key; an empty text for any other."""
    return key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else ""


def _appended_name(node: ast.Expr) -> list[ast.AST]:
    """Return the name of `name.append(...)`."""
    match node.value:
        case ast.Call(func=ast.Attribute(ast.Name() as target, "append")):
            return [target]
        case _:
            return []


def _parts_of_with(node: ast.With) -> list[ast.AST]:
    targets = [each.optional_vars for each in node.items if each.optional_vars is not None]
    return [*targets, *node.body]


_ASSIGNING_PARTS: Final[dict[type[ast.AST], Callable[[Any], list[ast.AST]]]] = {
    ast.Assign: lambda node: node.targets,
    ast.Tuple: lambda node: node.elts,
    ast.List: lambda node: node.elts,
    ast.AugAssign: lambda node: [node.target],
    ast.AnnAssign: lambda node: [node.target],
    ast.Expr: _appended_name,
    ast.If: lambda node: [*node.body, *node.orelse],
    ast.For: lambda node: [node.target, *node.body, *node.orelse],
    ast.With: _parts_of_with,
    ast.Try: lambda node: [*node.body, *(each for one in node.handlers for each in one.body)],
}
"""The parts of statements and targets that assign names. A table, because a `match` would compare
the type of each statement of a text with all of these."""


def assigned_names(statements: Iterable[ast.stmt]) -> set[str]:
    """Return the names that statements assign, except inside function definitions."""
    names: set[str] = set()
    stack: list[ast.AST] = list(statements)
    while stack:
        node = stack.pop()
        if type(node) is ast.Name:
            names.add(node.id)
            continue
        parts_of = _ASSIGNING_PARTS.get(type(node))
        if parts_of is not None:
            stack += parts_of(node)
    return names


def _is_variable_name(name: str) -> bool:
    """Whether a name of the text can name a variable: all names in ASCII that are not too long."""
    return len(name) <= MAX_NAME if name.isascii() else is_name(name)


class NameScope:
    """The names at one point of the text: of the main program, or of one inlined function."""

    __slots__ = (
        "_forward", "_has_result", "_is_branch", "_num_versions", "_outer", "_uses", "bindings",
        "emitter", "has_outputs", "inputs", "is_local", "result_hint", "yielded",
    )  # fmt: skip

    def __init__(
        self,
        emitter: Emitter,
        uses: NameUses | None = None,
        outer: NameScope | None = None,
        bindings: Mapping[str, Binding] | None = None,
    ) -> None:
        self.emitter = emitter
        self.bindings: dict[str, Binding] = {} if bindings is None else dict(bindings)
        """The names that were bound in this scope, in order. Read only: `bind` changes them."""
        self.result_hint: str | None = None
        """In a function: the variable that its result may get."""
        self.is_local = False
        """Whether functions do not see the names of this scope: in a function or comprehension."""
        self.has_outputs = uses is not None
        """Whether the names that `yield` reads here are outputs of the program: in the main
        program and in the branches of its `if`s."""
        self.yielded: dict[str, str] = {}
        """In a branch with outputs: the names that `yield` reads, to their variables."""
        self._is_branch = False
        self._uses = uses
        """The assignments of the main program; None in a branch or a function."""
        self._outer = outer
        """The scope around a branch, or the main program of a function, where a name is looked up
        that has no binding here. It does not change as long as this scope is in use."""
        self._has_result = False
        """Whether the name `result` is kept for what the main program returns."""
        self.inputs: set[str] = set()
        self._num_versions: dict[str, int] = {}
        self._forward: dict[str, str] = {}
        """Names that were read before their assignment, to the job that read them."""
        if uses is not None:
            emitter.reserve(*uses.assigned, *uses.returned)

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
        while scope.is_local and scope._outer is not None:
            scope = scope._outer
        inner = NameScope(self.emitter, None, scope, bindings)
        inner.is_local = True
        return inner

    # --- reading --------------------------------------------------------------------------

    def find(self, name: str) -> Binding | None:
        """Return what a name means here; None if it is unknown."""
        scope = self
        while True:
            found = scope.bindings.get(name)
            if found is not None:
                return found
            if scope._uses is not None and name in scope._uses.forward:
                scope._forward.setdefault(name, self.emitter.flow.job)
                return var(name)
            if scope._outer is None:
                return PREDEFINED.get(name)
            scope = scope._outer

    def bound(self, name: str) -> Binding | None:
        """Return what a name was bound to here or, in a branch, in the scopes around it.

        None if it is not bound, or bound only outside the function.
        """
        scope = self
        while True:
            found = scope.bindings.get(name)
            if found is not None or not scope._is_branch or scope._outer is None:
                return found
            scope = scope._outer

    def is_input(self, variable: str | None) -> bool:
        """Whether a variable is an input of the program."""
        scope: NameScope | None = self
        while scope is not None and variable not in scope.inputs:
            scope = scope._outer
        return scope is not None

    def is_assigned(self, name: str) -> bool:
        """Whether a name has a meaning here, or gets one later in the text."""
        if self.find(name) is not None:
            return True
        uses = self._main_uses()
        return uses is not None and name in uses.assigned

    def _main_uses(self) -> NameUses | None:
        scope: NameScope | None = self
        while scope is not None and scope._uses is None:
            scope = scope._outer
        return None if scope is None else scope._uses

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
                raise SourceNameError("language.maybe_unassigned", f"`{node.id}` {reason}", node)
            case FunctionSource():
                reason = f"`{node.id}` is a function: call it, as {node.id}(...)"
            case JobHandle():
                reason = f"`{node.id}` is a job: it has no value; write `{node.id}.kill()` or wait"
            case None:
                reason = f"`{node.id}` is not defined: {self._hint_for_unknown(node.id)}"
        raise SourceNameError("language.undefined_name", reason, node)

    def _hint_for_unknown(self, name: str) -> str:
        """Return advice for the author of a text that reads an undefined name."""
        uses = self._main_uses()
        if uses is not None and name in uses.jobs:
            return (
                f"the job is defined further down: `{name}.kill()` and `wait {name}` must stand "
                "below it"
            )
        if self._uses is not None and name in self._uses.assigned:
            return "it is assigned only later: move the assignment up"
        hint = f"assign it, or declare it as an input: `{name}: str`"
        similar = suggestion(name, self.known_names())
        return f"{similar} Otherwise {hint}" if similar else hint

    def known_names(self) -> list[str]:
        """Return the names that have a meaning here."""
        known = [name for name in self.bindings if not name.startswith("%")]
        return known if self._outer is None else known + self._outer.known_names()

    # --- assigning ------------------------------------------------------------------------

    def bind(self, name: str, binding: Binding) -> None:
        """Set the meaning of a name from this point of the text on."""
        self.bindings[name] = binding

    def reserve_result(self) -> None:
        """Keep the name `result` for what the main program returns, unless the author uses it."""
        if "result" not in self.inputs and self._uses is not None:
            self._has_result = "result" not in self._uses.assigned
            if self._has_result:
                self.emitter.reserve("result")

    @property
    def result_name(self) -> str | None:
        """The name that is kept for what the main program returns, if it is free."""
        return "result" if self._has_result and "result" not in self.emitter.node_ids else None

    def result_variable(self) -> str:
        """Create the variable of a returned value, and return it."""
        name = self.result_name
        self._has_result = False
        if self._uses is not None and "result" in self._uses.forward:
            return self.emitter.unique("result")  # a job reads the author's `result` before
        return name or self.version("result")

    def version(self, name: str) -> str:
        """Create a version of a name, and return its variable.

        The variable of the last version in the main program, outside of bodies, has the same name.
        """
        own = self._last_version(name)
        self._num_versions[name] = self._num_versions.get(name, 0) + 1
        if own is not None:
            return own
        return self.emitter.unique(name)

    def _last_version(self, name: str) -> str | None:
        """Return the name itself if its next version is the last one in the main program."""
        if self._uses is None or name in self.inputs:
            return None
        is_last = self._num_versions.get(name, 0) + 1 == self._uses.num_versions.get(name)
        return name if is_last and _is_variable_name(name) else None

    def recount_versions(self) -> bool:
        """Correct the estimated numbers of versions; return whether one of them was wrong."""
        assert self._uses is not None
        made = self._num_versions.items()
        return self._uses.recount({name: n for name, n in made if name not in self.inputs})

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
        if value.is_inline and name not in self._forward:
            own = variable or self._last_version(name)
            if not self._needs_own(value, own):
                if variable is None:
                    self._num_versions[name] = self._num_versions.get(name, 0) + 1
                self.bind(name, value)
                return
        variable = variable or self.version(name)
        self.emitter.expr(value.expression, variable, is_named=True)
        definition = value.expression if value.definition is None else value.definition
        self.bind(name, Value({"var": variable}, value.kind, definition, value.is_answer))

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

    def check_forward(self, name: str, job: str, place: Place) -> None:
        """Reject an assignment in a job that has read the name before.

        Raises:
            SourceNameError: `language.undefined_name`.
        """
        if self._forward.get(name) == job:
            raise SourceNameError(
                "language.undefined_name", f"`{name}` is read before it is assigned", place
            )

    def snapshot(self) -> NameScope:
        """Return a scope for reading, which later assignments do not change."""
        copy = NameScope(self.emitter, None, self._outer, self.bindings)
        copy.is_local = self.is_local
        copy._is_branch = self._is_branch
        return copy

    # --- branches -------------------------------------------------------------------------

    def branch(self, *, has_outputs: bool = False, is_local: bool = False) -> NameScope:
        """Return a scope for one branch, body or round; `blocks` merges what it assigns.

        Args:
            has_outputs: what `yield` reads in it is an output, if that is so in this scope.
            is_local: functions do not see its names, as those of a comprehension.
        """
        inner = NameScope(self.emitter, None, self)
        inner.has_outputs = has_outputs and self.has_outputs
        inner.is_local = is_local or self.is_local
        inner._is_branch = True
        inner._forward = self._forward
        return inner
