"""Compiles grammars with llguidance, with limits and readable errors.

A constraint is sent as JSON, `{"grammars": [{"lark_grammar": ...} or {"json_schema": ...}]}`. A
JSON schema is compiled strictly first: keywords that the compiler cannot enforce are rejected, not
ignored. If that fails, the schema is compiled leniently: it is *relaxed*, and the finished text
must be validated against the schema (`schema_of`, `validation`).

Out of scope: threads, processes, contexts and steps.

Invariants: compiling any string ends in a matcher or an EngineError.

    constraint.invalid        not a grammar, or a grammar that no text matches
    constraint.too_large      longer than MAX_CHARACTERS
    constraint.too_complex    exceeds `limits` before the first token that is not forced, or on a
                              finished text
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import llguidance
import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from ..protocol import EngineError

MAX_CHARACTERS: Final = 2 * 1024 * 1024
"""Most characters of a constraint's JSON."""
MAX_STATES: Final = 20_000
"""Most lexer states that the outputs of one compiled grammar create in total; about 1.2 kB each."""
_MAX_MESSAGE: Final = 300
_NO_NEXT_TOKEN: Final = "NoExtensionBias"
"""The compiler's error if no token can follow."""
_LONG_FORCED_TEXT: Final = "ff_tokens"
"""Part of the compiler's error if a grammar forces more text than it processes at once."""
_MISMATCHES: Final = ("doesn't satisfy the grammar", "parser stopped in consume_token")
"""Parts of a matcher's errors if a token cannot follow. Any other error is a failure."""
_END_ID: Final = 256
"""The token of `byte_tokenizer` that ends a text."""


class CompiledGrammar(NamedTuple):
    """A compiled grammar and its source."""

    matcher: LLMatcher
    """The matcher before the first token. Each output advances a copy of it."""
    source: str
    """The constraint, or its relaxed form."""


def compile_grammar(tokenizer: LLTokenizer, constraint: str) -> CompiledGrammar:
    """Compile a constraint without relaxing it.

    Raises:
        EngineError: `constraint.invalid` or `constraint.too_large`.
    """
    if len(constraint) > MAX_CHARACTERS:
        raise EngineError(
            "constraint.too_large",
            f"the constraint has {len(constraint):,} characters; the limit is {MAX_CHARACTERS:,}",
        )
    matcher = LLMatcher(tokenizer, constraint, log_level=0, limits=limits())
    if matcher.is_error():
        what = "grammar" if schema_of(constraint) is None else "JSON schema"
        reason = f"the {what} cannot be compiled: {matcher.get_error()}"
        raise EngineError("constraint.invalid", message(reason))
    return CompiledGrammar(matcher, constraint)


def check_first_choice(compiled: CompiledGrammar) -> None:
    """Reject an empty language, and a grammar too complex to compute the mask of the first choice.

    Compilation detects neither: it accepts a rule that only leads to itself, and llguidance builds
    the lexer states of an ambiguous grammar when it computes masks.

    Raises:
        EngineError: `constraint.invalid` or `constraint.too_complex`.
    """
    matcher = compiled.matcher.deep_copy()
    matcher.consume_tokens(matcher.compute_ff_tokens())
    if not matcher.is_stopped():
        matcher.compute_bitmask()
    reason = matcher.get_error() if matcher.is_error() else ""
    if not reason or _LONG_FORCED_TEXT in reason:
        return
    if reason.startswith(_NO_NEXT_TOKEN):
        raise EngineError(
            "constraint.invalid",
            "no text belongs to the language: a rule or $ref only leads to itself, or a "
            "character class is empty",
        )
    raise EngineError(
        "constraint.too_complex",
        message(f"the grammar is too complex; make it smaller or less ambiguous: {reason}"),
    )


def compile_strict_or_relaxed(tokenizer: LLTokenizer, constraint: str) -> CompiledGrammar:
    """Compile a constraint strictly, or leniently if that fails.

    Raises:
        EngineError: the error of the strict compilation, if both fail.
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
    """Return the limits on compiling a grammar and on computing one mask.

    With 1,000 items per row, an ambiguous grammar takes 40 ms per token before it fails; with
    2,000, the compiler's default, it takes 400 ms.
    """
    return LLParserLimits(
        max_items_in_row=1_000,
        step_max_items=20_000,
        max_lexer_states=MAX_STATES,
        verbose_errors=False,
    )


def relax(constraint: str) -> str | None:
    """Return the lenient form of a constraint that is one JSON schema; None for any other."""
    schema = schema_of(constraint)
    if not isinstance(schema, dict):
        return None
    options = schema.get("x-guidance")
    options = {**(options if isinstance(options, dict) else {}), "lenient": True}
    lenient = {"json_schema": {**schema, "x-guidance": options}}
    return msgspec.json.encode({"grammars": [lenient]}).decode()


def schema_of(constraint: str) -> Any:
    """Return the JSON schema that a constraint consists of, or None."""
    grammars = _grammars(constraint)
    return grammars[0].get("json_schema") if len(grammars) == 1 else None


def accepts(compiled: CompiledGrammar, tokens: Sequence[int]) -> bool:
    """Return whether tokens of `byte_tokenizer` are a complete text of the language.

    All calls for one compiled grammar share its lexer and the lexer's limits.

    Raises:
        EngineError: `constraint.too_complex` if the matcher exceeds `limits`.
    """
    matcher = compiled.matcher.deep_copy()
    num_consumed = matcher.try_consume_tokens(list(tokens))
    if num_consumed == len(tokens) and matcher.is_accepting():
        return True
    if not matcher.is_error():
        # Only `consume_token` states why a token was refused.
        matcher.consume_token([*tokens, _END_ID][num_consumed])
    reason = matcher.get_error()
    if any(mismatch in reason for mismatch in _MISMATCHES):
        return False
    raise EngineError(
        "constraint.too_complex",
        message(f"the text is too complex for the grammar; make the grammar smaller: {reason}"),
    )


def byte_tokenizer(special: Sequence[str]) -> LLTokenizer:
    """Return a tokenizer of 256 bytes and the given special tokens. Takes less than 1 ms."""
    return LLTokenizer(llguidance.TokenizerWrapper(_ByteVocabulary(special)), eos_token=[_END_ID])


class _ByteVocabulary:
    """The attributes of a tokenizer that llguidance reads, under the names that it expects."""

    bos_token_id = None
    eos_token_id = _END_ID

    def __init__(self, special: Sequence[str]) -> None:
        names = ["<|conure:end|>", *special]
        self.tokens = [bytes([byte]) for byte in range(256)] + [name.encode() for name in names]
        self.special_token_ids = list(range(256, len(self.tokens)))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def _grammars(constraint: str) -> list[dict[str, Any]]:
    """Return the grammars of a constraint, or an empty list if its JSON is malformed."""
    try:
        content = msgspec.json.decode(constraint)
    except (msgspec.DecodeError, RecursionError):
        return []
    grammars = content.get("grammars") if isinstance(content, dict) else None
    if not isinstance(grammars, list) or not all(isinstance(each, dict) for each in grammars):
        return []
    return grammars


def message(reason: str) -> str:
    """Return the compiler's error as one line, without the parser state that follows it."""
    line = " ".join(reason.split("\n<")[0].split()) or "the grammar cannot be compiled"
    return line if len(line) <= _MAX_MESSAGE else line[:_MAX_MESSAGE] + " ..."
