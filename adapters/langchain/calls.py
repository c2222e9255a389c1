"""One call to the model as a program of its own: a node for each answer that is wanted.

Knows how nodes and variables are named, what becomes of a seed, and which session a call is of.
Refuses to know connections and LangChain's classes.

Kept true: a call that is part of an accelerated chain has the nodes that it has alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from conure.server.program.ir import Json
from conure.server.program.seed import seed_of_answer

from .conversations import Resumed

ANSWER: Final = "answer"
"""The variable of a call's first answer."""
CALL: Final = "chat"
"""Its node."""


@dataclass(frozen=True, slots=True)
class ModelCall:
    """What is asked of the model, once or several times at once."""

    nodes: tuple[dict[str, Json], ...]
    thread: str | None
    """The session that the app named, if it named one."""
    resumed: Resumed | None = None
    """What it goes on with, where the app named none."""

    @property
    def session(self) -> str | None:
        """That it belongs to."""
        return self.thread if self.resumed is None else self.resumed.session

    @property
    def messages(self) -> Sequence[dict[str, Json]]:
        """What is said to the model."""
        messages: list[dict[str, Json]] = self.nodes[0]["messages"]
        return messages

    @property
    def answers(self) -> list[str]:
        """Variables of the answers."""
        return [node["output"]["variable"] for node in self.nodes]

    def only_node(self) -> dict[str, Json]:
        """The node of a call that wants one answer.

        Raises:
            ValueError: if it wants several.
        """
        first, *others = self.nodes
        if others:
            raise ValueError(f"a stream is one answer; n={len(self.nodes)} goes with invoke alone")
        return first

    def program(self, timeout_s: float | None) -> dict[str, Json]:
        """The call as a submission."""
        options: dict[str, Json] = {}
        if timeout_s is not None:
            options["deadline_s"] = timeout_s
        if self.session is not None:
            options["session"] = self.session
        program = {"name": "ChatConure", "nodes": list(self.nodes), "outputs": self.answers}
        return {"program": program, "options": options} if options else {"program": program}


def repeated(node: dict[str, Json], num_answers: int) -> tuple[dict[str, Json], ...]:
    """The nodes of a call that wants several answers; a seed is the first answer's own."""
    output = node["output"]
    others = []
    for index in range(1, num_answers):
        its = {**output, "variable": f"{output['variable']}_{index}"}
        if "seed" in output:
            its["seed"] = seed_of_answer(output["seed"], index)
        others.append({**node, "id": f"{node['id']}_{index}", "output": its})
    return (node, *others)
