"""One call to a model as a `generate` node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from conure.server.program.ir import Json

from ...client.exchange.programs import new_id

ANSWER = "answer"
"""The variable of a program with one call."""
CALL = "call"
"""Its node."""


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A request to a model: `messages`, or a `prompt` that the model continues."""

    model: str
    output: Mapping[str, Json]
    """Sampling fields, and a constraint if there is one."""
    messages: list[dict[str, Json]] | None = None
    prompt: list[dict[str, Json]] | None = None
    """Segments without the output."""
    extra: Mapping[str, Json] = field(default_factory=dict)
    """`tools` and `tool_choice`, if the model may call tools."""
    timeout_s: float | None = None
    """For the call, including the time in the queue."""

    def node(self, node_id: str, variable: str, **common: Json) -> dict[str, Json]:
        """Return the `generate` node; its value is the answer in the `message` form.

        The node has no timeout: the limit counts from the application's call, and a planned node
        may start long before it.

        Args:
            node_id: id of the node.
            variable: receives the value.
            **common: fields that any node has, such as `when`.
        """
        node = {"id": node_id, "op": "generate", "model": self.model, **common, **self.extra}
        output = {**self.output, "as": "message"}
        if self.messages is not None:
            return {**node, "messages": self.messages, "output": {"variable": variable, **output}}
        return {**node, "prompt": [*(self.prompt or []), {"output": variable, **output}]}


def program_of(call: ModelRequest) -> dict[str, Json]:
    """Return a new submission of a program with one call.

    It has an id, so that an interrupted caller can cancel it before the server answers.
    """
    program = {
        "name": "Conure.llamaindex",
        "nodes": [call.node(CALL, ANSWER)],
        "outputs": [ANSWER],
    }
    options = {} if call.timeout_s is None else {"deadline_s": call.timeout_s}
    return {"id": new_id(), "program": program, "options": options}
