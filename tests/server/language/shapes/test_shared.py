"""Statements of one shape are compiled once, and give what each of them gives alone."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from conure.server.language.compiler import compile_text
from conure.server.language.errors import LanguageError
from conure.server.language.submission import SourceCompiler
from conure.server.program.decode import revalidate
from conure.server.program.errors import ProgramError
from conure.server.program.ir import SourceSubmission, Submission

from .repeated_source import RepeatedSource, repeated_program

SIGNATURES = {"rag": ("model", "messages"), "json.parse": ("text",)}
NUM_TEXTS = 60
"""In one run of the suite; the slow test has many more."""


def outcome(source: str, *, is_shared: bool) -> tuple[Any, bool]:
    """Return the JSON of the program or the error, and whether statements shared their shapes."""
    try:
        program, json = compile_text(
            source, inputs=("given",), signatures=SIGNATURES, is_shared=is_shared
        )
        validated, _ = revalidate(Submission(program=program))
    except LanguageError as error:
        return (error.code, error.message, error.path, error.status), False
    except ProgramError as error:
        return (error.code, error.path), False
    encoded = msgspec.json.encode(validated.program)
    if json is not None:
        assert msgspec.json.encode(msgspec.json.decode(json, type=type(program))) == encoded
    return encoded, json is not None


def compare(source: str) -> bool:
    """Compile a text in both ways; return whether its statements shared their shapes."""
    shared, is_shared = outcome(source, is_shared=True)
    alone, _ = outcome(source, is_shared=False)
    assert shared == alone, source
    return is_shared


def is_valid(source: str) -> bool:
    return isinstance(outcome(source, is_shared=False)[0], bytes)


def repeat(line: str, count: int = 12) -> str:
    """Return a text with a line for each number, and a call that it may read."""
    lines = [line.replace("NUMBER", str(number)) for number in range(count)]
    return "\n".join(["first = gen('One. ')", *lines, "yield {'last': first}"])


def compare_random(seeds: range) -> None:
    num_shared = 0
    for seed in seeds:
        rng = random.Random(seed)
        source = repeated_program(rng) if seed % 10 == 0 else RepeatedSource(rng, is_valid).source()
        num_shared += compare(source)
    assert num_shared > len(seeds) / 5


def test_random_repeated_texts_give_the_same_programs_and_errors() -> None:
    compare_random(range(NUM_TEXTS))


@pytest.mark.slow
def test_many_random_repeated_texts_give_the_same_programs_and_errors() -> None:
    compare_random(range(NUM_TEXTS, 11 * NUM_TEXTS))


@pytest.mark.parametrize(
    "source",
    [
        repeat(
            "aNUMBER = llm_chat([system('Be brief.'), user(f'{first} NUMBER')], max_tokens=20)", 300
        ),
        repeat("aNUMBER = gen(f'{first} NUMBER')"),
        repeat("aNUMBER = gen('NUMBER times.', temperature=0, stop=['an end', '<NUMBER>'])"),
        repeat("yield {'NUMBER is': first}\nwait first"),
        repeat("with job():\n    aNUMBER = gen('x NUMBER')\n    yield {'aNUMBER': aNUMBER}"),
        repeat("StartNewJob:\n    if first.contains('NUMBER x'):\n        yield {'k': first}"),
        repeat("aNUMBER = 'text NUMBER'\nbNUMBER = gen(aNUMBER + first)"),
        repeat("if first == 'NUMBER.':\n    first.kill()"),
        repeat("aNUMBER = [user('NUMBER.'), first]\nbNUMBER = llm_chat(aNUMBER)"),
        repeat("aNUMBER = gen('''some\n  lines''' + 'NUMBER.')"),
        repeat("# NUMBER isn't code\naNUMBER = gen('NUMBER.')  # 'NUMBER"),
    ],
)
def test_repeated_statements_share_their_shape(source: str) -> None:
    assert compare(source)


@pytest.mark.parametrize(
    "line",
    [
        "yield {'NUMBER.': first, \"NUMBER.\": gen('a')}",  # equal keys in different quotes
        "yield {'NUMBER\"': first, 'NUMBER\\\"': first}",  # and with an escape
        "yield {'NUMBER.': first, f'NUMBER.': first}",
        "aNUMBER = gen('NUMBER.'.upper() + 'é')",
        "aNUMBER = gen('a', stop='NUMBER.'.upper())",  # computed by the compiler
        "aNUMBER = gen('a', max_tokens=len('NUMBER.'))",
        "aNUMBER = gen('NUMBER.' 'more.')",
        "aNUMBER = gen(first)\nbNUMBER = aNUMBER + later\nlater = 'NUMBER.'",
        "aNUMBER = gen('NUMBER.')\nfirst = aNUMBER",
        "answer = llm_chat([user('NUMBER.')])\nyield answer",
        "aNUMBER = race(gen('NUMBER.'), first)",
        "if first == 'NUMBER.':\n    aNUMBER = gen('a')\n    yield aNUMBER",
        "def fNUMBER(x):\n    return gen(x)\naNUMBER = fNUMBER('NUMBER.')",
        "aNUMBER: str = 'NUMBER.'",
        "aNUMBER = 0xNUMBERf + 1_NUMBER",
        "aNUMBER = gen('\\x4NUMBER')",
        "x = [\naNUMBER,\nfirst]",
        "with job() as jobNUMBER:\n    yield gen('NUMBER.')\njobNUMBER.kill()",
        "aNUMBER = gen('a', max_tokens=-1)  # a value that the graph refuses\nyield 'NUMBER.'",
        "Zq7NUMBERz = gen('Zq70z')",
        "yield {'line': 900000003, 'NUMBER.': first}",
        "yield {'NUMBER.': undefined}",
        "aNUMBER = gen('NUMBER.'); return aNUMBER",
    ],
)
def test_statements_that_only_look_alike_keep_their_meaning(line: str) -> None:
    compare(repeat(line))


def test_an_error_in_a_repeated_statement_has_its_own_position() -> None:
    source = repeat("aNUMBER = gen('NUMBER.', max_tokens=9)")
    lines = source.split("\n")
    lines[7] = "a7 = gen('7.' , maximum=9)"
    with pytest.raises(LanguageError) as error:
        compile_text("\n".join(lines), signatures=SIGNATURES)
    assert error.value.path == "source:8:25"


def test_a_submission_of_repeated_statements_is_the_one_of_its_graph() -> None:
    source = repeat("aNUMBER = gen('NUMBER.', temperature=0)")
    submission, body = SourceCompiler([]).compile(SourceSubmission(source=source))
    alone = compile_text(source, signatures={}, is_shared=False).program
    expected, _ = revalidate(Submission(program=alone))
    assert submission == expected
    assert msgspec.json.decode(body, type=Submission) == expected


def test_a_submission_with_an_invalid_value_names_its_line() -> None:
    source = repeat("aNUMBER = gen('NUMBER.', temperature=0)").replace(
        "('5.', temperature=0", "('5.', temperature=-1"
    )
    with pytest.raises(ProgramError) as error:
        SourceCompiler([]).compile(SourceSubmission(source=source))
    assert error.value.path == "source:7:1"
