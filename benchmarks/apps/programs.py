"""The six applications as programs, from lengths in tokens. A text is represented by its name.

An `AppPlan` is one application. It can be converted to a profile for the simulator, or to a program
with random printable characters for a model whose tokens are bytes.
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
from simulation.workload_profile import WorkloadProfile

INSTRUCTIONS = 60
"""Tokens of the instructions around the text to summarise."""


def call(name: str, parts: Iterable[str], num_output: int, **fields: Any) -> dict[str, Any]:
    """Return a call; a part `$name` reads a variable, any other part is the text of that name."""
    prompt: list[dict[str, Any]] = [
        {"input": part[1:]} if part.startswith("$") else {"text": part} for part in parts
    ]
    prompt.append({"output": name, "max_tokens": num_output})
    return {"id": name, "op": "generate", "prompt": prompt, **fields}


@dataclass(frozen=True, eq=False)
class AppPlan:
    """One application."""

    nodes: list[dict[str, Any]]
    outputs: list[str]
    lengths: dict[str, int]
    """Length in tokens of every text."""

    @cached_property
    def blueprint(self) -> WorkloadProfile:
        """The application's profile for the simulator."""
        return WorkloadProfile.of(
            msgspec.convert({"nodes": self.nodes, "outputs": self.outputs}, Program), self.lengths
        )

    def copy(self, number: int) -> AppPlan:
        """Return the application of another user: its own texts, and the same shared texts.

        System prompts and instructions are shared; the names of own texts contain `/` or a space,
        or are `task`.
        """

        def renamed(name: str) -> str:
            is_own = "/" in name or " " in name or name == "task"
            return f"{number}/{name}" if is_own else name

        nodes = [
            node
            | {
                "prompt": [
                    part | {"text": renamed(part["text"])} if "text" in part else part
                    for part in node["prompt"]
                ]
            }
            for node in self.nodes
        ]
        lengths = {renamed(name): length for name, length in self.lengths.items()}
        return AppPlan(nodes, self.outputs, lengths)

    def written(self, seed: str) -> dict[str, Any]:
        """Return the program with generated texts.

        Each text has its length and is generated from the seed and its name. Calls are greedy and
        write their maximum number of tokens.
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
def chain(num_chunks: int, chunk: int, num_output: int, article: int = 0) -> AppPlan:
    """A summary that is refined chunk by chunk."""
    nodes = []
    for i in range(num_chunks):
        before = [f"$s{i - 1}"] if i else []
        nodes.append(call(f"s{i}", ["refine", *before, f"{article}/{i}"], num_output))
    lengths = {f"{article}/{i}": chunk for i in range(num_chunks)} | {"refine": INSTRUCTIONS}
    return AppPlan(nodes, [f"s{num_chunks - 1}"], lengths)


@cache
def map_reduce(num_chunks: int, chunk: int, num_output: int, article: int = 0) -> AppPlan:
    """One summary per chunk, and a summary of the summaries."""
    names = [f"m{i}" for i in range(num_chunks)]
    nodes = [call(name, ["map", f"{article}/{name}"], num_output) for name in names]
    nodes.append(call("out", ["reduce", *(f"${name}" for name in names)], num_output))
    lengths = {f"{article}/{name}": chunk for name in names}
    return AppPlan(nodes, ["out"], lengths | {"map": INSTRUCTIONS, "reduce": INSTRUCTIONS})


@cache
def single(system: str, num_system: int, num_user: int, num_output: int, user: int) -> AppPlan:
    """One call: an optional shared system prompt, followed by the user's own text."""
    own = f"{system}/{user}"
    parts = [system, own] if num_system else [own]
    node = call("out", parts, num_output)
    return AppPlan([node], ["out"], {system: num_system, own: num_user})


DESIGN, WRITE, REVIEW, REVISE = 820, 600, 450, 620
"""Output tokens of the stages of `coding`, before scaling."""
_SHARED = 1_880
"""Tokens of text at the start of all prompts after the design."""


@cache
def coding(num_files: int, num_cycles: int = 4, scale: int = 1) -> AppPlan:
    """A design, then code for every file, then reviews and revisions in rounds.

    A review or revision of a file reads only that file. Prompts have 182, 2,991, 3,717 and 4,175
    tokens for any number of files; after the first cycle 20 more, because the text they read was
    revised. `scale` divides all lengths.
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
    return AppPlan(nodes, before, lengths)


def _past(rounds: list[tuple[str, int, int]], number: int, num_read: int) -> list[str]:
    """Return the rounds whose text of the file is read: the current code and its review."""
    return [f"{rounds[n][0]}_{n}" for n in range(max(number - num_read, 0), number)]


LOG_FILES = 8
"""Number of files in the log that figure 18 replays."""
LOG_OUTPUTS = {
    "design": [896] * LOG_FILES,
    "code": [675, 1_096, 305, 596, 556, 261, 372, 592],
    "review": [370, 397, 389, 334, 313, 286, 492, 473],
    "revise": [681, 848, 339, 539, 565, 255, 229, 597],
}
"""Output tokens for each file.

The log counts tokens of GPT-4 (706 for a design, 506 for the first file). The model's tokenizer
needs 1.27 times as many for the design, 4/3 for code and 6/5 for reviews. With these factors,
prompts contain their files, and prompts and outputs match the sums that the artifact prints
per round.
"""
LOG_PROMPTS = {"design": 218, "code": 3_650, "review": 4_898, "revise": 5_486}
"""Prompt tokens, equal for every file: the rest of a round's sum."""
LOG_OWN = {"code": 100, "review": 70, "revise": 603}
"""Tokens at the end of a prompt that differ within a round: they name a file, and a revision's
contain its review.
"""


@cache
def logged_coding(num_files: int, num_cycles: int = 4) -> AppPlan:
    """The rounds that figure 18 replays: a review or revision reads the whole codebase.

    The calls of a round therefore share their prompts except for the end. As in the replay, more
    than eight branches reuse the same files, every branch has its own design, and all branches
    continue from the first design. Files of the log's codebase that are not written are plain text.
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
    return AppPlan(nodes, before, lengths)
