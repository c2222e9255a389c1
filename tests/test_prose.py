"""Prose check: idioms that make documentation hard to read stay rare.

Counts phrases in docstrings, comments and Markdown files. The limit is a rate per folder,
because some matches are legitimate ("behind a proxy"). A low rate does not prove good prose.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_PER_1000_WORDS = 3.0
FOLDERS = (
    "adapters",
    "benchmarks",
    "conure/cli",
    "docs",
    "engine",
    "examples",
    "kernels",
    "server",
    "tests",
)
IDIOMS = tuple(
    re.compile(pattern)
    for pattern in (
        r"\b(?:is|are|was|were|has|have|had) no (?!longer|more|such|need|matter|effect|way)\w+",
        r"\b(?:nobody|somebody|whoever|anybody)\b",
        r"\bwho\b",
        r"\b(?:stands?|stood)\b(?! for)",
        r"\b(?:go|goes|going|gone|went) on\b",
        r"\b(?:comes?|came)\b(?! from)",
        r"\bso (?:many|much) (?!that)",
        r"\b(?:told|tells?|telling|says?|said|saying)\b",
        r"\b(?:behind|beside)\b",
        r"\banew\b",
        r"\b(?:is|are) there[.,;)]",
        r"\b[Kk]ept true\b|\b[Rr]efuses? to know\b",
    )
)


def texts_of(path: Path) -> Iterator[str]:
    """Yield the prose of a file: Markdown without code blocks, docstrings and comments."""
    source = path.read_text("utf-8")
    if path.suffix == ".md":
        yield re.sub(r"```.*?```", "", source, flags=re.DOTALL)
        return
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def idioms_in(text: str) -> list[str]:
    return [match[0] for idiom in IDIOMS for match in idiom.finditer(text)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_idioms_are_rare(folder: str) -> None:
    num_words, found = 0, []
    for path in sorted((ROOT / folder).rglob("*")):
        if path.suffix in (".py", ".md") and path.name != Path(__file__).name:
            for text in texts_of(path):
                num_words += len(text.split())
                found += [f"{path.relative_to(ROOT)}: {idiom}" for idiom in idioms_in(text)]
    assert 1000 * len(found) / num_words < MAX_PER_1000_WORDS, found


def test_an_idiom_is_found() -> None:
    assert idioms_in("What is told to nobody is no secret.") == ["is no secret", "nobody", "told"]
