# ruff: noqa: E501, RUF001 - lists of short texts
"""Hostile texts are refused or bounded, and no text gives anything but a program or an error."""

from __future__ import annotations

import random

import pytest

from conure.server.language.compiler import compile_source
from conure.server.language.errors import LanguageError
from conure.server.language.lowering.emitter import MAX_COMPILED_NODES
from conure.server.program.errors import ProgramError
from conure.server.program.graph.graph import Graph
from conure.server.program.ir import Program
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


@pytest.mark.parametrize("name", [*hostile.ATTRIBUTES, *hostile.BUILTINS])
def test_nothing_of_python_can_be_reached(name: str) -> None:
    for source in (
        f"yield 'a'.{name}()",
        f"yield {name}('1')",
        f"yield {name}",
        f"yield [].{name}",
    ):
        assert isinstance(outcome(source), LanguageError)


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
