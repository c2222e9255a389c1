"""Lowering of statements: assignments, yields, jobs, branches, loops and handlers.

Statements after a branch that ends with `break`, `continue` or `return` move into the other branch:
they run only if the branch was not taken.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from ...program.checks import is_name
from ...program.content import Json
from ...program.expressions.evaluate import variables
from ...program.ir import IfNode, Job, KillNode, WaitNode, YieldNode
from ..errors import (
    SourceArgumentError,
    SourceNameError,
    UnsupportedSourceError,
    position_of,
)
from ..options import Kind
from ..syntax import JUMPS, always_jumps, can_jump, children, is_decorator
from . import loops
from .blocks import Branch, LoopReads, merge_branches, merge_outputs
from .calls import is_answer_text
from .emitter import Emitter
from .expressions import ExpressionLowerer
from .functions import FunctionInliner
from .interfaces import Signatures
from .scope import BREAK, RETURN, FunctionSource, JobHandle, NameScope
from .values import NULL, Value, var

_NODE_MAKERS: Final[frozenset[type[ast.expr]]] = frozenset({ast.Call, ast.IfExp, ast.ListComp})
"""Expressions that make a node, or may make one."""
_INPUT_KINDS: Final[dict[str, Kind]] = {
    "str": "text",
    "int": "number",
    "float": "number",
    "bool": "bool",
    "list": "list",
    "dict": "object",
}


class StatementLowerer:
    """Lowers the statements of one text."""

    def __init__(self, emitter: Emitter, reads: LoopReads, signatures: Signatures | None) -> None:
        self.emitter = emitter
        self.reads = reads
        self.expressions = ExpressionLowerer(emitter, signatures, self._inline)
        self._inliner = FunctionInliner(self.expressions, self.run)
        self._lowerers: dict[type[ast.stmt], Callable[[Any, NameScope], None]] = {
            ast.Assign: self._assign,
            ast.AugAssign: self._augmented,
            ast.AnnAssign: self._annotated,
            ast.Expr: self._expression,
            ast.For: lambda node, scope: loops.lower_for(self, node, scope),
            ast.With: self._with,
            ast.Try: lambda node, scope: loops.lower_try(self, node, scope),
            ast.FunctionDef: self._define,
            ast.Pass: lambda node, scope: None,
        }

    def _inline(
        self, source: FunctionSource, node: ast.Call, scope: NameScope, hint: str | None
    ) -> Value:
        return self._inliner(source, node, scope, hint)

    def run(self, statements: list[ast.stmt], scope: NameScope) -> None:
        """Lower statements in order.

        Raises:
            LanguageError: at the first statement that is not valid.
        """
        outer = self.emitter.place
        for index, statement in enumerate(statements):
            self.emitter.place = statement
            if type(statement) is ast.If:
                jumps = can_jump(statement)
                self._branch(statement, scope, statements[index + 1 :] if jumps else [])
                if jumps:
                    break
            elif type(statement) in JUMPS:
                if statement is not statements[-1]:
                    message = "the statements after this one never run: remove them"
                    raise UnsupportedSourceError(message, position_of(statements[index + 1]))
                self._jump(statement, scope)
            else:
                self._lower(statement, scope)
        self.emitter.place = outer

    def _lower(self, statement: ast.stmt, scope: NameScope) -> None:
        lowerer = self._lowerers.get(type(statement))
        if lowerer is None:
            message = f"`{type(statement).__name__}` is not a statement of the language"
            raise UnsupportedSourceError(message, position_of(statement))
        lowerer(statement, scope)

    # --- branches -------------------------------------------------------------------------

    def _branch(self, node: ast.If, scope: NameScope, rest: list[ast.stmt]) -> None:
        """Lower an `if`, and the statements that run only if it does not jump."""
        then = node.body if always_jumps(node.body) else [*node.body, *rest]
        otherwise = node.orelse if always_jumps(node.orelse) else [*node.orelse, *rest]
        emitter = self.emitter
        test = self.expressions.lower(node.test, scope)
        branches = []
        for statements in (then, otherwise):
            with emitter.body() as (block, flow):
                inner = scope.branch(has_outputs=True)
                self.run(statements, inner)
            branches.append(Branch(block, flow, inner))
        needed = partial(self.reads.outside, [node, *rest])
        merges = merge_branches(emitter, scope, branches, needed, "`if`")
        merge_outputs(emitter, scope, branches, merges)
        name = emitter.unique("branch")
        emitter.add(
            IfNode(
                id=name,
                cond=test.reference,
                then=branches[0].block,
                otherwise=branches[1].block,
                merge={variable: (a, b) for variable, (a, b) in merges.items()},
                **emitter.common(),
            )
        )
        emitter.mark_control(name, [branch.flow for branch in branches])

    def _jump(self, node: ast.stmt, scope: NameScope) -> None:
        if isinstance(node, ast.Continue):
            return
        if isinstance(node, ast.Break):
            scope.bind(BREAK, Value(True, "bool"))
            return
        assert isinstance(node, ast.Return)
        value = NULL
        if node.value is not None and scope.is_main:
            value = self._result(node.value, scope)
        elif node.value is not None:
            value = self.expressions.lower(node.value, scope, scope.result_hint)
        scope.bind(RETURN, value)
        if not scope.is_local:
            self.emitter.has_results = True

    def _result(self, node: ast.expr, scope: NameScope) -> Value:
        """Return the value that the main program returns, in a variable with the author's name, or
        with the name `result`.
        """
        if isinstance(node, ast.Dict):
            value = self.expressions.lower_dict(node, scope, scope.version)
            _check_output_names(value, node, scope)
            return value
        hint = scope.result_name
        value = self.expressions.lower(node, scope, hint)
        if isinstance(node, ast.Name) and value.variable is None and value != NULL:
            variable = scope.version(node.id)
            return var(self.emitter.expr(value.expression, variable, is_named=True), value.kind)
        if value.variable in (None, hint) or isinstance(node, ast.Name) or value.kind == "stream":
            _check_output_names(value, node, scope)
            return value
        name = scope.result_variable()
        return var(self.emitter.expr(value.expression, name, is_named=True), value.kind)

    # --- assignments ----------------------------------------------------------------------

    def _assign(self, node: ast.Assign, scope: NameScope) -> None:
        if len(node.targets) != 1:
            message = "assign to one name in a line"
            raise UnsupportedSourceError(message, position_of(node))
        match node.targets[0]:
            case ast.Name(id=name):
                self._assign_name(name, node.value, scope)
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                self._unpack(targets, node, scope)
            case target:
                message = "only names can be assigned: build a new list or dict instead"
                raise UnsupportedSourceError(message, position_of(target))

    def _assign_name(self, name: str, node: ast.expr, scope: NameScope) -> None:
        scope.check_forward(name, self.emitter.flow.job, node)
        hint = self._own_variable(name, node, scope)
        value = self.expressions.lower(node, scope, hint)
        scope.assign(name, value, hint)

    def _own_variable(self, name: str, node: ast.expr, scope: NameScope) -> str | None:
        """Return a variable for the value of an expression that makes a node, or may make one."""
        makes_node = type(node) in _NODE_MAKERS or (
            type(node) is ast.Subscript and is_answer_text(node, scope)
        )
        return scope.version(name) if makes_node else None

    def _unpack(self, targets: list[ast.expr], node: ast.Assign, scope: NameScope) -> None:
        names = []
        for target in targets:
            if not isinstance(target, ast.Name):
                message = "only names can be assigned"
                raise UnsupportedSourceError(message, position_of(target))
            names.append(target.id)
        if isinstance(node.value, ast.Tuple | ast.List):
            self._assign_each(names, node.value.elts, node, scope)
            return
        value = self.expressions.lower(node.value, scope)
        items = value.expression
        if isinstance(items, list):  # of a function
            _check_count(names, items, node)
        else:
            base = {"var": self.emitter.variable_of(value, "parts")}
            items = [{"get": [base, index]} for index in range(len(names))]
        for name, item in zip(names, items, strict=True):
            scope.assign(name, Value(item), scope.version(name))

    def _assign_each(
        self, names: list[str], items: list[ast.expr], node: ast.Assign, scope: NameScope
    ) -> None:
        """Lower `a, b = x, y`: all values first."""
        _check_count(names, items, node)
        variables = [
            self._own_variable(name, item, scope) for name, item in zip(names, items, strict=True)
        ]
        values = [
            self.expressions.lower(item, scope, variable)
            for item, variable in zip(items, variables, strict=True)
        ]
        for name, value, variable in zip(names, values, variables, strict=True):
            scope.assign(name, value, variable)

    def _augmented(self, node: ast.AugAssign, scope: NameScope) -> None:
        if not isinstance(node.target, ast.Name):
            message = "only names can be assigned: build a new list or dict instead"
            raise UnsupportedSourceError(message, position_of(node.target))
        left = ast.copy_location(ast.Name(node.target.id, ast.Load()), node.target)
        sum_ = ast.copy_location(ast.BinOp(left, node.op, node.value), node)
        self._assign_name(node.target.id, sum_, scope)

    def _annotated(self, node: ast.AnnAssign, scope: NameScope) -> None:
        """Lower `name: type`, which declares an input, or `name: type = default`."""
        if not isinstance(node.target, ast.Name):
            message = "write `name: str` to declare an input"
            raise UnsupportedSourceError(message, position_of(node.target))
        name = node.target.id
        if name in scope.inputs:
            return  # declared before the text was compiled
        if node.value is None:
            message = f"declare the input `{name}` at the start of the text, outside of blocks"
            raise SourceArgumentError("language.argument", message, position_of(node))
        self._assign_name(name, node.value, scope)

    # --- effects --------------------------------------------------------------------------

    def _expression(self, node: ast.Expr, scope: NameScope) -> None:
        match node.value:
            case ast.Yield(value=value):
                self._yield(value, node, scope)
            case ast.Call(func=ast.Name(id="wait")) as call if scope.find("wait") is None:
                self._wait(call, scope)
            case ast.Call(func=ast.Attribute(value=ast.Name() as target, attr="kill")) as call:
                self._kill(call, target, scope)
            case ast.Call(func=ast.Attribute(value=ast.Name() as target, attr="append")) as call:
                self._append(call, target, scope)
            case ast.Call() as call:
                self.expressions.lower(call, scope)
            case ast.Constant():
                return  # a docstring
            case value:
                message = "the value of this expression is not used: assign or `yield` it"
                raise UnsupportedSourceError(message, position_of(value))

    def _yield(self, node: ast.expr | None, statement: ast.stmt, scope: NameScope) -> None:
        if node is None:
            message = "`yield` needs a value: write `yield {'name': value}`"
            raise SourceArgumentError("language.argument", message, position_of(statement))
        value = self.expressions.lower(node, scope)
        mode = "delta" if value.kind == "stream" else "value"
        self.emit_yield(value, mode)
        if scope.has_outputs and not scope.is_main:
            self._record_outputs(node, value, scope)

    def _record_outputs(self, node: ast.expr, value: Value, scope: NameScope) -> None:
        """Record the names that a `yield` in a branch reads."""
        reads = variables(value.expression)
        level: list[ast.AST] = [node]
        while level:
            for each in level:
                if type(each) is ast.Name:
                    found = scope.find(each.id)
                    if isinstance(found, Value) and found.variable in reads:
                        scope.yielded[each.id] = found.variable
            level = [child for each in level for child in children(each)]

    def emit_yield(self, value: Value, mode: Any) -> None:
        """Add a `yield` node at this point."""
        emitter = self.emitter
        name = emitter.unique("yield")
        common = emitter.common(is_ordered=True)
        emitter.add(YieldNode(id=name, value=value.expression, mode=mode, **common))
        emitter.mark_ordered(name)
        emitter.has_results = True
        if emitter.depth == 0:
            emitter.outputs |= dict.fromkeys(sorted(variables(value.expression)))

    def _wait(self, node: ast.Call, scope: NameScope) -> None:
        options = self._options(node.keywords, scope, ("any", "timeout"))
        if not node.args:
            message = "`wait` takes one or more names: write `wait a, b`"
            raise SourceArgumentError("language.argument", message, position_of(node))
        emitter = self.emitter
        names: dict[str, None] = {}
        for each in node.args:
            found = scope.find(each.id) if isinstance(each, ast.Name) else None
            if isinstance(found, JobHandle):
                names[emitter.joined(found.nodes)] = None
                continue
            value = self.expressions.lower(each, scope)
            names |= dict.fromkeys(sorted(variables(value.expression) - emitter.bound))
        if not names:
            return
        name = emitter.unique("wait")
        fields: dict[str, Any] = {"mode": "any"} if options.get("any") else {}
        if options.get("timeout") is not None:
            fields["timeout_s"] = options["timeout"]
        emitter.add(
            WaitNode(id=name, variables=list(names), required=True, **fields, **emitter.common())
        )
        emitter.mark_wait(name)

    def _kill(self, node: ast.Call, target: ast.Name, scope: NameScope) -> None:
        if node.args or node.keywords:
            message = "`kill` takes no arguments"
            raise SourceArgumentError("language.argument", message, position_of(node))
        found = scope.find(target.id)
        name = found.job if isinstance(found, JobHandle) else scope.read(target).variable
        if name is None or scope.is_input(name):
            message = f"`{target.id}` has its value already: only the result of a call, or a job, "
            message += "can be cancelled"
            raise SourceArgumentError("language.argument", message, position_of(target))
        emitter = self.emitter
        common = emitter.common(is_ordered=True)
        if emitter.depth == 0 and "after" not in common:
            message = f"`{target.id}` would be cancelled as soon as it starts: wait for another "
            message += "value, or write the `kill` into an `if`"
            raise SourceArgumentError("language.argument", message, position_of(target))
        kill = emitter.unique("kill")
        emitter.add(KillNode(id=kill, targets=[name], **common))
        emitter.mark_ordered(kill)

    def _append(self, node: ast.Call, target: ast.Name, scope: NameScope) -> None:
        """Lower `items.append(element)` to `items = items + [element]`."""
        if len(node.args) != 1 or node.keywords:
            message = "`append` takes one element"
            raise SourceArgumentError("language.argument", message, position_of(node))
        element = ast.copy_location(ast.List([node.args[0]], ast.Load()), node)
        total = ast.copy_location(ast.BinOp(target, ast.Add(), element), node)
        self._assign_name(target.id, total, scope)

    # --- jobs and functions ---------------------------------------------------------------

    def _with(self, node: ast.With, scope: NameScope) -> None:
        item = node.items[0]
        match item.context_expr:
            case ast.Call(func=ast.Name(id="job"), args=[], keywords=keywords) if (
                len(node.items) == 1
            ):
                pass
            case _:
                message = "`with` opens a job only: write `with job():` or `StartNewJob:`"
                raise UnsupportedSourceError(message, position_of(item.context_expr))
        if any(map(can_jump, node.body)):
            message = "`break`, `continue` and `return` cannot leave a job"
            raise UnsupportedSourceError(message, position_of(node))
        options = self._options(keywords, scope, ("name", "timeout", "on_error", "priority"))
        emitter = self.emitter
        name = emitter.unique(options.get("name") or "job")
        job = Job(
            parent=None if emitter.flow.job == "main" else emitter.flow.job,
            on_error=options.get("on_error") or "fail",
            timeout_s=options.get("timeout"),
        )
        start, priority = len(emitter.block), emitter.priority
        emitter.priority = options.get("priority", priority)
        with emitter.job(name, job):
            self.run(node.body, scope)
        emitter.priority = priority
        if item.optional_vars is not None:
            if not isinstance(item.optional_vars, ast.Name):
                message = "write `with job() as name:`"
                raise UnsupportedSourceError(message, position_of(item.optional_vars))
            nodes = tuple(each.id for each in emitter.block[start:])
            scope.bind(item.optional_vars.id, JobHandle(name, nodes))

    def _options(
        self, keywords: list[ast.keyword], scope: NameScope, known: tuple[str, ...]
    ) -> dict[str, Json]:
        options: dict[str, Json] = {}
        for keyword in keywords:
            if keyword.arg not in known:
                message = f"unknown option `{keyword.arg}`: the options are {', '.join(known)}"
                if keyword.arg == "budget":
                    message = "a job has no budget: give its calls `max_tokens`, or it a `timeout`"
                raise SourceArgumentError("language.argument", message, position_of(keyword.value))
            value = self.expressions.constant(keyword.value, scope, f"`{keyword.arg}`")
            if not _OPTION_CHECKS[keyword.arg](value):
                message = f"`{keyword.arg}` cannot be {value!r}"
                raise SourceArgumentError("language.argument", message, position_of(keyword.value))
            options[keyword.arg] = value
        return options

    def _define(self, node: ast.FunctionDef, scope: NameScope) -> None:
        if not scope.is_main:
            message = "write functions outside of blocks and other functions"
            raise UnsupportedSourceError(message, position_of(node))
        for decorator in node.decorator_list:
            if not is_decorator(decorator, "function"):
                message = "decorators are not supported, except for `function`"
                raise UnsupportedSourceError(message, position_of(decorator))
        if isinstance(scope.bindings.get(node.name), Value):
            message = f"`{node.name}` is a variable already: choose another name"
            raise SourceNameError("language.undefined_name", message, position_of(node))
        scope.bind(node.name, FunctionSource(node, scope.snapshot()))


_OPTION_CHECKS: Final[dict[str, Callable[[Json], bool]]] = {
    "any": lambda value: isinstance(value, bool),
    "name": lambda value: isinstance(value, str) and bool(value),
    "on_error": lambda value: value in ("fail", "isolate"),
    "priority": lambda value: type(value) is int and -100 <= value <= 100,
    "timeout": lambda value: type(value) in (int, float) and 0 < value <= 7 * 86_400,
}


def _check_output_names(value: Value, node: ast.expr, scope: NameScope) -> None:
    """Refuse a returned dict with a key that cannot name an output."""
    for key, item in (value.fields or {}).items():
        if key in scope.inputs and item != {"var": key}:
            message = f"`{key}` is an input and keeps its value: return this one as another name"
            raise SourceArgumentError("language.argument", message, node)
        if not is_name(key):
            message = (
                f"an output cannot have the name {key[:40]!r}: use at most 128 ASCII letters, "
            )
            message += "digits and `_`, and no digit at the start, or give the dict a name, as in "
            message += "`return {'result': value}`"
            raise SourceArgumentError("language.argument", message, node)


def _check_count(names: list[str], values: list[Any], node: ast.Assign) -> None:
    if len(names) != len(values):
        message = f"{len(names)} names for {len(values)} values"
        raise SourceArgumentError("language.argument", message, position_of(node))


def input_kind(annotation: ast.expr) -> Kind:
    """Return the kind of an input from its annotation."""
    return _INPUT_KINDS.get(annotation.id, "any") if isinstance(annotation, ast.Name) else "any"
