"""One call to the model as a program, with one node per requested answer.

Responsibility: names of nodes and variables, seeds of further answers, the session of a call.

Out of scope: connections and LangChain's classes.

Invariants: a call has the same nodes inside and outside an accelerated chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from conure.server.program.ir import Json
from conure.server.program.seed import seed_of_answer

from ...client.exchange.programs import new_id
from .sessions import ResumedSession

ANSWER: Final = "answer"
"""Variable of a call's first answer."""
CALL: Final = "chat"
"""Id of the node of a call's first answer."""


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A request for one or more answers to the same messages."""

    nodes: tuple[dict[str, Json], ...]
    thread: str | None
    """Session named by the app, if any."""
    resumed: ResumedSession | None = None
    """Inferred session, if the app names none and the call continues a recorded history."""

    @property
    def session(self) -> str | None:
        """Name of the session of the call, if known."""
        return self.thread if self.resumed is None else self.resumed.session

    @property
    def messages(self) -> Sequence[dict[str, Json]]:
        """Messages of the call."""
        messages: list[dict[str, Json]] = self.nodes[0]["messages"]
        return messages

    @property
    def answers(self) -> list[str]:
        """Variables of the answers."""
        return [node["output"]["variable"] for node in self.nodes]

    def only_node(self) -> dict[str, Json]:
        """Return the node of a call with one answer.

        Raises:
            ValueError: if the call requests several answers.
        """
        first, *others = self.nodes
        if others:
            raise ValueError(f"a stream has one answer, got n={len(self.nodes)}; use invoke")
        return first

    def program(self, timeout_s: float | None) -> dict[str, Json]:
        """Return a new submission of the call.

        It has an id, so that an interrupted caller can cancel it before the server answers.
        """
        options: dict[str, Json] = {}
        if timeout_s is not None:
            options["deadline_s"] = timeout_s
        if self.session is not None:
            options["session"] = self.session
        program = {"name": "ChatConure", "nodes": list(self.nodes), "outputs": self.answers}
        submission: dict[str, Json] = {"id": new_id(), "program": program}
        return {**submission, "options": options} if options else submission


def answer_nodes(node: dict[str, Json], num_answers: int) -> tuple[dict[str, Json], ...]:
    """Return one node per answer; the seeds of further answers derive from the first."""
    output = node["output"]
    others = []
    for index in range(1, num_answers):
        its = {**output, "variable": f"{output['variable']}_{index}"}
        if "seed" in output:
            its["seed"] = seed_of_answer(output["seed"], index)
        others.append({**node, "id": f"{node['id']}_{index}", "output": its})
    return (node, *others)
