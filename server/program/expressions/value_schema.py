"""JSON Schemas of variables: the subset whose check takes bounded time.

A schema has no references and only the keywords below, so that a check visits each part of a value
at most once per part of the schema. Other keywords are refused when the program is submitted, not
ignored.

Out of scope: constraints on outputs, which engines enforce (`grammar`).

Invariant: a value is checked against a checked schema within `MAX_STEPS`, or refused.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterator, Sized
from typing import Any, Final, NoReturn, TypeAlias

from ..content import Json
from ..errors import ExpressionError, ProgramError
from ..ir import Variable
from .paths import Path, shown_key
from .regex import RegexError, check_pattern, compile_regex
from .values import equal, has_type, kind_of

MAX_STEPS = 500_000
"""Visits of a part of the value by a part of the schema in one check, and what comparisons and
patterns cost."""
MAX_DEPTH = 32
MAX_SHOWN = 80
"""Characters of an argument or a value in a message."""
MAX_SHOWN_VALUES = 10
"""Values of an `enum` in a message."""

TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
ANNOTATIONS = frozenset({"title", "description", "default", "examples", "$comment", "$schema"})
BOUNDS: dict[str, Callable[[Any, Any], bool]] = {
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
}
SIZES: dict[str, tuple[type[Sized], Callable[[Any, Any], bool]]] = {
    "minLength": (str, operator.ge),
    "maxLength": (str, operator.le),
    "minItems": (list, operator.ge),
    "maxItems": (list, operator.le),
    "minProperties": (dict, operator.ge),
    "maxProperties": (dict, operator.le),
}
SCHEMAS = ("items", "additionalProperties", "not")
LISTS_OF_SCHEMAS = ("anyOf", "allOf", "oneOf", "prefixItems")

Schema: TypeAlias = dict[str, Json] | bool


def check_schema(schema: Json, path: Path | str, depth: int = 0) -> None:
    """Check that a schema has only known keywords with fitting arguments.

    Raises:
        ProgramError: `program.schema`, with the path of the first fault.
    """
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        _refuse(f"a schema must be an object or a boolean, got {kind_of(schema)}", path)
    if depth > MAX_DEPTH:
        _refuse(f"a schema can be nested at most {MAX_DEPTH} levels deep", path)
    for keyword, argument in schema.items():
        here = Path(path, keyword)
        if keyword in _ARGUMENTS:
            is_valid, expected = _ARGUMENTS[keyword]
            if not is_valid(argument):
                shown = repr(argument)[:MAX_SHOWN]
                _refuse(f"`{keyword}` must be {expected}, got {shown}", here)
        elif keyword not in KEYWORDS and keyword not in ANNOTATIONS:
            known = ", ".join(sorted(KEYWORDS))
            message = f"`{shown_key(keyword)}` cannot be checked for variables"
            _refuse(f"{message}; known keywords: {known}", here)
        if keyword == "pattern":
            try:
                check_pattern(argument)
            except RegexError as error:
                _refuse(str(error), here)
    for inner_path, inner in _inner_schemas(schema, path):
        check_schema(inner, inner_path, depth + 1)


def find_violation(value: Json, schema: Schema) -> str | None:
    """Return the first violation of a checked schema, with its path; None if the value matches.

    Raises:
        MissingRegexLibraryError: if a text has to match a pattern and RE2 is missing.
    """
    try:
        return _Check().run(value, schema, "")
    except ExpressionError as error:
        return error.message


def find_mismatch(value: Json, variable: Variable) -> str | None:
    """Return why a value does not fit the declaration of its variable; None if it does.

    The subject of the returned sentence, the variable, is left out.
    """
    if not has_type(value, variable.type):
        return f"is declared as {variable.type}, got {kind_of(value)}"
    if variable.schema is None:
        return None
    violation = find_violation(value, variable.schema)
    return None if violation is None else f"does not match its schema: {violation}"


def mismatch_code(value: Json, variable: Variable) -> str:
    """Return the code of the error that a value does not fit the declaration of its variable."""
    return "variable.schema" if has_type(value, variable.type) else "variable.type"


def _inner_schemas(schema: dict[str, Json], path: Path | str) -> Iterator[tuple[Path, Json]]:
    for keyword in SCHEMAS:
        if keyword in schema:
            yield Path(path, keyword), schema[keyword]
    for keyword in LISTS_OF_SCHEMAS:
        for index, inner in enumerate(schema.get(keyword, ())):
            yield Path(Path(path, keyword), index), inner
    for name, inner in schema.get("properties", {}).items():
        yield Path(Path(path, "properties"), name), inner


def _refuse(message: str, path: Path | str) -> NoReturn:
    raise ProgramError("program.schema", message, path=str(path))


def _is_type(value: Json, name: str) -> bool:
    kind = kind_of(value)
    match name:
        case "integer":
            return kind == "int" or (isinstance(value, float) and value.is_integer())
        case "number":
            return kind in ("int", "float")
        case "boolean":
            return kind == "bool"
        case "array":
            return kind == "list"
        case _:
            return kind == name


def _are_types(argument: Json) -> bool:
    names = argument if isinstance(argument, list) else [argument]
    return bool(names) and all(name in TYPES for name in names)


def _is_size(argument: Json) -> bool:
    return _is_type(argument, "integer") and argument >= 0


def _are_names(argument: Json) -> bool:
    return isinstance(argument, list) and all(isinstance(each, str) for each in argument)


def _is_filled_list(argument: Json) -> bool:
    return isinstance(argument, list) and bool(argument)


_ARGUMENTS: Final[dict[str, tuple[Callable[[Json], bool], str]]] = {
    "type": (_are_types, f"one of {', '.join(TYPES)}, or a list of them"),
    "pattern": (lambda argument: isinstance(argument, str), "a string"),
    "properties": (lambda argument: isinstance(argument, dict), "an object of schemas"),
    "required": (_are_names, "a list of strings"),
    "enum": (_is_filled_list, "a list that is not empty"),
    **dict.fromkeys(LISTS_OF_SCHEMAS, (_is_filled_list, "a list that is not empty")),
    **dict.fromkeys(SIZES, (_is_size, "an integer from 0")),
    **dict.fromkeys(BOUNDS, (lambda argument: _is_type(argument, "number"), "a number")),
}
"""What the arguments of keywords must be, other than values and schemas."""
KEYWORDS: Final = frozenset({"const", *SCHEMAS, *_ARGUMENTS})


def _where(path: Path | str) -> str:
    return str(path) or "the value"


def _shown(value: Json) -> str:
    """Return a short value as JSON, and the kind of one that can be long."""
    if isinstance(value, list | dict):
        return f"({kind_of(value)} of {len(value):,})"
    if isinstance(value, str) and len(value) > MAX_SHOWN:
        return f"{json.dumps(value[:MAX_SHOWN], ensure_ascii=False)}..."
    return json.dumps(value, ensure_ascii=False)


class _Check:
    """The check of one value, within MAX_STEPS."""

    def __init__(self) -> None:
        self._steps_left = MAX_STEPS
        self._shown_enums: dict[int, str] = {}

    def run(self, value: Json, schema: Schema, path: Path | str) -> str | None:
        """Return the first violation in a value."""
        self._spend(1)
        if schema is True:
            return None
        if schema is False:
            return f"{_where(path)} is not allowed"
        return (
            self._own(value, schema, path)
            or self._combined(value, schema, path)
            or self._children(value, schema, path)
        )

    def _spend(self, steps: int) -> None:
        self._steps_left -= steps
        if self._steps_left < 0:
            raise ExpressionError("expr.size", "the value is too large to be checked by a schema")

    def _own(self, value: Json, schema: dict[str, Json], path: Path | str) -> str | None:
        """Check the keywords that look at the value itself."""
        self._spend(len(schema))
        if "type" in schema:
            names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            if not any(_is_type(value, name) for name in names):
                return f"{_where(path)} is {kind_of(value)}, not {' or '.join(names)}"
        if "const" in schema and not equal(value, schema["const"], self._spend):
            return f"{_where(path)} is {_shown(value)}, not the constant {_shown(schema['const'])}"
        if "enum" in schema and not any(equal(value, each, self._spend) for each in schema["enum"]):
            known = self._shown_enum(schema["enum"])
            return f"{_where(path)} is {_shown(value)}, not one of {known}"
        for keyword, argument in schema.items():
            if keyword in BOUNDS and _is_type(value, "number"):
                if not BOUNDS[keyword](value, argument):
                    return f"{_where(path)} is {value}, against `{keyword}` {argument}"
            elif keyword in SIZES:
                kind, fits = SIZES[keyword]
                if isinstance(value, kind) and not fits(len(value), argument):
                    length = f"length {len(value)}"
                    return f"{_where(path)} has {length}, against `{keyword}` {argument}"
        return self._pattern(value, schema, path)

    def _shown_enum(self, values: list[Json]) -> str:
        """Return the values of an `enum`, of a long one the first. Each is formatted once."""
        shown = self._shown_enums.get(id(values))
        if shown is None:
            shown = ", ".join(map(_shown, values[:MAX_SHOWN_VALUES]))
            if len(values) > MAX_SHOWN_VALUES:
                shown += f" and {len(values) - MAX_SHOWN_VALUES:,} others"
            self._shown_enums[id(values)] = shown
        return shown

    def _pattern(self, value: Json, schema: dict[str, Json], path: Path | str) -> str | None:
        if "pattern" not in schema or not isinstance(value, str):
            return None
        regex = compile_regex(schema["pattern"])
        self._spend(regex.cost(value))
        matches = regex.is_match(value)
        if matches:
            return None
        return f"{_where(path)} does not match `pattern` {schema['pattern']!r}"

    def _combined(self, value: Json, schema: dict[str, Json], path: Path | str) -> str | None:
        for inner in schema.get("allOf", ()):
            if (violation := self.run(value, inner, path)) is not None:
                return violation
        for keyword in ("anyOf", "oneOf"):
            if keyword not in schema:
                continue
            num_matches = sum(self.run(value, inner, path) is None for inner in schema[keyword])
            if num_matches == 0 or (keyword == "oneOf" and num_matches > 1):
                return f"{_where(path)} matches {num_matches} of the schemas in `{keyword}`"
        if "not" in schema and self.run(value, schema["not"], path) is None:
            return f"{_where(path)} matches the schema in `not`"
        return None

    def _children(self, value: Json, schema: dict[str, Json], path: Path | str) -> str | None:
        if isinstance(value, list):
            first = schema.get("prefixItems", [])
            for index, item in enumerate(value):
                inner = first[index] if index < len(first) else schema.get("items", True)
                if (violation := self.run(item, inner, Path(path, index))) is not None:
                    return violation
        if isinstance(value, dict):
            properties = schema.get("properties", {})
            for name in schema.get("required", ()):
                if name not in value:
                    return f"{_where(path)} has no `{shown_key(name)}`"
            for name, item in value.items():
                inner = properties.get(name, schema.get("additionalProperties", True))
                if (violation := self.run(item, inner, Path(path, name))) is not None:
                    return violation
        return None
