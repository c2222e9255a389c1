"""Programs of the six applications, from lengths in tokens. Their text is a name for a length.

A `Plan` is one of them: as a blueprint for the simulator, or written out in random printable
characters for a model whose tokens are bytes.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import msgspec

from conure.server.program.ir import Program
from conure.server.simulation.blueprint import Blueprint

INSTRUCTIONS = 60
"""Tokens of the text around what a summary reads."""


def call(name: str, parts: Iterable[str], num_output: int, **fields: Any) -> dict[str, Any]:
    """A call; `$name` reads a variable, anything else is a text of that name."""
    prompt: list[dict[str, Any]] = [
        {"input": part[1:]} if part.startswith("$") else {"text": part} for part in parts
    ]
    prompt.append({"output": name, "max_tokens": num_output})
    return {"id": name, "op": "generate", "prompt": prompt, **fields}


@dataclass(frozen=True, eq=False)
class Plan:
    """One application."""

    nodes: list[dict[str, Any]]
    outputs: list[str]
    lengths: dict[str, int]
    """Tokens of every text."""

    @cached_property
    def blueprint(self) -> Blueprint:
        """What it costs, for the simulator."""
        return Blueprint.of(
            msgspec.convert({"nodes": self.nodes, "outputs": self.outputs}, Program), self.lengths
        )

    def written(self, seed: str) -> dict[str, Any]:
        """The program with texts of these lengths, each drawn from the seed and its name; calls
        are greedy and write as many tokens as they may.
        """
        return {
            "nodes": [
                node | {"prompt": [self._written(each, seed) for each in node["prompt"]]}
                for node in self.nodes
            ],
            "outputs": self.outputs,
        }

    def _written(self, segment: dict[str, Any], seed: str) -> dict[str, Any]:
        if "text" in segment:
            draw = random.Random(f"{seed} {segment['text']}")
            length = self.lengths[segment["text"]]
            return {"text": "".join(draw.choices(string.ascii_letters + " ", k=length))}
        if "output" in segment:
            return segment | {"temperature": 0, "ignore_eos": True}
        return segment


@cache
def chain(num_chunks: int, chunk: int, num_output: int, article: int = 0) -> Plan:
    """A summary that is refined chunk by chunk."""
    nodes = []
    for i in range(num_chunks):
        before = [f"$s{i - 1}"] if i else []
        nodes.append(call(f"s{i}", ["refine", *before, f"{article}/{i}"], num_output))
    lengths = {f"{article}/{i}": chunk for i in range(num_chunks)} | {"refine": INSTRUCTIONS}
    return Plan(nodes, [f"s{num_chunks - 1}"], lengths)


@cache
def map_reduce(num_chunks: int, chunk: int, num_output: int, article: int = 0) -> Plan:
    """Summaries of all chunks, and one of these."""
    names = [f"m{i}" for i in range(num_chunks)]
    nodes = [call(name, ["map", f"{article}/{name}"], num_output) for name in names]
    nodes.append(call("out", ["reduce", *(f"${name}" for name in names)], num_output))
    lengths = {f"{article}/{name}": chunk for name in names}
    return Plan(nodes, ["out"], lengths | {"map": INSTRUCTIONS, "reduce": INSTRUCTIONS})


@cache
def single(system: str, num_system: int, num_user: int, num_output: int, user: int) -> Plan:
    """One call: a system prompt that others have too, if any, and a question of its own."""
    own = f"{system}/{user}"
    parts = [system, own] if num_system else [own]
    node = call("out", parts, num_output)
    return Plan([node], ["out"], {system: num_system, own: num_user})


DESIGN, WRITE, REVIEW, REVISE = 820, 600, 450, 620
"""Tokens of outputs of `coding`, before scaling."""
_SHARED = 1_880
"""Tokens of text that all its prompts after the design start with."""


@cache
def coding(num_files: int, num_cycles: int = 4, scale: int = 1) -> Plan:
    """A design; then for every file code, and reviews and revisions round by round.

    Whoever reviews or revises a file reads that file alone. Prompts come to 182, 2,991, 3,717
    and 4,175 tokens, however many files; after the first cycle 20 more, as what is read was
    revised. With a scale, all lengths are divided.
    """
    nodes = [call("design", ["task"], DESIGN // scale)]
    lengths = {"task": 182 // scale, "shared": _SHARED // scale}
    before = ["design"]
    rounds = [("code", 291, WRITE)]
    for _ in range(num_cycles):
        rounds += [("review", 417, REVIEW), ("revise", 425, REVISE)]
    for number, (kind, num_own, num_output) in enumerate(rounds):
        names = [f"{kind}_{number}_{i}" for i in range(num_files)]
        for i, name in enumerate(names):
            read = {"code": 0, "review": 1, "revise": 2}[kind]
            parts = ["shared", "$design", *(f"${past}_{i}" for past in _past(rounds, number, read))]
            own = f"own {name}"
            nodes.append(call(name, [*parts, own], num_output // scale, after=before))
            lengths[own] = num_own // scale
        before = names
    return Plan(nodes, before, lengths)


def _past(rounds: list[tuple[str, int, int]], number: int, num_read: int) -> list[str]:
    """The rounds whose text of the same file is read: the code as it stands, and its review."""
    return [f"{rounds[n][0]}_{n}" for n in range(max(number - num_read, 0), number)]


LOG_FILES = 8
"""Files of the log that figure 18 replays."""
LOG_OUTPUTS = {
    "design": [896] * LOG_FILES,
    "code": [675, 1_096, 305, 596, 556, 261, 372, 592],
    "review": [370, 397, 389, 334, 313, 286, 492, 473],
    "revise": [681, 848, 339, 539, 565, 255, 229, 597],
}
"""Tokens that are written about each of them.

The log counts tokens of GPT-4 (706 of a design, 506 of the first file). The model's tokenizer
makes 1.27 times as many of the design, 4/3 of code and 6/5 of reviews: then prompts hold the files
that they contain, and prompts and outputs come to what the artifact's runs print for a round.
"""
LOG_PROMPTS = {"design": 218, "code": 3_650, "review": 4_898, "revise": 5_486}
"""Tokens of a prompt, the same for every file: what a round's sum leaves for it."""
LOG_OWN = {"code": 100, "review": 70, "revise": 603}
"""So many of them at the end, from where the prompts of a round differ: there they name a file, and
to revise it contain its review."""


@cache
def logged_coding(num_files: int, num_cycles: int = 4) -> Plan:
    """The rounds that figure 18 replays: whoever reviews or revises reads the whole codebase.

    So the calls of a round share their prompts but for the end. As in the replay, more than
    eight branches take the same files again, every branch has a design of its own, and all go on
    from the first; what the log's codebase has beyond the files that are written is plain text.
    """
    lengths = {"task": LOG_PROMPTS["design"]}
    designs = [f"design_0_{i}" for i in range(num_files)]
    nodes = [call(name, ["task"], LOG_OUTPUTS["design"][0]) for name in designs]
    before, read = designs, [designs[0]]
    written = dict.fromkeys(designs, LOG_OUTPUTS["design"][0])
    for number, kind in enumerate(["code", *["review", "revise"] * num_cycles], 1):
        names = [f"{kind}_{number}_{i}" for i in range(num_files)]
        written |= {name: LOG_OUTPUTS[kind][i % LOG_FILES] for i, name in enumerate(names)}
        shared, codebase = f"{kind} {number}", [f"${each}" for each in read]
        lengths[shared] = LOG_PROMPTS[kind] - LOG_OWN[kind] - sum(written[each] for each in read)
        if kind != "code":
            rest = range(num_files, LOG_FILES)
            codebase += (f"file {i}" for i in rest)
            lengths |= {f"file {i}": LOG_OUTPUTS["code"][i] for i in rest}
            lengths[shared] -= sum(lengths[f"file {i}"] for i in rest)
        for i, name in enumerate(names):
            review = [before[i]] if kind == "revise" else []
            lengths[f"own {name}"] = LOG_OWN[kind] - sum(written[each] for each in review)
            parts = [shared, *codebase, *(f"${each}" for each in review), f"own {name}"]
            nodes.append(call(name, parts, written[name], after=before))
        if kind != "review":
            read = names[:LOG_FILES]
        before = names
    return Plan(nodes, before, lengths)
