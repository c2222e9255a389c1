"""An explanation as text for a terminal, and as a Mermaid flowchart."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime

from msgspec import UNSET

from ..decoding.unicode_text import escape_controls
from .records import ExplainedNode, KnownTokens, ProgramExplanation

MAX_DIAGRAM_NODES = 500

_SHAPES = {"generate": ("([", "])"), "if": ("{", "}"), "map": ("[[", "]]"), "loop": ("[[", "]]")}
_NOT_IN_LABELS = re.compile(r"[^\w .,:+*/-]")


def to_text(explanation: ProgramExplanation) -> str:
    """Return an explanation as lines of text."""
    return "\n".join(map(escape_controls, _text_lines(explanation))) + "\n"


def _text_lines(explanation: ProgramExplanation) -> Iterator[str]:
    name = explanation.name or "program"
    yield f"{name}  {explanation.version}"
    outputs = (f"{output} ({objective})" for output, objective in explanation.outputs.items())
    yield f"outputs: {', '.join(outputs) or 'none'}"
    worst = explanation.worst_case
    yield (
        f"at most: {worst.calls:,} calls, {worst.prompt_tokens:,} prompt tokens, "
        f"{worst.output_tokens:,} output tokens"
    )
    yield ""
    yield "nodes:"
    depths: dict[str, int] = {}
    for node in explanation.nodes:
        depth = depths[node.id] = 0 if node.inside is None else depths[node.inside] + 1
        yield f"  {'  ' * depth}{_node_line(node)}"
    for title, lines in (
        ("task groups:", [f"{key}: {', '.join(v)}" for key, v in explanation.groups.items()]),
        ("shared prompt prefixes:", list(_shared_lines(explanation))),
        ("pinned prefixes:", list(_pin_lines(explanation))),
        ("advice:", list(_advice_lines(explanation))),
        ("actual:", list(_actual_lines(explanation))),
    ):
        if lines:
            yield ""
            yield title
            yield from (f"  {line}" for line in lines)


def _node_line(node: ExplainedNode) -> str:
    parts = [f"{node.id}: {node.op}"]
    if node.times > 1:
        parts.append(f"up to {node.times:,} times")
    if node.reads:
        parts.append(f"reads {', '.join(node.reads)}")
    if node.writes:
        parts.append(f"writes {', '.join(node.writes)}")
    if node.prompt is not UNSET:
        parts.append(f"prompt {_tokens(node.prompt)}, output up to {node.max_output_tokens:,}")
        parts.append(f"{node.objective}{'' if node.group is None else f' in group {node.group}'}")
    if node.actual_prompt is not UNSET:
        prompt = node.actual_prompt
        runs = "once" if node.actual_runs == 1 else f"{node.actual_runs:,} times"
        parts.append(
            f"ran {runs}: {prompt.computed:,} of {prompt.logical:,} prompt tokens computed"
        )
    return "; ".join(parts)


def _tokens(known: KnownTokens) -> str:
    values = "".join(f" + {name}" for name in known.values)
    return f"{known.tokens:,}{values} tokens"


def _shared_lines(explanation: ProgramExplanation) -> Iterator[str]:
    for span in explanation.shared:
        yield (
            f"{', '.join(span.calls)}: {_tokens(span.prefix)}, {span.times:,} times, "
            f"saves {span.saved_tokens:,} tokens"
        )


def _pin_lines(explanation: ProgramExplanation) -> Iterator[str]:
    for reference, pin in explanation.pins.items():
        until = datetime.fromtimestamp(pin.expires_at, UTC).isoformat(" ", "seconds")
        yield (
            f"{reference}: {pin.tokens:,} tokens in {pin.blocks:,} KV blocks on each of "
            f"{len(pin.engines)} engines until {until}; {pin.computed_tokens:,} tokens computed"
        )


def _advice_lines(explanation: ProgramExplanation) -> Iterator[str]:
    for advice in explanation.advice:
        saved = f" (saves {advice.saves_tokens:,} tokens)" if advice.saves_tokens else ""
        yield f"{advice.code}: {advice.message}"
        if advice.fix:
            yield f"  fix: {advice.fix}{saved}"


def _actual_lines(explanation: ProgramExplanation) -> Iterator[str]:
    receipt = explanation.receipt
    if receipt is UNSET:
        return
    prompt, output = receipt.prompt_tokens, receipt.output_tokens
    yield (
        f"{receipt.calls:,} calls, {prompt.computed:,} of {prompt.logical:,} prompt tokens "
        f"computed, {output.decoded:,} output tokens decoded"
    )
    yield f"critical path: {' -> '.join(receipt.critical_path) or 'none'}"


def to_mermaid(explanation: ProgramExplanation) -> str:
    """Return an explanation as a Mermaid flowchart; bodies are subgraphs."""
    nodes = explanation.nodes[:MAX_DIAGRAM_NODES]
    numbers = {node.id: f"n{index}" for index, node in enumerate(nodes)}
    children: dict[str | None, list[ExplainedNode]] = {}
    for node in nodes:
        children.setdefault(node.inside, []).append(node)
    lines = ["flowchart TD", *_subgraph(children, numbers, None, "  ")]
    lines += [
        f"  {numbers[edge.source]} --> {numbers[edge.target]}"
        for edge in explanation.edges
        if edge.source in numbers and edge.target in numbers
    ]
    if len(explanation.nodes) > MAX_DIAGRAM_NODES:
        lines.append(f"  more[{len(explanation.nodes) - MAX_DIAGRAM_NODES:,} more nodes]")
    return "\n".join(lines) + "\n"


def _subgraph(
    children: dict[str | None, list[ExplainedNode]],
    numbers: dict[str, str],
    parent: str | None,
    indent: str,
) -> Iterator[str]:
    for node in children.get(parent, []):
        opening, closing = _SHAPES.get(node.op, ("[", "]"))
        label = _NOT_IN_LABELS.sub(" ", f"{node.id}: {node.op}")
        if node.times > 1:
            label += f", up to {node.times} times"
        yield f'{indent}{numbers[node.id]}{opening}"{label}"{closing}'
        if node.id in children:
            yield f'{indent}subgraph b{numbers[node.id]}["in {_NOT_IN_LABELS.sub(" ", node.id)}"]'
            yield from _subgraph(children, numbers, node.id, indent + "  ")
            yield f"{indent}end"
