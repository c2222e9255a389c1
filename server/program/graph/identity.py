"""The identity of a graph: equal for programs that make the same calls on the same inputs.

The names of variables and nodes, the order of nodes, and the split of prompts into segments and
`expr` nodes do not count. Neither do `yield`, `wait` and `kill`, nor jobs and `meta`: they decide
when something happens. Bodies count as they are written.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from ..content import Expression
from ..expressions.renaming import DefinedNames, Renaming
from ..expressions.symbolic import VariableDefinitions
from ..nodes import ExprNode, GenerateNode, GraphNode, KillNode, WaitNode, YieldNode
from ..prompt_prefix import prefix_hash
from .graph import Graph

_TIMING = (YieldNode, WaitNode, KillNode)
_NOT_PART = {"id", "job", "after", "meta", "priority", "output"}


def graph_hash(graph: Graph) -> str:
    """Return the identity of a graph as 32 hexadecimal digits."""
    names: dict[str, Expression] = {name: {"var": f"input.{name}"} for name in graph.inputs}
    definitions = VariableDefinitions()
    digests: list[str] = []
    for node_id in _in_order(graph):
        node = graph.nodes[node_id]
        writes = [name for slot in graph.slots[node_id] for name in slot.writes]
        if isinstance(node, _TIMING):
            continue
        if isinstance(node, ExprNode):
            expression = Renaming(DefinedNames(), "", names).expression(node.expr)
            name = f"expr.{_digest(expression)}"
            definitions.add(name, expression)
            names[writes[0]] = {"var": name}
            continue
        digest = _node_digest(node, names, definitions)
        digests.append(digest)
        for index, written in enumerate(writes):
            names[written] = {"var": f"node.{digest}.{index}"}
    outputs = [names[name] for name in graph.outputs]
    return _digest([sorted(digests), outputs])


def _in_order(graph: Graph) -> list[str]:
    """Return the nodes outside of bodies, each after the nodes that it reads from."""
    order: dict[str, None] = {}
    for slot in graph.topological():
        if graph.body_of(slot.node) is None:
            order[slot.node] = None
    return list(order)


def _node_digest(
    node: GraphNode, names: Mapping[str, Expression], definitions: VariableDefinitions
) -> str:
    renaming = Renaming(DefinedNames(), "", names, keeps_seeds=True)
    if not isinstance(node, GenerateNode):
        fields = msgspec.to_builtins(node.renamed_with_bodies(renaming))
        return _digest({name: each for name, each in fields.items() if name not in _NOT_PART})
    renamed = node.renamed(renaming)
    outputs: list[object] = []
    if renamed.prompt is not UNSET:
        segments = []
        for segment in renamed.prompt:
            if segment.output is not UNSET:
                segment = replace(segment, output=f"output.{len(outputs)}")
                outputs.append(msgspec.to_builtins(segment))
            segments.append(segment)
        renamed = replace(renamed, prompt=segments)
    elif renamed.output is not UNSET:
        renamed = replace(renamed, output=replace(renamed.output, variable="output.0"))
        outputs.append(_without_defaults(msgspec.to_builtins(renamed.output)))
    hashes = [each.hex() for each in prefix_hash(renamed, definitions)]
    return _digest([hashes[-1:], outputs, renamed.timeout_s, renamed.retries])


def _without_defaults(output: dict[str, object]) -> dict[str, object]:
    """Leave out the form if it is the default of an output without a constraint."""
    is_default = output.get("as") == "text" and "constraint" not in output
    return {name: each for name, each in output.items() if name != "as" or not is_default}


def _digest(value: object) -> str:
    return blake2b(msgspec.json.encode(value, order="deterministic"), digest_size=16).hexdigest()
