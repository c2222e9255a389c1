"""Advice: dead nodes, and prompt orders that prevent sharing.

Only the beginning of a prompt can be shared. Content that several calls have in common is computed
again for each call if it follows content that differs between the calls. The fix is an order with
the common content first; the author decides whether the prompt keeps its meaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec import UNSET

from ..graph.graph import Graph
from ..nodes import CallNode, ClientNode, GenerateNode, KillNode, Node, YieldNode
from ..nodes.bodies import walk
from .prompts import CallPrompt, PieceTokens
from .records import Advice

MIN_MOVED_TOKENS = 16
"""Common content of fewer tokens is not worth an advice."""
MAX_PAIRS = 2_000
"""Pairs of calls that are compared."""


def advise(graph: Graph, nodes: Sequence[Node], prompts: Sequence[CallPrompt]) -> list[Advice]:
    """Return all advice for a program."""
    found = list(_lint(graph))
    found += _dead_nodes(graph, nodes)
    found += _orders(prompts)
    return found


def _lint(graph: Graph) -> Iterator[Advice]:
    for fault in graph.lint():
        yield Advice(code=fault.code, message=fault.message, node=fault.node, fix=fault.fix)


# --- dead nodes -------------------------------------------------------------------------------


def _dead_nodes(graph: Graph, nodes: Sequence[Node]) -> Iterator[Advice]:
    """Find nodes outside of bodies that neither an output nor an effect depends on."""
    if graph.open or not graph.outputs:
        return
    stack = [slot.node for name in graph.outputs if (slot := graph.get_producer(name)) is not None]
    stack += [node.id for node in graph.nodes.values() if _has_effect(node)]
    needed: set[str] = set()
    while stack:
        node_id = stack.pop()
        if node_id in needed:
            continue
        needed.add(node_id)
        stack += graph.nodes[node_id].after
        if (body := graph.body_of(node_id)) is not None:
            stack.append(body.control)
        stack += graph.descendants(node_id)
        for slot in graph.slots[node_id]:
            stack += [earlier.node for earlier in graph.predecessors(slot)]
            for name in slot.may_read:
                if (producer := graph.get_producer(name)) is not None:
                    stack.append(producer.node)
    for node in nodes:
        if node.id in needed:
            continue
        num_calls = sum(isinstance(each, GenerateNode) for _, each in walk([node], ""))
        cost = f", and it makes {num_calls} LLM calls" if num_calls else ""
        yield Advice(
            code="node.dead",
            node=node.id,
            message=f"no output depends on node `{node.id}`{cost}",
            fix="remove it, or add what it writes to `outputs`",
        )


def _has_effect(node: Node) -> bool:
    """Whether a node, or one in its bodies, has an effect besides its variables."""
    if isinstance(node, YieldNode | KillNode | ClientNode | CallNode):
        return True
    return any(_has_effect(inner) for body in node.bodies() for inner in body.nodes)


# --- prompt orders ----------------------------------------------------------------------------


def _orders(prompts: Sequence[CallPrompt]) -> Iterator[Advice]:
    for prompt in prompts:
        if prompt.times > 1:
            yield from _order_in_body(prompt)
    yield from _orders_of_pairs([prompt for prompt in prompts if prompt.node.prompt is not UNSET])


def _before_output(prompt: CallPrompt) -> list[PieceTokens]:
    """Return the pieces before the first output."""
    segments = prompt.segments
    if prompt.node.prompt is not UNSET:
        first = next(i for i, each in enumerate(prompt.node.prompt) if each.output is not UNSET)
        segments = segments[:first]
    return [piece for segment in segments for piece in segment]


def _order_in_body(prompt: CallPrompt) -> Iterator[Advice]:
    """Find constant content after content that changes with the item or round."""
    pieces = _before_output(prompt)
    first = next((i for i, each in enumerate(pieces) if each.values & prompt.varying), len(pieces))
    constant = [each for each in pieces[first:] if not each.values & prompt.varying]
    num_tokens = sum(each.tokens for each in constant)
    if num_tokens < MIN_MOVED_TOKENS:
        return
    changing = pieces[first]
    yield Advice(
        code="prompt.order",
        node=prompt.node.id,
        message=(
            f"the prompt of `{prompt.node.id}` has {num_tokens} constant tokens after "
            f"{changing.label}, which changes every time: they are computed {prompt.times} times"
        ),
        fix=f"put {_labels(constant)} before {changing.label}",
        saves_tokens=num_tokens * (prompt.times - 1),
    )


def _orders_of_pairs(prompts: Sequence[CallPrompt]) -> Iterator[Advice]:
    """Find calls whose prompts have common content after different beginnings."""
    advised: set[str] = set()
    num_pairs = 0
    for index, later in enumerate(prompts):
        for earlier in prompts[:index]:
            num_pairs += 1
            if num_pairs > MAX_PAIRS:
                return
            if later.node.id in advised or later.node.model != earlier.node.model:
                continue
            ours, theirs = _before_output(later), _before_output(earlier)
            shared = _num_common(ours, theirs)
            common = {each.key for each in theirs[shared:]}
            movable = [each for each in ours[shared:] if each.key in common]
            num_tokens = sum(each.tokens for each in movable)
            if num_tokens < MIN_MOVED_TOKENS:
                continue
            advised.add(later.node.id)
            yield Advice(
                code="prompt.order",
                node=later.node.id,
                message=(
                    f"`{earlier.node.id}` and `{later.node.id}` have {num_tokens} tokens in common "
                    "after different beginnings, so both compute them"
                ),
                fix=f"begin both prompts with {_labels(movable)}",
                saves_tokens=num_tokens,
            )


def _num_common(one: Sequence[PieceTokens], other: Sequence[PieceTokens]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a.key != b.key), min(len(one), len(other)))


def _labels(pieces: Iterable[PieceTokens]) -> str:
    labels = list(dict.fromkeys(piece.label for piece in pieces))
    more = f" and {len(labels) - 3} more" if len(labels) > 3 else ""
    return ", ".join(labels[:3]) + more
