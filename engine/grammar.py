"""Grammars as llguidance compiles them: limits, and how a refusal reads.

A constraint travels as JSON, `{"grammars": [{"lark_grammar": ...} or {"json_schema": ...}]}`.
A JSON schema is compiled strictly first: what the compiler cannot enforce is refused, not
passed over. Where that fails it is compiled leniently, and then the finished text has to be
held against the schema (`schema_of`, `is_valid`): it is *relaxed*.

Knows grammars and their compiler; refuses to know threads, processes, contexts and steps.
Kept true: whatever a grammar is, compiling it ends in a matcher or an EngineError.

    constraint.invalid        no grammar, or one that no text can satisfy
    constraint.too_large      more text than MAX_BYTES
    constraint.too_complex    one that cannot even be begun within `limits`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import llguidance
import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from .api import EngineError

MAX_BYTES: Final = 2 * 1024 * 1024
"""Of a constraint's JSON."""
MAX_STATES: Final = 20_000
"""Lexer states that all outputs under one compiled grammar may make; about 1.2 kB each."""
_MAX_MESSAGE: Final = 300
_NO_WAY_ON: Final = "NoExtensionBias"
"""How the compiler says that nothing can follow."""
_MUCH_FORCED: Final = "ff_tokens"
"""What it names where more text is forced than it follows at once: no choice is reached."""


class Compiled(NamedTuple):
    """A grammar that outputs can be held to."""

    matcher: LLMatcher
    """At the start of the language; copied for every output, never moved itself."""
    source: str
    """What it was compiled from: the constraint, or its relaxed form."""


def compile_grammar(tokenizer: LLTokenizer, constraint: str) -> Compiled:
    """Compile a constraint exactly as it is written, relaxed already or not.

    Raises:
        EngineError: `constraint.invalid` or `constraint.too_large`.
    """
    if len(constraint) > MAX_BYTES:
        raise EngineError(
            "constraint.too_large",
            f"a constraint of {len(constraint):,} characters; at most {MAX_BYTES:,} are taken",
        )
    matcher = LLMatcher(tokenizer, constraint, log_level=0, limits=limits())
    if matcher.is_error():
        what = "grammar" if schema_of(constraint) is None else "JSON schema"
        reason = f"the {what} cannot be compiled: {matcher.get_error()}"
        raise EngineError("constraint.invalid", _message(reason))
    return Compiled(matcher, constraint)


def check_beginning(compiled: Compiled) -> None:
    """Refuse a language that no text of belongs to, or that cannot be followed to its first choice.

    The compiler takes a rule that leads to itself alone. And it builds its lexer only as masks
    are asked for, which is where an ambiguous grammar grows.

    Raises:
        EngineError: `constraint.invalid` or `constraint.too_complex`.
    """
    matcher = compiled.matcher.deep_copy()
    matcher.consume_tokens(matcher.compute_ff_tokens())
    if not matcher.is_stopped():
        matcher.compute_bitmask()
    reason = matcher.get_error() if matcher.is_error() else ""
    if not reason or _MUCH_FORCED in reason:
        return
    if reason.startswith(_NO_WAY_ON):
        raise EngineError(
            "constraint.invalid",
            "no text belongs to the language: a rule or $ref leads to itself alone, or a class "
            "of characters is empty",
        )
    raise EngineError(
        "constraint.too_complex",
        _message(f"the grammar is too complex; make it smaller or less ambiguous: {reason}"),
    )


def compile_strict_or_relaxed(tokenizer: LLTokenizer, constraint: str) -> Compiled:
    """Compile a constraint, leniently where strictly does not do.

    Raises:
        EngineError: the strict compiler's reason, if both refuse.
    """
    try:
        return compile_grammar(tokenizer, constraint)
    except EngineError as error:
        relaxed = relax(constraint) if error.code == "constraint.invalid" else None
        if relaxed is None:
            raise
        try:
            return compile_grammar(tokenizer, relaxed)
        except EngineError:
            raise error from None


def limits() -> LLParserLimits:
    """Return what compiling and one step may cost.

    Rows of 1,000 items cost an ambiguous grammar 40 ms a token before it is refused; those
    of the compiler's default, 2,000, cost it 400 ms.
    """
    return LLParserLimits(
        max_items_in_row=1_000,
        step_max_items=20_000,
        max_lexer_states=MAX_STATES,
        verbose_errors=False,
    )


def relax(constraint: str) -> str | None:
    """Return a constraint that is one schema, to be compiled leniently; None for any other."""
    schema = schema_of(constraint)
    if not isinstance(schema, dict):
        return None
    options = schema.get("x-guidance")
    options = {**(options if isinstance(options, dict) else {}), "lenient": True}
    lenient = {"json_schema": {**schema, "x-guidance": options}}
    return msgspec.json.encode({"grammars": [lenient]}).decode()


def schema_of(constraint: str) -> Any:
    """Return the JSON schema that a constraint consists of; None for any other one."""
    grammars = _grammars(constraint)
    return grammars[0].get("json_schema") if len(grammars) == 1 else None


def check_schema(schema: Any) -> None:
    """Refuse what is no JSON schema; texts could not be held against it.

    Raises:
        EngineError: `constraint.invalid`.
    """
    from jsonschema.exceptions import SchemaError

    kind = _validator(schema)
    try:
        kind.check_schema(schema, format_checker=kind.FORMAT_CHECKER)
    except SchemaError as error:
        where = "".join(f"[{step!r}]" for step in error.absolute_path)
        raise EngineError(
            "constraint.invalid", _message(f"not a JSON schema: {error.message} (at {where})")
        ) from None
    except RecursionError:
        raise EngineError("constraint.invalid", "the schema is nested too deeply") from None


def is_valid(schema: Any, text: str) -> bool:
    """Say whether a text is JSON that a schema allows; what the schema refers to stays unread.

    Takes as long as the schema wants: to be called where that can be ended from outside.

    Raises:
        EngineError: `constraint.invalid` if the schema turns out to be no schema.
    """
    from referencing import Registry

    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    # A registry of our own: the library's default one would fetch what a `$ref` names.
    validator = _validator(schema)(schema, registry=Registry())
    try:
        return bool(validator.is_valid(value))
    except Exception as error:
        # References that lead nowhere or in circles; there are many more ways to be wrong.
        raise EngineError(
            "constraint.invalid",
            _message(f"no text can be held against the schema: {error!r}"),
        ) from error


def _validator(schema: Any) -> Any:
    """Return the class of validators for a schema's dialect."""
    # Imported here: the engine itself compiles only.
    from jsonschema import Draft202012Validator
    from jsonschema.validators import validator_for

    return validator_for(schema, default=Draft202012Validator)


def accepts(compiled: Compiled, tokens: Sequence[int]) -> bool:
    """Say whether these tokens are a whole text of the language."""
    matcher = compiled.matcher.deep_copy()
    return (
        matcher.try_consume_tokens(list(tokens)) == len(tokens)
        and matcher.is_accepting()
        and not matcher.is_error()
    )


def byte_tokenizer(special: Sequence[str]) -> LLTokenizer:
    """Return a tokenizer of 256 bytes and the given special tokens: made in a millisecond."""
    return LLTokenizer(llguidance.TokenizerWrapper(_Bytes(special)), eos_token=[256])


class _Bytes:
    """What llguidance wants to know of a tokenizer (its names)."""

    bos_token_id = None
    eos_token_id = 256

    def __init__(self, special: Sequence[str]) -> None:
        names = ["<|conure:end|>", *special]
        self.tokens = [bytes([byte]) for byte in range(256)] + [name.encode() for name in names]
        self.special_token_ids = list(range(256, len(self.tokens)))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def _grammars(constraint: str) -> list[dict[str, Any]]:
    """Return the grammars of a constraint; none where it is not the JSON it should be."""
    try:
        content = msgspec.json.decode(constraint)
    except (msgspec.DecodeError, RecursionError):
        return []
    grammars = content.get("grammars") if isinstance(content, dict) else None
    if not isinstance(grammars, list) or not all(isinstance(each, dict) for each in grammars):
        return []
    return grammars


def _message(reason: str) -> str:
    """Return the compiler's reason as one line; it goes on with its state, which tells nobody."""
    line = " ".join(reason.split("\n<")[0].split()) or "the grammar cannot be compiled"
    return line if len(line) <= _MAX_MESSAGE else line[:_MAX_MESSAGE] + " ..."
