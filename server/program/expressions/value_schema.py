"""JSON Schemas of variables: the subset whose check takes bounded time.

A schema has no references and only the keywords below, so that a check visits each part of a value
at most once per part of the schema. Other keywords are refused when the program is submitted, not
ignored.

Out of scope: constraints on outputs, which engines enforce (`grammar`).

Invariant: a value is checked against a checked schema within `MAX_STEPS`, or refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeAlias

from ..content import Json
from ..errors import ExpressionError, ProgramError
from ..ir import Variable
from .regex import RegexError, check_pattern, compile_regex
from .values import equal, has_type, kind_of

MAX_STEPS = 500_000
"""Parts of the value times parts of the schema."""
MAX_DEPTH = 32

TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
ANNOTATIONS = frozenset({"title", "description", "default", "examples", "$comment", "$schema"})
BOUNDS: dict[str, Callable[[Any, Any], bool]] = {
    "minimum": lambda value, bound: value >= bound,
    "maximum": lambda value, bound: value <= bound,
    "exclusiveMinimum": lambda value, bound: value > bound,
    "exclusiveMaximum": lambda value, bound: value < bound,
}
SIZES: dict[str, tuple[type, Callable[[int, int], bool]]] = {
    "minLength": (str, lambda size, bound: size >= bound),
    "maxLength": (str, lambda size, bound: size <= bound),
    "minItems": (list, lambda size, bound: size >= bound),
    "maxItems": (list, lambda size, bound: size <= bound),
    "minProperties": (dict, lambda size, bound: size >= bound),
    "maxProperties": (dict, lambda size, bound: size <= bound),
}
SCHEMAS = ("items", "additionalProperties", "not")
LISTS_OF_SCHEMAS = ("anyOf", "allOf", "oneOf", "prefixItems")
KEYWORDS = frozenset(
    {"type", "enum", "const", "required", "properties", "pattern"}
    | BOUNDS.keys()
    | SIZES.keys()
    | {*SCHEMAS, *LISTS_OF_SCHEMAS}
)

Schema: TypeAlias = dict[str, Json] | bool


def check_schema(schema: Json, path: str, depth: int = 0) -> None:
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
        here = f"{path}.{keyword}"
        if keyword not in KEYWORDS | ANNOTATIONS:
            known = ", ".join(sorted(KEYWORDS))
            _refuse(f"`{keyword}` cannot be checked for variables; known keywords: {known}", here)
        expected = _expected_argument(keyword, argument)
        if expected:
            _refuse(f"`{keyword}` must be {expected}, got {kind_of(argument)}", here)
        if keyword == "pattern":
            try:
                check_pattern(argument)
            except RegexError as error:
                _refuse(str(error), here)
    for where, inner in _inner_schemas(schema):
        check_schema(inner, f"{path}.{where}", depth + 1)


def find_violation(value: Json, schema: Schema) -> str | None:
    """Return what is wrong with a value, with its path; None if it matches a checked schema."""
    try:
        return _Check().run(value, schema, "")
    except ExpressionError as error:
        return error.message


def find_mismatch(value: Json, variable: Variable) -> str | None:
    """Return why a value does not fit the declaration of its variable; None if it does."""
    if not has_type(value, variable.type):
        return f"is declared as {variable.type}, got {kind_of(value)}"
    if variable.schema is None:
        return None
    violation = find_violation(value, variable.schema)
    return None if violation is None else f"does not match its schema: {violation}"


def _expected_argument(keyword: str, argument: Json) -> str | None:
    """Return what the argument of a keyword must be, if it is something else."""
    is_number = isinstance(argument, int | float) and not isinstance(argument, bool)
    is_list = isinstance(argument, list)
    if keyword == "type":
        names = argument if is_list else [argument]
        is_known = bool(names) and all(name in TYPES for name in names)
        return None if is_known else f"one of {', '.join(TYPES)}, or a list of them"
    if keyword in SIZES:
        is_size = is_number and isinstance(argument, int) and argument >= 0
        return None if is_size else "a number from 0"
    if keyword in BOUNDS:
        return None if is_number else "a number"
    if keyword == "pattern":
        return None if isinstance(argument, str) else "a string"
    if keyword == "required":
        is_names = is_list and all(isinstance(name, str) for name in argument)
        return None if is_names else "a list of strings"
    if keyword == "enum" or keyword in LISTS_OF_SCHEMAS:
        return None if argument and is_list else "a list that is not empty"
    if keyword == "properties":
        return None if isinstance(argument, dict) else "an object of schemas"
    return None


def _inner_schemas(schema: dict[str, Json]) -> Iterator[tuple[str, Json]]:
    for keyword in SCHEMAS:
        if keyword in schema:
            yield keyword, schema[keyword]
    for keyword in LISTS_OF_SCHEMAS:
        for index, inner in enumerate(schema.get(keyword, ())):
            yield f"{keyword}[{index}]", inner
    for name, inner in schema.get("properties", {}).items():
        yield f"properties.{name}", inner


def _refuse(message: str, path: str) -> NoReturn:
    raise ProgramError("program.schema", message, path=path)


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


class _Check:
    """The check of one value; counts its steps."""

    def __init__(self) -> None:
        self._steps = MAX_STEPS

    def run(self, value: Json, schema: Schema, path: str) -> str | None:
        """Return the first violation in a value."""
        self._spend(1)
        if schema is True:
            return None
        where = path or "the value"
        if schema is False:
            return f"{where} is not allowed"
        return (
            self._own(value, schema, where)
            or self._combined(value, schema, path)
            or self._children(value, schema, path)
        )

    def _spend(self, steps: int) -> None:
        self._steps -= steps
        if self._steps < 0:
            raise ExpressionError("expr.size", "the value is too large to be checked by a schema")

    def _own(self, value: Json, schema: dict[str, Json], where: str) -> str | None:
        """Check the keywords that look at the value itself."""
        self._spend(len(schema))
        if "type" in schema:
            names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            if not any(_is_type(value, name) for name in names):
                return f"{where} is {kind_of(value)}, not {' or '.join(names)}"
        if "const" in schema and not equal(value, schema["const"], self._spend):
            return f"{where} is not the constant of its schema"
        if "enum" in schema and not any(equal(value, each, self._spend) for each in schema["enum"]):
            return f"{where} is not one of the {len(schema['enum'])} values of its schema"
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        for keyword in BOUNDS.keys() & schema.keys() if is_number else ():
            if not BOUNDS[keyword](value, schema[keyword]):
                return f"{where} is {value}, against `{keyword}` {schema[keyword]}"
        for keyword in SIZES.keys() & schema.keys():
            kind, fits = SIZES[keyword]
            size = len(value) if isinstance(value, str | list | dict) else 0
            if isinstance(value, kind) and not fits(size, schema[keyword]):
                return f"{where} has length {size}, against `{keyword}` {schema[keyword]}"
        return self._pattern(value, schema, where)

    def _pattern(self, value: Json, schema: dict[str, Json], where: str) -> str | None:
        if "pattern" not in schema or not isinstance(value, str):
            return None
        try:
            regex = compile_regex(schema["pattern"])
        except RegexError as error:
            return str(error)
        self._spend(regex.cost(value))
        matches = regex.is_match(value)
        return None if matches else f"{where} does not match `pattern` {schema['pattern']!r}"

    def _combined(self, value: Json, schema: dict[str, Json], path: str) -> str | None:
        where = path or "the value"
        for inner in schema.get("allOf", ()):
            if (violation := self.run(value, inner, path)) is not None:
                return violation
        for keyword in ("anyOf", "oneOf"):
            if keyword not in schema:
                continue
            num = sum(self.run(value, inner, path) is None for inner in schema[keyword])
            if num == 0 or (keyword == "oneOf" and num > 1):
                return f"{where} matches {num} of the schemas in `{keyword}`"
        if "not" in schema and self.run(value, schema["not"], path) is None:
            return f"{where} matches the schema in `not`"
        return None

    def _children(self, value: Json, schema: dict[str, Json], path: str) -> str | None:
        if isinstance(value, list):
            first = schema.get("prefixItems", [])
            for index, item in enumerate(value):
                inner = first[index] if index < len(first) else schema.get("items", True)
                if (violation := self.run(item, inner, f"{path}[{index}]")) is not None:
                    return violation
        if isinstance(value, dict):
            properties = schema.get("properties", {})
            for name in schema.get("required", ()):
                if name not in value:
                    return f"{path or 'the value'} has no `{name}`"
            for name, item in value.items():
                inner = properties.get(name, schema.get("additionalProperties", True))
                if (violation := self.run(item, inner, f"{path}.{name}")) is not None:
                    return violation
        return None
