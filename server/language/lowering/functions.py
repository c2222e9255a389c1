"""Functions of a text: inlined at every call.

A function whose body is only a docstring is a *semantic function*: the docstring is its prompt, a
template whose slots are the parameters and the outputs. A parameter that is annotated as `Output`
is an output as well: `def write(task, code: Output(max_tokens=200))`.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable
from typing import Any

from msgspec import UNSET

from ...program.content import Json, Segment
from ...program.ir import GenerateNode
from ..errors import Position, SourceArgumentError, SourceNameError, position_of
from ..options import CALL_OPTIONS, check_slot_option, read_options
from ..template import InputSlot, OutputSlot, Part, parse_template
from .calls import too_deep
from .generation import option_value, prompt_segments
from .interfaces import Lowerer
from .scope import RETURN, FunctionSource, NameScope
from .values import NULL, Value, as_text, var

MAX_CALL_DEPTH = 16

RunBody = Callable[[list[ast.stmt], NameScope], None]
"""Compiles statements."""


class FunctionInliner:
    """Inserts the functions of one text where they are called."""

    def __init__(self, lowerer: Lowerer, run_body: RunBody) -> None:
        self._lowerer = lowerer
        self._run_body = run_body
        self._active: list[ast.FunctionDef] = []
        self._prompts: dict[ast.FunctionDef, list[Part] | None] = {}
        """The prompts of the functions that were called; None: not a semantic function."""

    def __call__(
        self, source: FunctionSource, node: ast.Call, scope: NameScope, hint: str | None
    ) -> Value:
        """Return the value of a call.

        Raises:
            LanguageError: if the arguments or the body are invalid.
        """
        definition = source.definition
        if definition in self._active or len(self._active) >= MAX_CALL_DEPTH:
            too_deep(node)
        prompt = self._prompt(source)
        arguments, others = self._bind(source, node, scope)
        self._active.append(definition)
        try:
            if prompt is not None:
                options = self._named_options(others, scope)
                return self._call_semantic(definition.name, prompt, arguments, options, hint)
            inner = scope.function(arguments)
            inner.result_hint = hint
            self._run_body(definition.body, inner)
            result = inner.bindings.get(RETURN, NULL)
            return result if isinstance(result, Value) else NULL
        finally:
            self._active.pop()

    # --- arguments ------------------------------------------------------------------------

    def _bind(
        self, source: FunctionSource, node: ast.Call, scope: NameScope
    ) -> tuple[dict[str, Value], list[ast.keyword]]:
        """Return the arguments by parameter, and the named arguments that are not parameters."""
        definition = source.definition
        parameters = [each.arg for each in parameters_of(definition) if not is_output(each)]
        given, others = _given_arguments(definition, parameters, node)
        values = {name: self._lowerer.lower(each, scope) for name, each in given.items()}
        for name, default in _defaults(definition).items():
            if name in parameters and name not in values:
                what = f"the default of `{name}`"
                values[name] = _literal(self._lowerer.constant(default, source.scope, what))
        missing = [name for name in parameters if name not in values]
        if missing:
            message = f"`{definition.name}` needs an argument `{missing[0]}`"
            raise SourceArgumentError("language.argument", message, position_of(node))
        if others and self._prompt(source) is None:
            message = f"`{definition.name}` has no parameter `{others[0].arg}`"
            raise SourceArgumentError("language.argument", message, position_of(others[0].value))
        return {name: self._stored(name, value) for name, value in values.items()}, others

    def _stored(self, name: str, value: Value) -> Value:
        """Return an argument that is computed once, however often the body reads it."""
        if value.is_inline or self._lowerer.is_pure:
            return value
        variable = self._lowerer.emitter.expr(value.expression, name)
        return Value({"var": variable}, value.kind, value.expression)

    # --- semantic functions ---------------------------------------------------------------

    def _call_semantic(
        self,
        name: str,
        prompt: list[Part],
        arguments: dict[str, Value],
        options: dict[str, Json],
        hint: str | None,
    ) -> Value:
        slots = [part for part in prompt if isinstance(part, OutputSlot)]
        fields = call_fields(slots, options)
        given = {name: value for name, value in options.items() if name != "model"}
        emitter = self._lowerer.emitter
        values = dict(arguments)
        segments: list[Segment] = []
        for part in prompt:
            if isinstance(part, OutputSlot):
                variable = hint if hint and len(slots) == 1 else emitter.unique(part.name)
                slot_options = part.options_with(given)
                emitter.count_texts(slot_options)
                read = read_options(slot_options, part.position)
                segments.append(Segment(output=variable, **read.output))
                values[part.name] = var(variable, read.output_kind)
            else:
                segments += _input_segments(part, values)
        segments = _join_texts(segments)
        emitter.count_text(sum(len(each.text) for each in segments if each.text is not UNSET))
        fields = emitter.common() | fields
        emitter.add(GenerateNode(id=emitter.unique(name), prompt=segments, **fields))
        outputs = [values[slot.name] for slot in slots]
        return outputs[0] if len(outputs) == 1 else Value([v.expression for v in outputs], "list")

    def _named_options(self, others: list[ast.keyword], scope: NameScope) -> dict[str, Json]:
        options: dict[str, Json] = {}
        for keyword in others:
            if keyword.arg is None:
                message = "`**` is not allowed: name every option"
                raise SourceArgumentError("language.argument", message, position_of(keyword.value))
            if keyword.arg != "model":
                check_slot_option(keyword.arg, keyword.value)
            value = option_value(self._lowerer, keyword.arg, keyword.value, scope)
            if value is not None:
                options[keyword.arg] = value
        return options

    def _prompt(self, source: FunctionSource) -> list[Part] | None:
        """Return the prompt of a semantic function; None for any other function."""
        definition = source.definition
        if definition not in self._prompts:
            text = docstring_of(definition)
            self._prompts[definition] = None if text is None else self._parts(source, text)
        return self._prompts[definition]

    def _parts(self, source: FunctionSource, text: str) -> list[Part]:
        """Return the prompt of a semantic function, with its output parameters as output slots.

        The first slot of an output parameter is the output; further ones read it. Text after the
        last output is checked and left out.
        """
        definition = source.definition
        parameters = parameters_of(definition)
        outputs = {each.arg: each for each in parameters if is_output(each)}
        names = {each.arg for each in parameters} - outputs.keys()
        parts = parse_template(text, Position(definition.lineno, 1))
        for index, part in enumerate(parts):
            if isinstance(part, InputSlot) and part.name in outputs:
                part = self._output_slot(part, outputs.pop(part.name), source.scope)
                parts[index] = part
            elif isinstance(part, InputSlot) and part.name not in names:
                message = f"`{part.name}` is neither a parameter nor an output before this slot: "
                message += "add it to the parameters, and pass its value in the call"
                raise SourceNameError("language.undefined_name", message, part.position)
            if isinstance(part, OutputSlot):
                if part.name in names:
                    message = f"a parameter or an output has the name `{part.name}` already: "
                    message += "choose another name"
                    raise SourceNameError("language.undefined_name", message, part.position)
                names.add(part.name)
        if outputs:
            name, parameter = next(iter(outputs.items()))
            message = f"the text of `{definition.name}` has no slot {{{{{name}}}}} for this output"
            raise SourceArgumentError("language.argument", message, position_of(parameter))
        if not any(isinstance(part, OutputSlot) for part in parts):
            message = f"`{definition.name}` has no output: write {{{{name=answer}}}} in its text"
            raise SourceArgumentError("language.argument", message, position_of(definition))
        return up_to_last_output(parts)

    def _output_slot(self, slot: InputSlot, parameter: ast.arg, scope: NameScope) -> OutputSlot:
        """Return the output that `{{name}}` means if the parameter is annotated as `Output`."""
        options: dict[str, Json] = {}
        if isinstance(parameter.annotation, ast.Call):
            if parameter.annotation.args:
                message = "the options of `Output` have names, as in Output(max_tokens=200)"
                place = position_of(parameter.annotation)
                raise SourceArgumentError("language.argument", message, place)
            options = self._named_options(parameter.annotation.keywords, scope)
        model = options.pop("model", None)
        return OutputSlot(slot.name, options, "", model, slot.position)


# --- arguments --------------------------------------------------------------------------------


def _given_arguments(
    definition: ast.FunctionDef, parameters: list[str], node: ast.Call
) -> tuple[dict[str, ast.expr], list[ast.keyword]]:
    """Return the arguments of a call by parameter, and those whose names are not parameters."""
    positional_only = {each.arg for each in definition.args.posonlyargs}
    keyword_only = {each.arg for each in definition.args.kwonlyargs}
    positional = [name for name in parameters if name not in keyword_only]
    if len(node.args) > len(positional):
        unit = "positional argument" if keyword_only else "argument"
        counted = f"{len(positional)} {unit}{'' if len(positional) == 1 else 's'}"
        message = f"`{definition.name}` takes {counted}, got {len(node.args)}"
        raise SourceArgumentError("language.argument", message, position_of(node))
    given: dict[str, ast.expr] = dict(zip(positional, node.args, strict=False))
    others: list[ast.keyword] = []
    for keyword in node.keywords:
        name = keyword.arg
        if name is None or name in given or name in positional_only:
            message = f"`{name}` cannot be named in a call: write its value alone"
            if name is None:
                message = "`**` is not allowed"
            elif name in given:
                message = f"`{name}` is given twice"
            raise SourceArgumentError("language.argument", message, position_of(keyword.value))
        if name in parameters:
            given[name] = keyword.value
        else:
            others.append(keyword)
    return given, others


# --- prompts ----------------------------------------------------------------------------------


def _input_segments(part: str | InputSlot, values: dict[str, Value]) -> list[Segment]:
    """Return the segments of literal text, or of an argument or output that a slot inserts."""
    if isinstance(part, str):
        return prompt_segments(part)
    text = as_text(values[part.name])
    # Without `special`: the text of an argument cannot contain control tokens.
    return [
        segment if segment.text is UNSET else Segment(text=segment.text)
        for segment in prompt_segments(text)
    ]


def call_fields(slots: list[OutputSlot], options: dict[str, Json]) -> dict[str, Any]:
    """Return the model, timeout, retries and priority of a node that its call or its slots give.

    Args:
        slots: the outputs of the call.
        options: options of the call, which replace those of its slots.

    Raises:
        SourceArgumentError: `language.argument`, if two slots name different values.
    """
    given = {name: options[name] for name in CALL_OPTIONS if name in options}
    found: dict[str, Json] = {}
    for slot in slots:
        for name, value in {**slot.options, "model": slot.model}.items():
            if value is None or name not in CALL_OPTIONS or name in given:
                continue
            if found.setdefault(name, value) != value:
                message = f"one context has one `{name}`: give it to one of the outputs only"
                raise SourceArgumentError("language.argument", message, slot.position)
    found |= given
    model = found.pop("model", None)
    fields = read_options(found, slots[0].position).node
    return fields if model in (None, "default") else {"model": model, **fields}


def up_to_last_output(parts: list[Part]) -> list[Part]:
    """Return the parts up to the last output. No output depends on text after it."""
    last = max((i for i, part in enumerate(parts) if isinstance(part, OutputSlot)), default=-1)
    return parts[: last + 1]


def _join_texts(segments: list[Segment]) -> list[Segment]:
    """Join adjacent literal texts if both or neither may have control tokens."""
    joined: list[Segment] = []
    for is_special, run in itertools.groupby(segments, _may_have_control_tokens):
        if is_special is None:  # no literal texts
            joined += run
        else:
            text = "".join(each.text for each in run if isinstance(each.text, str))
            joined.append(Segment(text=text, special=is_special))
    return joined


def _may_have_control_tokens(segment: Segment) -> bool | None:
    """Return whether a literal text may have control tokens; None for any other segment."""
    return segment.special if isinstance(segment.text, str) else None


def docstring_of(definition: ast.FunctionDef) -> str | None:
    """Return the docstring of a function whose body is nothing else."""
    match definition.body:
        case [ast.Expr(value=ast.Constant(value=str(text)))]:
            return _dedent(text)
        case _:
            return None


def _dedent(text: str) -> str:
    """Remove the indentation that all lines but the first share, and blank ends."""
    # Not `inspect.cleandoc`, which replaces the tabs of a prompt.
    lines = text.split("\n")
    widths = [len(line) - len(line.lstrip()) for line in lines[1:] if line.strip()]
    width = min(widths, default=0)
    return "\n".join([lines[0], *(line[width:] for line in lines[1:])]).strip()


def parameters_of(definition: ast.FunctionDef) -> list[ast.arg]:
    """Return the parameters of a function.

    Raises:
        SourceArgumentError: `language.argument` for `*args` and `**kwargs`.
    """
    arguments = definition.args
    for variadic in (arguments.vararg, arguments.kwarg):
        if variadic is not None:
            message = "`*` and `**` parameters are not supported: name every parameter"
            raise SourceArgumentError("language.argument", message, position_of(variadic))
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]


def _defaults(definition: ast.FunctionDef) -> dict[str, ast.expr]:
    arguments = definition.args
    positional = [*arguments.posonlyargs, *arguments.args]
    values = arguments.defaults
    found = {
        each.arg: value
        for each, value in zip(positional[len(positional) - len(values) :], values, strict=True)
    }
    for each, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if value is not None:
            found[each.arg] = value
    return found


def is_output(parameter: ast.arg) -> bool:
    """Whether a parameter is annotated as `Output` or `Output(...)`."""
    annotation = parameter.annotation
    function = annotation.func if isinstance(annotation, ast.Call) else annotation
    match function:
        case ast.Name(id="Output") | ast.Attribute(attr="Output"):
            return True
        case _:
            return False


def _literal(constant: Json) -> Value:
    if isinstance(constant, str):
        return Value(constant, "text")
    if isinstance(constant, dict):
        return Value({"lit": constant}, "object")
    if isinstance(constant, list):
        return Value({"lit": constant}, "list")
    return Value(constant)
