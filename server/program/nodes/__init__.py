"""The kinds of nodes, one module per kind.

`base` has the record that kinds extend, `control` the kinds with bodies, `bodies` the traversal of
nested nodes. A new kind is a module with a record, and an entry in `AnyNode` or `Control` here.
"""

from __future__ import annotations

from typing import TypeAlias, get_args

from .base import Node
from .call import CallNode
from .client import ClientNode
from .control.if_ import IfNode
from .control.loop import LoopNode, RoundEndNode
from .control.map import MapNode
from .control.procedure import ProcedureNode
from .control.try_ import TryNode
from .expr import ExprNode
from .generate import GenerateNode
from .kill import KillNode
from .wait import WaitNode
from .yield_ import YieldNode

__all__ = [
    "NODE_KINDS",
    "AnyNode",
    "CallNode",
    "ClientNode",
    "Control",
    "ExprNode",
    "GenerateNode",
    "GraphNode",
    "IfNode",
    "KillNode",
    "LoopNode",
    "MapNode",
    "Node",
    "ProcedureNode",
    "RoundEndNode",
    "TryNode",
    "WaitNode",
    "YieldNode",
]

Control: TypeAlias = MapNode | IfNode | LoopNode | TryNode | ProcedureNode
"""Nodes with bodies."""
AnyNode: TypeAlias = (
    GenerateNode | CallNode | ClientNode | ExprNode | Control | WaitNode | KillNode | YieldNode
)
"""A node of a submission."""
GraphNode: TypeAlias = AnyNode | RoundEndNode
"""A node of a graph."""

NODE_KINDS: dict[str, type[Node]] = {kind.op(): kind for kind in get_args(AnyNode)}
"""The kinds by their `op`."""
