"""The compiler of the decoder language: a text to the records of a program.

    compile_source(text, "decoder", inputs={"question"}) -> Program

Responsibility: the two languages, the declaration of inputs, and the outputs of the program.
Out of scope: the graph. Its checks name nodes; `locate` translates them to lines.

Invariants: the result depends on the arguments only, and any text gives a program or a
LanguageError. No part of the text is executed.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import re
from collections.abc import Collection, Iterator
from collections.abc import Set as AbstractSet
from typing import Final, Literal, NoReturn, TypeAlias

from msgspec.structs import replace

from ..program.checks import is_name
from ..program.content import Expression, Segment
from ..program.errors import NotFoundError, ProgramError
from ..program.expressions.value_schema import find_mismatch
from ..program.ir import GenerateNode, Node, Program, Variable, YieldNode
from ..program.nodes.bodies import walk as walk_nodes
from ..program.suggestion import suggestion
from .errors import (
    LanguageError,
    Position,
    SourceArgumentError,
    SourceNameError,
    SourceSyntaxError,
    SourceTooLargeError,
    UnsupportedSourceError,
    position_of,
)
from .lowering.blocks import LoopReads
from .lowering.emitter import Emitter
from .lowering.functions import call_fields, parameters_of, up_to_last_output
from .lowering.generation import prompt_segments
from .lowering.interfaces import Signatures
from .lowering.scope import RETURN, NameScope, NameUses
from .lowering.statements import StatementLowerer, input_kind
from .lowering.values import NULL, Value
from .options import read_options
from .syntax import can_jump, check_size, is_decorator, parse
from .template import InputSlot, OutputSlot, parse_template

Language: TypeAlias = Literal["decoder", "template"]

_TYPES: Final[dict[str, str]] = {
    "str": "string",
    "int": "int",
    "float": "float",
    "bool": "bool",
    "list": "list",
    "dict": "object",
}
_PATH_IN_NODES = re.compile(r"^(?:program\.)?nodes\[")


class InputDeclaration:
    """An input that the text declares."""

    def __init__(self, name: str, annotation: ast.expr | None, default: ast.expr | None) -> None:
        self.name = name
        self.annotation = annotation
        self.default = default

    def variable(self) -> Variable:
        """Return the declaration of the input's variable."""
        match self.annotation:
            case ast.Name(id=name) if name in _TYPES:
                return Variable(type=_TYPES[name])  # type: ignore[arg-type]  # one of its values
            case None | ast.Name(id="any" | "Any"):
                return Variable()
            case annotation:
                known = ", ".join(_TYPES)
                message = f"the type of an input is one of {known}, any"
                raise SourceArgumentError("language.argument", message, position_of(annotation))


def compile_source(
    source: str,
    language: Language = "decoder",
    *,
    inputs: Collection[str] = (),
    signatures: Signatures | None = None,
    name: str = "",
) -> Program:
    """Return the program that a text describes.

    Args:
        source: the text.
        language: `decoder` for Python's syntax, `template` for text with slots.
        inputs: names that have a value in the submission; the text need not declare them.
        signatures: the functions of the server with their parameters; None: unknown.
        name: name of the program.

    Raises:
        LanguageError: with line and column.
    """
    try:
        with _without_collector():
            if language == "template":
                return _compile_template(source, inputs, name)
            return _compile_decoder(source, inputs, signatures, name)
    except RecursionError:
        raise SourceTooLargeError(
            "language.too_large", "the text is nested too deeply", Position(1, 1)
        ) from None


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Pause the collector of cycles: a syntax tree is thousands of objects and has no cycles, but
    each few hundred of them start a search, sometimes through all objects of the process.

    Several threads may do this at a time: one that found the collector enabled enables it again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# --- Python's syntax --------------------------------------------------------------------------


def _compile_decoder(
    source: str, inputs: Collection[str], signatures: Signatures | None, name: str
) -> Program:
    tree, reads = parse(source)
    body, declared, program_name = _unwrap(tree.body)
    names = {each.name for each in declared}
    if undeclared := set(inputs) - names:
        _check_inputs(undeclared, names | _names_in(tree))
    shared = [] if program_name is None else _shared(tree.body, program_name)
    has_jumps = any(map(can_jump, body))
    uses = NameUses(body)
    # The last version of a name has the name itself. Which one is the last is certain only once the
    # text is lowered: it is lowered again if the estimate was wrong.
    is_estimated = True
    while True:
        emitter = Emitter()
        statements = StatementLowerer(emitter, LoopReads(reads), signatures)
        scope = NameScope(emitter, uses)
        statements.run(shared, scope)
        variables = _declare_inputs(statements, scope, declared, inputs)
        if has_jumps:
            scope.reserve_result()
        statements.run(body, scope)
        outputs = _outputs(emitter, scope)
        if not (is_estimated and scope.recount_versions()):
            break
        is_estimated = False
    if not emitter.has_results:
        message = "the program gives no result: add `yield {'name': value}`"
        raise SourceArgumentError("language.argument", message, Position(1, 1))
    return Program(
        name=name or program_name or "",
        variables=variables,
        nodes=emitter.block,  # type: ignore[arg-type]  # all kinds that the compiler makes
        jobs=emitter.jobs,
        outputs=outputs,
    )


def _outputs(emitter: Emitter, scope: NameScope) -> list[str]:
    """Return the variables that `return` gives, then those that `yield` reads."""
    result = scope.bindings.get(RETURN, NULL)
    outputs = {name: None for name in emitter.outputs if name not in scope.inputs}
    if isinstance(result, Value) and result != NULL:
        outputs = dict.fromkeys(_returned(emitter, scope, result)) | outputs
    return [each for each in outputs if each not in emitter.bound]


def _returned(emitter: Emitter, scope: NameScope, result: Value) -> list[str]:
    """Return the output variables of `return`: one for each key of a dict."""
    if result.fields is not None:
        return [_named(emitter, scope, Value(item), key) for key, item in result.fields.items()]
    return [result.variable or _named_result(emitter, scope, result)]


def _named_result(emitter: Emitter, scope: NameScope, result: Value) -> str:
    name = scope.result_variable()
    emitter.expr(result.expression, name, is_named=True)
    return name


def _named(emitter: Emitter, scope: NameScope, value: Value, key: str) -> str:
    """Return the variable of a value that `return` gives a name."""
    if value.variable == key:
        return key
    name = scope.version(key)
    emitter.expr(value.expression, name, is_named=True)
    return name


def _unwrap(
    body: list[ast.stmt],
) -> tuple[list[ast.stmt], list[InputDeclaration], str | None]:
    """Return the statements of the program, its inputs, and the name of its function.

    A text is either statements, or functions, one of them decorated with `program`.
    """
    programs = [
        statement
        for statement in body
        if isinstance(statement, ast.FunctionDef)
        and any(is_decorator(each, "program") for each in statement.decorator_list)
    ]
    if not programs:
        return body, _declarations(body), None
    if len(programs) > 1:
        message = "a text has one function with `program`"
        raise UnsupportedSourceError(message, position_of(programs[1]))
    for statement in body:
        is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not isinstance(statement, ast.FunctionDef | ast.Assign) and not is_docstring:
            message = "next to a function with `program` there can be functions and constants only"
            raise UnsupportedSourceError(message, position_of(statement))
    definition = programs[0]
    arguments = definition.args
    parameters = parameters_of(definition)
    _check_constants(body, parameters)
    defaults: list[ast.expr | None] = [None] * (
        len(arguments.posonlyargs) + len(arguments.args) - len(arguments.defaults)
    )
    defaults += [*arguments.defaults, *arguments.kw_defaults]
    declared = [
        InputDeclaration(parameter.arg, parameter.annotation, default)
        for parameter, default in zip(parameters, defaults, strict=True)
    ]
    return definition.body, [*declared, *_declarations(definition.body)], definition.name


def _check_constants(body: list[ast.stmt], parameters: list[ast.arg]) -> None:
    """Refuse an input with the name of a constant: functions would read the input."""
    targets = [
        each
        for statement in body
        if isinstance(statement, ast.Assign)
        for each in statement.targets
    ]
    constants = {each.id for each in targets if isinstance(each, ast.Name)}
    for parameter in parameters:
        if parameter.arg in constants:
            message = f"`{parameter.arg}` is an input and a constant: rename one of them"
            raise UnsupportedSourceError(message, position_of(parameter))


def _shared(body: list[ast.stmt], program_name: str) -> list[ast.stmt]:
    """Return the other functions, and the constants, next to the program's function."""
    return [
        each
        for each in body
        if isinstance(each, ast.Assign)
        or (isinstance(each, ast.FunctionDef) and each.name != program_name)
    ]


def _declarations(body: list[ast.stmt]) -> list[InputDeclaration]:
    """Return the inputs that statements declare: `name: type` and `name: type = default`."""
    return [
        InputDeclaration(target.id, statement.annotation, statement.value)
        for statement in body
        if isinstance(statement, ast.AnnAssign) and isinstance(target := statement.target, ast.Name)
    ]


def _declare_inputs(
    statements: StatementLowerer,
    scope: NameScope,
    declared: list[InputDeclaration],
    inputs: Collection[str],
) -> dict[str, Variable]:
    """Declare the inputs of a program."""
    variables: dict[str, Variable] = {}
    for each in declared:
        variable = each.variable()
        if not is_name(each.name):
            _refuse_name(each.name)
        if each.default is not None:
            what = f"the default of `{each.name}`"
            default = statements.expressions.constant(each.default, scope, what)
            if (mismatch := find_mismatch(default, variable)) is not None:
                message = f"`{each.name}` {mismatch}: change its default"
                raise SourceArgumentError("language.argument", message, each.default)
            variable = replace(variable, default=default)
        scope.declare_input(
            each.name, "any" if each.annotation is None else input_kind(each.annotation)
        )
        variables[each.name] = variable
    for name in sorted(inputs):
        if name not in variables:
            if not is_name(name):
                _refuse_name(name)
            scope.declare_input(name, "any")
            variables[name] = Variable()
    return variables


def _names_in(tree: ast.Module) -> set[str]:
    """Return the names in a text, without those of called functions."""
    nodes = list(ast.walk(tree))
    called = {node.func for node in nodes if isinstance(node, ast.Call)}
    return {node.id for node in nodes if isinstance(node, ast.Name) and node not in called}


def _check_inputs(inputs: Collection[str], read: AbstractSet[str]) -> None:
    """Refuse a value for a name that a text does not contain: it can only be a mistake."""
    for name in sorted(set(inputs) - read):
        if not is_name(name):
            _refuse_name(name)
        hint = suggestion(name, read, "remove it")
        raise ProgramError(
            "program.unknown_input",
            f"no statement reads input `{name}`; {hint}",
            path=f"inputs.{name}",
        )


def _refuse_name(name: str) -> NoReturn:
    message = f"an input cannot have the name {name[:40]!r}: names start with a letter from A to z"
    raise SourceNameError("language.undefined_name", message, Position(1, 1))


# --- templates --------------------------------------------------------------------------------


def _compile_template(source: str, inputs: Collection[str], name: str) -> Program:
    check_size(source)
    emitter = Emitter()
    parts = parse_template(source)
    outputs = [part for part in parts if isinstance(part, OutputSlot)]
    if not outputs:
        message = "the template has no output: write {{name=answer}}"
        raise SourceSyntaxError("language.template", message, Position(1, 1))
    names = {part.name for part in outputs}
    segments: list[Segment] = []
    variables: dict[str, Variable] = {}
    written: set[str] = set()
    for part in up_to_last_output(parts):
        match part:
            case str():
                segments += prompt_segments(part)
            case InputSlot(name=slot, position=position):
                if slot in names and slot not in written:
                    message = f"`{slot}` is written only later: move its output before this slot"
                    raise SourceNameError("language.undefined_name", message, position)
                if slot not in names:
                    variables.setdefault(slot, Variable())
                segments.append(Segment(input=slot))
            case OutputSlot(name=slot, position=position):
                if slot in written or slot in variables:
                    message = f"two slots have the name `{slot}`: choose another name"
                    raise SourceNameError("language.undefined_name", message, position)
                written.add(slot)
                read = read_options(part.options_with({}), position)
                segments.append(Segment(output=slot, **read.output))
    _check_inputs(inputs, variables.keys() | written)
    fields = call_fields(outputs, {})
    emitter.add(GenerateNode(id=emitter.unique("template"), prompt=segments, **fields))
    for number, each in enumerate(outputs):
        emitter.place = each.position
        after = [f"yield_{outputs[number - 1].name}"] if number else []
        value: Expression = {"object": {each.name: {"var": each.name}}}
        emitter.add(YieldNode(id=f"yield_{each.name}", value=value, after=after))
    return Program(
        name=name,
        variables=variables,
        nodes=emitter.block,  # type: ignore[arg-type]  # all kinds that the compiler makes
        outputs=[each.name for each in outputs],
    )


# --- errors of the graph ----------------------------------------------------------------------


def locate(error: ProgramError | NotFoundError, program: Program) -> ProgramError | NotFoundError:
    """Return an error of the program's graph with the line that the node comes from."""
    if isinstance(error, LanguageError) or error.path is None:
        return error
    if not _PATH_IN_NODES.match(error.path):
        return error
    found = ""
    line = None
    for path, node in walk_nodes(program.nodes, "program.nodes"):
        is_around = error.path == path or error.path.startswith((f"{path}.", f"{path}["))
        if is_around and len(path) > len(found):
            found, line = path, line_of(node)
    if line is None:
        return error
    if isinstance(error, NotFoundError):
        message = f"line {line}, column 1: {error.message}"
        return NotFoundError(error.code, message, path=f"source:{line}:1")
    message = error.message
    if field := error.path[len(found) + 1 :]:
        message = message.replace(f"`{error.path}`", f"`{field}`")
    moved = LanguageError(error.code, message, Position(line, 1))
    moved.status = error.status
    return moved


def line_of(node: Node) -> int | None:
    """Return the line of the text that a node comes from."""
    meta = node.meta
    line = meta.get("line") if isinstance(meta, dict) else None
    return line if isinstance(line, int) else None


__all__ = ["Language", "compile_source", "line_of", "locate"]
