# ruff: noqa: E501, RUF001 - lists of short texts
"""Hostile texts are refused or bounded, and no text gives anything but a program or an error."""

from __future__ import annotations

import contextlib
import random

import pytest

from conure.server.language.compiler import compile_source
from conure.server.language.errors import LanguageError
from conure.server.language.lowering.emitter import MAX_COMPILED_NODES
from conure.server.language.options import OPTIONS
from conure.server.language.submission import SourceCompiler
from conure.server.program.errors import ProgramError
from conure.server.program.graph.graph import Graph
from conure.server.program.ir import Program, SourceSubmission
from conure.server.program.nodes.bodies import walk

from . import essay, hostile
from .random_source import SourceGenerator

NUM_MUTATIONS = 1_500
"""In one run of the suite."""
SIGNATURES = {"rag": ("model", "messages"), "json.parse": ("text",)}
PIECES = (
    "yield ", "wait ", "StartNewJob:\n", "for x in ", "if ", "else:", "{{", "}}", "'", '"""', "(", ")",
    "[", "]", "{", "}", "\n", "    ", "\\", "#", "f'", "x", ".kill()", "llm_chat(", "gen(", "race(", "a, b",
    "=", "+=", "lambda", "\x00", "é", "𝔘", "1e999", "def f():", "return ", "break", "try:", "except:", "<|e|>",
    "name=", "type=list", ".append(", "__class__", "**", "*", "@", ":", ";", "async ", "await ", "%", "\ud800",
)  # fmt: skip


def outcome(source: str, language: str = "decoder") -> Program | LanguageError:
    """Return the program or the error of a text; anything else is a failure of the test."""
    try:
        program = compile_source(source, language, signatures=SIGNATURES)  # type: ignore[arg-type]
    except LanguageError as error:
        assert error.code.startswith("language.")
        assert error.line >= 1
        assert error.column >= 1
        assert len(error.message) < 2_000
        return error
    assert sum(1 for _ in walk(program.nodes, "")) <= MAX_COMPILED_NODES
    return program


def test_there_are_two_hundred_hostile_sources() -> None:
    assert len(hostile.sources()) + len(hostile.template_bombs()) >= 200


@pytest.mark.parametrize("source", hostile.sources(), ids=lambda source: repr(source[:30]))
def test_a_hostile_source_is_refused_or_bounded(source: str) -> None:
    outcome(source)


@pytest.mark.parametrize("source", hostile.template_bombs(), ids=lambda source: repr(source[:30]))
def test_a_hostile_template_is_refused_or_bounded(source: str) -> None:
    outcome(source, "template")


@pytest.mark.parametrize(
    ("start", "end"), [("", "['context']"), ("", ".get('context')"), ("(x < ", " < x)")]
)
def test_an_expression_that_repeats_its_parts_at_every_level_is_refused(
    start: str, end: str
) -> None:
    result = outcome(f"x = parse_json(gen('a'))\nyield {start * 17}x{end * 17}")
    assert isinstance(result, LanguageError)
    assert "more than 40,000 expressions" in result.message


LONG = repr("x" * 16_000)


@pytest.mark.parametrize(
    "body",
    [
        f"return a + {LONG}",
        f"return {{{LONG}: a}}",
        f"return gen(a, regex={LONG})",
        f"return client('ask', {LONG[1:-1]}=a)",
        f"yield {{'a': {LONG} + a}}",
        f"if a == {LONG}:\n        yield a",
        f'"""{{{{a}}}} {{{{name=b, stop=[{LONG}]}}}}"""',
        f'"""{{{{a}}}} {LONG} {{{{name=b}}}}"""',
    ],
    ids=lambda body: body[:12],
)
def test_texts_that_inlined_functions_repeat_are_bounded(body: str) -> None:
    calls = "b = f(a)\n" * 300
    result = outcome(f"def f(a):\n    {body}\na = gen('a')\n{calls}yield b")
    assert isinstance(result, LanguageError)
    assert "more than 4 MiB of text" in result.message


@pytest.mark.parametrize("name", [*hostile.ATTRIBUTES, *hostile.BUILTINS])
def test_nothing_of_python_can_be_reached(name: str) -> None:
    for source in (
        f"yield 'a'.{name}()",
        f"yield {name}('1')",
        f"yield {name}",
        f"yield [].{name}",
    ):
        assert isinstance(outcome(source), LanguageError)


VALUES = (
    "None", "True", "-1", "0.5", "2 ** 1", "1e308", "'a'", "''", "[]", "['a']", "[1]", "[[]]", "{}", "{'a': 1}",
    "{'type': ['string', 'null']}", "{'type': [{}]}", "{'type': 1}", "'\\ud800'", "['\\ud800']", "{'\\ud800': 1}", "int",
    "list", "nothing", "9223372036854775807", "-9223372036854775808",
)  # fmt: skip


@pytest.mark.parametrize("option", sorted({*OPTIONS, "model"}))
def test_any_value_of_an_option_gives_a_program_or_an_error(option: str) -> None:
    for value in VALUES:
        given = f"{option}={value}"
        text = f'"""{{{{name=a, {given}}}}}"""'.replace("\\", "\\\\")
        for source in (
            f"yield gen('a', {given})",
            f"yield llm_chat('a', {given})['content']",
            f'def f():\n    """{{{{name=a}}}}"""\nyield f({given})',
            f'def f(a: Output({given})):\n    """{{{{a}}}}"""\nyield f()',
            f"def f():\n    {text}\nyield f()",
        ):
            submitted(SourceSubmission(source=source))
        for end in ("", ", end=<|e|>"):
            source = f"{{{{name=a, {given}{end}}}}}"
            submitted(SourceSubmission(source=source, language="template"))


def submitted(source: SourceSubmission) -> None:
    """Submit a text; an exception other than an error of the program is a failure of the test."""
    with contextlib.suppress(ProgramError):
        SourceCompiler([]).compile(source)


def mutated(rng: random.Random, source: str) -> str:
    """Return a text with some random changes."""
    for _ in range(rng.randint(1, 6)):
        start = rng.randrange(len(source) + 1)
        stop = min(len(source), start + rng.choice((0, 0, 1, 3, 30)))
        piece = rng.choice(
            (*PIECES, source[start : start + rng.randint(0, 60)], chr(rng.randrange(0x3000)))
        )
        source = source[:start] + piece + source[stop:]
    return source


def fuzz(seeds: range) -> int:
    """Compile mutated programs; return how many of them were valid."""
    texts = [essay.CRITIC, essay.STREAM, essay.FEATURES, essay.SPECULATION, essay.TEMPLATE]
    num_valid = 0
    for seed in seeds:
        rng = random.Random(seed)
        source = rng.choice((*texts, SourceGenerator(rng).source()))
        language = "template" if rng.random() < 0.3 else "decoder"
        result = outcome(mutated(rng, source), language)
        num_valid += isinstance(result, Program)
        if isinstance(result, Program) and seed % 20 == 0:
            try:
                Graph.build(result, {})
            except ProgramError as error:
                assert error.code in ("program.cycle", "program.too_large", "program.control"), (
                    error
                )
    return num_valid


def test_mutated_programs_give_a_program_or_an_error() -> None:
    assert fuzz(range(NUM_MUTATIONS)) > NUM_MUTATIONS / 50
