"""Validates finished texts against relaxed JSON schemas, reading them as their grammars do.

A schema is relaxed if the grammar library cannot enforce some of its keywords. The whole text is
validated then, against all keywords. Those that the grammar has enforced must not fail, and those
within an unenforced keyword, as `pattern` within `not`, have the meaning that they have elsewhere:

    numbers              exact decimals: 0.3 is a multiple of 0.1
    pattern, format      matched by the grammar library, whose regexes are not Python's. Python
                         matches patterns that only it reads, such as those with lookaround, and
                         strings that exceed the limits of the library
    dialects             keywords beside `$ref`, and `const`, apply in every one

Out of scope: processes, and which schemas are relaxed.

Invariants: external references are not fetched.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator
from decimal import Decimal, InvalidOperation
from typing import Any, Final

import msgspec

from ..protocol import EngineError
from . import grammar

_Errors = Iterator[Any]
_DATA: Final = ("const", "enum")
"""Keywords whose values contain no schemas."""
_NAMED_SCHEMAS: Final = (
    "properties",
    "patternProperties",
    "dependentSchemas",
    "dependencies",
    "$defs",
    "definitions",
)
"""Keywords whose values are objects of schemas, under any names."""
_OTHER_PROPERTIES: Final = ("additionalProperties", "unevaluatedProperties")


def check_schema(schema: Any) -> None:
    """Reject a value that is not a JSON schema, because no text can be validated against it.

    Raises:
        EngineError: `constraint.invalid`.
    """
    from jsonschema import FormatChecker
    from jsonschema.exceptions import SchemaError

    try:
        kind = _dialect(schema)
        formats = FormatChecker(())
        formats.checkers = {**kind.FORMAT_CHECKER.checkers, "regex": (_check_regex, re.error)}
        kind.check_schema(schema, format_checker=formats)
    except SchemaError as error:
        where = "".join(f"[{step!r}]" for step in error.absolute_path)
        raise EngineError(
            "constraint.invalid",
            grammar.message(f"not a JSON schema: {error.message} (at {where})"),
        ) from None
    except RecursionError:
        raise EngineError("constraint.invalid", "the schema is nested too deeply") from None
    except MemoryError:
        raise
    except Exception as error:
        # A `$schema` that is not a string, or a number in a pattern that is too large.
        raise EngineError(
            "constraint.invalid", grammar.message(f"not a JSON schema: {error!r}")
        ) from error


def is_valid(schema: Any, text: str) -> bool:
    """Return whether a text is JSON that a schema allows.

    Takes unbounded time for some schemas: call it in a process that can be killed.

    Raises:
        EngineError: `constraint.invalid` if the schema turns out to be invalid;
            `constraint.too_complex` if one of its patterns is, for a string of the text.
    """
    from referencing import Registry

    try:
        msgspec.json.decode(text)  # within the limits of values
        value = json.loads(text, parse_float=_number)
    except (ValueError, RecursionError):
        return False
    try:
        # An empty registry: the default one would fetch the target of a `$ref`.
        validator = _validator_class(schema)(_exact(schema), registry=Registry())
        return bool(validator.is_valid(value))
    except (EngineError, MemoryError):
        raise
    except Exception as error:
        # Dangling or circular references, among many other errors.
        raise EngineError(
            "constraint.invalid",
            grammar.message(f"texts cannot be validated against the schema: {error!r}"),
        ) from error


def _number(text: str) -> Decimal:
    """Return a number with a fraction or an exponent: exactly, unless its exponent is too large."""
    try:
        return Decimal(text)
    except InvalidOperation:
        return Decimal(repr(float(text)))


def _dialect(schema: Any) -> Any:
    """Return the library's validator class of a schema's dialect."""
    # Imported here: only the sandbox process validates.
    from jsonschema import Draft202012Validator
    from jsonschema.validators import validator_for

    return validator_for(schema, default=Draft202012Validator)


def _validator_class(schema: Any) -> Any:
    """Return a validator class that reads a schema of its dialect as a grammar does."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import create

    kind = _dialect(schema)
    strings = _StringLanguages()
    keywords = {
        "multipleOf": _multiple_of,
        "divisibleBy": _multiple_of,
        "pattern": strings.pattern,
        "format": strings.format,
        "patternProperties": strings.pattern_properties,
        "additionalProperties": strings.additional_properties,
        "unevaluatedProperties": strings.unevaluated_properties,
    }
    types = kind.TYPE_CHECKER
    if types.is_type(1.0, "integer"):
        types = types.redefine("integer", _is_integer)
    known = {"const": Draft202012Validator.VALIDATORS["const"], **kind.VALIDATORS}
    return create(
        kind.META_SCHEMA,
        known | {name: read for name, read in keywords.items() if name in known},
        type_checker=types,
        id_of=kind.ID_OF,
        applicable_validators=_all_keywords,
    )


def _exact(value: Any, keyword: str = "") -> Any:
    """Return a copy of a schema with exact numbers, and without names of dialects.

    Where a `$ref` leads to a name of a dialect, the library would take its own class of it.

    Args:
        value: A part of the schema.
        keyword: The keyword that the part is the value of; empty if it is none's.
    """
    match value:
        case float():
            return Decimal(repr(value))
        case list():
            return [_exact(each, keyword) for each in value]
        case dict() if keyword in _DATA:
            return {name: _exact(each, keyword) for name, each in value.items()}
        case dict() if keyword in _NAMED_SCHEMAS:
            return {name: _exact(each) for name, each in value.items()}
        case dict():
            return {name: _exact(each, name) for name, each in value.items() if name != "$schema"}
    return value


def _all_keywords(schema: Any) -> Any:
    """Return the keywords of a schema, also if `$ref` is among them."""
    return schema.items()


def _is_integer(_types: Any, value: Any) -> bool:
    if isinstance(value, Decimal):
        return bool(value == value.to_integral_value())
    return isinstance(value, int) and not isinstance(value, bool)


def _multiple_of(validator: Any, divisor: Any, value: Any, _schema: Any) -> _Errors:
    if validator.is_type(value, "number") and not _is_multiple(Decimal(value), Decimal(divisor)):
        yield _error("multipleOf")


def _is_multiple(value: Decimal, divisor: Decimal) -> bool:
    """Return whether a number is a multiple of another one, also if their exponents are large."""
    number, exponent = _digits(value)
    unit, unit_exponent = _digits(divisor)
    shift = exponent - unit_exponent
    if shift >= 0:
        return number * pow(10, shift, unit) % unit == 0
    if -shift > number.bit_length():
        return number == 0
    return number % (unit * int(10**-shift)) == 0


def _digits(number: Decimal) -> tuple[int, int]:
    """Return a number's digits as an integer without sign, and its exponent."""
    _, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int), "JSON has finite numbers"
    return int(Decimal((0, digits, 0))), exponent


class _StringLanguages:
    """Keywords whose regexes and formats are matched as in a grammar. Each is compiled once."""

    def __init__(self) -> None:
        self._tokenizer: Final = grammar.byte_tokenizer(())
        self._languages: dict[tuple[str, str], Callable[[str], bool] | None] = {}

    def pattern(self, validator: Any, pattern: str, value: Any, _schema: Any) -> _Errors:
        if validator.is_type(value, "string") and not self._matches(pattern, value):
            yield _error("pattern")

    def format(self, validator: Any, name: str, value: Any, _schema: Any) -> _Errors:
        # A format that no grammar enforces is a comment.
        if validator.is_type(value, "string"):
            language = self._language("format", name)
            if language is not None and not language(value):
                yield _error("format")

    def pattern_properties(
        self, validator: Any, patterns: dict[str, Any], value: Any, _schema: Any
    ) -> _Errors:
        if validator.is_type(value, "object"):
            for pattern, schema in patterns.items():
                for name, each in value.items():
                    if self._matches(pattern, name):
                        yield from validator.descend(each, schema, path=name, schema_path=pattern)

    def additional_properties(
        self, validator: Any, allowed: Any, value: Any, schema: dict[str, Any]
    ) -> _Errors:
        if not validator.is_type(value, "object"):
            return
        named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        for name, each in value.items():
            if name in named or any(self._matches(pattern, name) for pattern in patterns):
                continue
            if allowed is False:
                yield _error("additionalProperties")
            elif allowed is not True:
                yield from validator.descend(each, allowed, path=name)

    def unevaluated_properties(
        self, validator: Any, allowed: Any, value: Any, schema: dict[str, Any]
    ) -> _Errors:
        if validator.is_type(value, "object"):
            evaluated = set(self._evaluated(validator, value, schema))
            for name in value.keys() - evaluated:
                yield from validator.descend(value[name], allowed, path=name)

    def _evaluated(self, validator: Any, value: dict[str, Any], schema: Any) -> Iterator[str]:
        """Return the names that a schema which allows an object evaluates, among others."""
        if not isinstance(schema, dict):
            return
        yield from schema.get("properties", {})
        patterns = schema.get("patternProperties", {})
        others = [schema[name] for name in _OTHER_PROPERTIES if name in schema]
        for name, each in value.items():
            if any(self._matches(pattern, name) for pattern in patterns) or any(
                _allows(validator, other, each) for other in others
            ):
                yield name
        for target in _references(validator, schema):
            referrer = validator.evolve(schema=target.contents, _resolver=target.resolver)
            yield from self._evaluated(referrer, value, target.contents)
        for branch in _branches(validator, value, schema):
            yield from self._evaluated(validator, value, branch)

    def _matches(self, pattern: str, text: str) -> bool:
        language = self._language("pattern", pattern)
        return bool(_python_regex(pattern).search(text)) if language is None else language(text)

    def _language(self, keyword: str, name: str) -> Callable[[str], bool] | None:
        """Return whether a grammar matches a string; None if none enforces the keyword."""
        key = keyword, name
        if key not in self._languages:
            self._languages[key] = _language(self._tokenizer, keyword, name)
        return self._languages[key]


def _allows(validator: Any, schema: Any, value: Any) -> bool:
    return next(validator.descend(value, schema), None) is None


def _references(validator: Any, schema: dict[str, Any]) -> Iterator[Any]:
    """Return the targets of a schema's references. The library has no public name for them."""
    from referencing.jsonschema import lookup_recursive_ref

    resolver, known = validator._resolver, validator.VALIDATORS
    for keyword in ("$ref", "$dynamicRef"):
        if keyword in schema and keyword in known:
            yield resolver.lookup(schema[keyword])
    if "$recursiveRef" in schema and "$recursiveRef" in known:
        yield lookup_recursive_ref(resolver)


def _branches(validator: Any, value: dict[str, Any], schema: dict[str, Any]) -> Iterator[Any]:
    """Return the subschemas that a schema applies to an object itself, if they allow it."""
    for name, each in schema.get("dependentSchemas", {}).items():
        if name in value:
            yield each
    for keyword in ("allOf", "anyOf", "oneOf"):
        for each in schema.get(keyword, ()):
            if _allows(validator, each, value):
                yield each
    if "if" in schema and _allows(validator, schema["if"], value):
        yield from (schema["if"], schema.get("then", True))
    elif "if" in schema:
        yield schema.get("else", True)


def _language(tokenizer: Any, keyword: str, name: str) -> Callable[[str], bool] | None:
    """Compile a keyword of strings; None if a grammar cannot enforce it."""
    schema = {"type": "string", keyword: name}
    constraint = msgspec.json.encode({"grammars": [{"json_schema": schema}]}).decode()
    try:
        compiled = grammar.compile_grammar(tokenizer, constraint)
    except EngineError:
        return None

    def matches(text: str) -> bool:
        nonlocal compiled
        tokens = list(_quoted(text))
        try:
            return grammar.accepts(compiled, tokens)
        except EngineError:
            # Other texts may have used up the limits, which are those of one compiled grammar.
            compiled = grammar.compile_grammar(tokenizer, constraint)
        try:
            return grammar.accepts(compiled, tokens)
        except EngineError:
            regex = _python_regex_or_none(name) if keyword == "pattern" else None
            if regex is None:
                raise
            return bool(regex.search(text))

    return matches


def _quoted(text: str) -> bytes:
    """Return a string as a grammar spells it."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f").encode()


def _python_regex(pattern: str) -> re.Pattern[str]:
    with warnings.catch_warnings(action="ignore"):  # of syntax that may get another meaning
        return re.compile(pattern)


def _python_regex_or_none(pattern: str) -> re.Pattern[str] | None:
    try:
        return _python_regex(pattern)
    except (re.error, OverflowError):
        return None


def _check_regex(pattern: Any) -> bool:
    """Return True for a regex, or for a value of another type. Raise Python's error otherwise."""
    try:
        return not isinstance(pattern, str) or bool(_python_regex(pattern))
    except (re.error, OverflowError):
        if _language(grammar.byte_tokenizer(()), "pattern", pattern) is None:
            raise
        return True


def _error(keyword: str) -> Any:
    """Return the error of a keyword. Only its existence matters."""
    from jsonschema import ValidationError

    return ValidationError(keyword)
