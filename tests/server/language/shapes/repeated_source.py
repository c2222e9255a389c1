# ruff: noqa: E501 - lists of short texts
"""Random texts that repeat few kinds of statements with other names and texts."""

from __future__ import annotations

import random
from collections.abc import Callable

from ..random_source import SourceGenerator

NAMES = (
    "a",
    "b",
    "x",
    "job",
    "yield_",
    "answer",
    "text",
    "branch",
    "result",
    "json",
    "content",
    "tea",
)
TEXTS = (
    "", "x", "Yes", "content", "context", "role", "user", "a1", "Be brief.", "an <|end|> of it", "[1]",
    "a long text " * 6, "an < long text " * 6, 'a "quote"', "it is 1.", "{{x}}", "\\n new", "tab\\t", "\\x41.",
    "é ü.", "a\\\\b.", "Zq1", "9000", "a text, 64: " + "b" * 52, "a text, 65: " + "b" * 53, "#1", "# no",
)  # fmt: skip
STATEMENTS = (
    "{n} = gen({s}, max_tokens=9)",
    "{n} = gen({f}, stop=[{s}])",
    "{n} = gen({s} + {r} + {s}, max_tokens=9)",
    "{n} = llm_chat([system({s}), user({f})], max_tokens=9)",
    "{n} = llm_chat(model_name, [{{'role': 'user', 'context': {s}}}])",
    "{n} = llm_chat([user({r})], schema={{'type': 'object', 'properties': {{{s}: {{'type': 'string'}}}}}})",
    "{n} = llm_chat([user({s})], result_value=[{s}, {s}])",
    "{n} = llm_chat([user({s})], type=list)[{s}]",
    "{n} = llm_chat([user({r})])['content']",
    "{n} = {s}",
    "{n} = [{s}, {r}]",
    "{n} = {r}",
    "{n} = {r} + {s}",
    "{n} = {r}.split({s})",
    "{n} = len({r}) + 1  # {c}",
    "{n} = race({r}, {r})",
    "{n} = {{{s}: {r}, {s}: gen({s})}}",
    "{n} += {s}",
    "{n} = json.parse({r})",
    "{n} = gen({r}, model={s})",
    "{n}, {n} = {r}, {s}",
    "yield {{{s}: {r}}}",
    "yield {{{s}: {r}, {s}: {r}, {s}: gen({s})}}",
    "yield {f}",
    "wait {r}",
    "wait {r}, {r}",
    "wait({r}, any=True)",
    "{r}.kill()",
    "{n}.append({s})",
    "with job():\n    {n} = gen({s})\n    yield {{{s}: {n}}}",
    "with job(name={s}):\n    {n} = gen({r})\n    {n} = gen({s})",
    "with job() as {n}:\n    yield {{{s}: {r}}}",
    "StartNewJob:\n    {n} = llm_chat({r} + [system({s})])\n    if {r}.contains({s}):\n        yield {r}",
    "if {r} == {s}:\n    yield {{{s}: {r}}}\nelse:\n    yield {s}",
    "if {r}.contains({s}):\n    {n} = gen({s})\n    yield {n}",
    "if len({r}) > 3:\n    {r}.kill()\n    wait {r}",
    "for {n} in [{s}, {r}]:\n    yield gen({n})",
    "{n} = [gen({r} + {n}) for {n} in [{s}, {s}]]",
    "try:\n    {n} = gen({s})\nexcept Timeout:\n    {n} = {s}",
    "{n} = helper({r}, {s})",
    "yield written({s})",
    "{n}: str = {s}",
    "{n} = {r} if {r} == {s} else {s}",
    "{n} = gen(prompt={r},\n    stop={s})",
    "{n}={s}",
)  # fmt: skip
HEADER = '''\
model: str
def helper(text, more):
    answer = gen(text + more)
    return answer.upper()
def written(topic):
    """Write about {{topic}}: {{name=about, max_tokens=9}}"""
'''


class RepeatedSource:
    """Writes one random text, most often a valid one."""

    def __init__(self, rng: random.Random, is_valid: Callable[[str], bool]) -> None:
        self._rng = rng
        self._is_valid = is_valid
        self._names = ["first", "second"]
        self._texts = rng.sample(TEXTS, 4)

    def source(self) -> str:
        rng = self._rng
        lines = ["first = gen('One. ')", "second = 'Two.'"]
        if rng.random() < 0.5:
            lines.insert(0, HEADER)
        kinds = rng.sample(STATEMENTS, rng.randint(1, 3))
        last = "yield {'last': first}"
        for _ in range(rng.randint(16, 48)):
            pattern = rng.choice(kinds if rng.random() < 0.97 else STATEMENTS)
            line = self._filled(pattern)
            if self._is_valid("\n".join([*lines, line, last])) or rng.random() < 0.01:
                lines.append(line)
        return "\n".join([*lines, f"yield {{'last': {rng.choice(self._names)}}}"])

    def _filled(self, pattern: str) -> str:
        name = self._name()
        text = pattern.replace("{{", "\0").replace("}}", "\1")
        while "{r}" in text:
            text = text.replace("{r}", self._rng.choice(self._names), 1)
        while "{s}" in text:
            text = text.replace("{s}", self._text(), 1)
        while "{f}" in text:
            text = text.replace("{f}", self._f_string(), 1)
        text = text.replace("{c}", self._rng.choice(TEXTS).replace("\n", " ")).replace("{n}", name)
        if name in text:
            self._names.append(name)
        return text.replace("\0", "{").replace("\1", "}")

    def _name(self) -> str:
        rng = self._rng
        if rng.random() < 0.05:
            return rng.choice(self._names)
        return f"{rng.choice(NAMES)}{rng.choice(('', '_2', len(self._names), len(self._names)))}"

    def _text(self) -> str:
        text = self._rng.choice(self._texts)
        if self._rng.random() < 0.5:
            text += str(self._rng.randint(0, 9))
        if "'" in text or self._rng.random() < 0.2:
            return '"' + text.replace('"', '\\"') + '"'
        return f"'{text}'"

    def _f_string(self) -> str:
        parts = [
            f"{{{self._rng.choice(self._names)}}}" if self._rng.random() < 0.5 else text
            for text in self._rng.sample(("Tea. ", " and ", "1", "", "a word", "<b>"), 3)
        ]
        return f"f'{''.join(parts)}'"


def repeated_program(rng: random.Random) -> str:
    """Return a program of `random_source` whose last statements are repeated with other texts."""
    source = SourceGenerator(rng).source()
    call = "extra{0} = gen('{0} is a number. ' + seed)\nyield {{'extra': extra{0}, 'seed': seed}}\n"
    return source + "".join(call.format(number) for number in range(rng.randint(8, 20)))
