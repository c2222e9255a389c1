"""The executor of each node kind, found in the modules of the folders that hold executors."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any, get_args

from ..program.ir import GraphNode, Node
from . import calls, control_flow, steps
from .node_context import NodeExecutor


@cache
def node_executors() -> Mapping[type[Node], type[NodeExecutor[Any]]]:
    """Return the executors by the record that they execute."""
    executors: dict[type[Node], type[NodeExecutor[Any]]] = {}
    for executor in _executor_classes():
        other = executors.setdefault(executor.kind, executor)
        assert other is executor, f"{other} and {executor} execute {executor.kind}"
    assert executors.keys() == set(get_args(GraphNode)), "a node kind has no executor"
    return MappingProxyType(executors)


def _executor_classes() -> Iterator[type[NodeExecutor[Any]]]:
    for folder in (calls, control_flow, steps):
        for module in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}."):
            for _, found in inspect.getmembers(import_module(module.name), inspect.isclass):
                # A base class of several executors has no `kind`.
                if issubclass(found, NodeExecutor) and hasattr(found, "kind"):
                    yield found
