"""The records of a program's state: one per node, ready slot, expansion and missing value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..program.ir import GraphNode
from ..program.status import ENDED, Phase, Problem

NODE_KILLED = "node.killed"
"""The code of nodes that a `kill` ended."""
WAIT_UNMET = "wait.unmet"
"""The code of a required `wait` that ended without its values, and of the nodes after it."""


class FlowCut(NamedTuple):
    """Why the nodes after a required `wait` never run."""

    reason: Literal["failure", "absence"]
    """The `wait` failed, or its values were killed."""
    problem: Problem


class Ready(NamedTuple):
    """A slot whose inputs and predecessors are all resolved."""

    node: str
    slot: int


class Expansion(NamedTuple):
    """Instances of bodies that were added to the graph."""

    nodes: tuple[str, ...]
    ready: list[Ready]


class MissingValue(NamedTuple):
    """The reason why a variable will never have a value."""

    phase: Phase
    problem: Problem


@dataclass(slots=True)
class NodeUsage:
    """Tokens and seconds of one node, summed over its slots, as reported by engines."""

    logical: int = 0
    computed: int = 0
    """Prompt tokens computed, including prefixes filled on behalf of other calls."""
    cached: int = 0
    recomputed: int = 0
    constant: int = 0
    """Leading tokens of the first prompt that are text of the program."""
    written: int = 0
    """Tokens of the first prompt that a model generated in another context."""
    again: int = 0
    """Tokens already in the context when later outputs began."""
    again_constant: int = 0
    again_written: int = 0
    prompt_discarded: int = 0
    """Tokens of prompts aborted before the engine reported their cost."""
    decoded: int = 0
    forced: int = 0
    discarded: int = 0
    retokenized: int = 0
    queued_s: float = 0.0
    prefill_s: float = 0.0
    """From the start on an engine until the prompt was filled, including other calls' prompts."""
    decode_s: float = 0.0
    block_seconds: float = 0.0

    @property
    def has_begun(self) -> bool:
        """Whether an engine received a prompt; a call that was cancelled in the queue has none."""
        return self.logical + self.prompt_discarded > 0


@dataclass(slots=True)
class NodeState:
    """The progress of one node."""

    node: GraphNode
    phase: Phase = "waiting"
    attempt: int = 0
    engine: str | None = None
    why: str = ""
    problem: Problem | None = None
    prefix_break: bool = False
    constraint_relaxed: bool = False
    cut: FlowCut | None = None
    """Why the control flow of the node's job ends here: a required `wait` has ended without its
    values."""
    slots_done: int = 0
    num_deaths: int = 0
    """Engines that died while the node ran on them."""
    num_retries: int = 0
    """Attempts after failures of the node itself, limited by its `retries`."""
    started_at: float | None = None
    finished_at: float | None = None
    _usage: NodeUsage | None = None

    @property
    def usage(self) -> NodeUsage:
        """What the calls of the node have used. Made when it is first read: most nodes of a large
        program are no calls.
        """
        if self._usage is None:
            self._usage = NodeUsage()
        return self._usage

    @usage.setter
    def usage(self, usage: NodeUsage) -> None:
        self._usage = usage

    @property
    def has_usage(self) -> bool:
        """Whether a call of the node may have used anything."""
        return self._usage is not None

    @property
    def has_ended(self) -> bool:
        """Whether the node has reached a final phase."""
        return self.phase in ENDED
