"""Random programs, and the expected values of their pure nodes.

A program is drawn whole from one random source: `generate` nodes as prompts (one output or
two) and as messages, `expr` nodes, client steps, joined to a random acyclic graph of 1 to 20
nodes in random order. Texts stay short, so that no prompt outgrows a context.

`evaluate` is an independent implementation of the few operators used here. Comparing it with the
committed values shows whether a value was computed from committed inputs, not from inputs that a
crash has lost.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

Json = Any

MAX_TEXT = 40
"""Characters of a text that other nodes read."""


@dataclass(slots=True)
class RandomProgram:
    """A submission and the facts about its nodes that the driver needs."""

    submission: dict[str, Json]
    variables: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Node to the variables that it produces."""
    client_args: dict[str, dict[str, Json]] = field(default_factory=dict)
    """Client node to the expressions of its arguments."""
    exprs: dict[str, Json] = field(default_factory=dict)
    """Variable to the expression that it is the value of."""


def random_program(source: random.Random, *, max_nodes: int = 20) -> RandomProgram:
    """Draw a program."""
    return _Draw(source).program(source.randint(1, max_nodes))


def evaluate(expression: Json, values: dict[str, Json]) -> Json:
    """Return the value of an expression with the operators used here."""
    match expression:
        case dict():
            ((operator, operand),) = expression.items()
            if operator == "var":
                return values[operand]
            if operator == "object":
                return {key: evaluate(item, values) for key, item in operand.items()}
            operands = evaluate(operand, values)
            match operator:
                case "concat":
                    return "".join(operands)
                case "join":
                    return operands[1].join(operands[0])
                case "slice":
                    return operands[0][operands[1] : operands[2]]
                case "lower":
                    return operands.lower()
                case "len":
                    return len(operands)
                case _:
                    raise ValueError(f"unknown operator {operator!r}")
        case list():
            return [evaluate(item, values) for item in expression]
        case _:
            return expression


class _Draw:
    """A program under construction."""

    def __init__(self, source: random.Random) -> None:
        self._source = source
        self._texts = ["topic"]
        self._nodes: list[dict[str, Json]] = []
        self._program = RandomProgram({})

    def program(self, num_nodes: int) -> RandomProgram:
        for i in range(num_nodes):
            draw = self._source.choices(
                (self._prompt, self._messages, self._expr, self._client), (4, 3, 2, 2)
            )[0]
            node = {"id": f"n{i}", **draw(i)}
            if self._nodes and self._source.random() < 0.2:
                node["after"] = [self._source.choice(self._nodes)["id"]]
            self._nodes.append(node)
        produced = [name for names in self._program.variables.values() for name in names]
        nodes = self._source.sample(self._nodes, len(self._nodes))
        outputs = self._source.sample(produced, self._source.randint(1, len(produced)))
        self._program.submission = {
            "program": {
                "name": f"random of {num_nodes}",
                "variables": {"topic": {"type": "string"}},
                "nodes": nodes,
                "outputs": outputs,
            },
            "inputs": {"topic": f"topic {self._source.randrange(1_000)}"},
            "objectives": {outputs[0]: self._source.choice(("latency", "throughput"))},
        }
        return self._program

    def _prompt(self, i: int) -> dict[str, Json]:
        segments: list[Json] = [{"text": self._source.choice(("Say: ", "Continue: ", "List "))}]
        segments += [{"input": name} for name in self._read()]
        names = [f"v{i}"]
        segments += [{"text": "\nAnswer: "}, {"output": names[0], **self._sampling()}]
        if self._source.random() < 0.3:
            names.append(f"w{i}")
            segments += [{"text": "\nAgain: "}, {"output": names[1], **self._sampling()}]
        self._produce(i, *names)
        return {"op": "generate", "prompt": segments}

    def _messages(self, i: int) -> dict[str, Json]:
        content = [{"text": "Regarding "}, *({"input": name} for name in self._read())]
        self._produce(i, f"v{i}")
        return {
            "op": "generate",
            "messages": [
                {"role": "system", "content": "You are brief."},
                {"role": "user", "content": content},
            ],
            "output": {"variable": f"v{i}", **self._sampling()},
        }

    def _expr(self, i: int) -> dict[str, Json]:
        read: list[Json] = [{"var": name} for name in self._read()] or [""]
        kind = self._source.randrange(4)
        expr: Json
        if kind == 0:
            expr = {"slice": [{"concat": [*read, "-", str(i)]}, 0, MAX_TEXT]}
        elif kind == 1:
            expr = {"slice": [{"join": [read, ", "]}, 0, MAX_TEXT]}
        elif kind == 2:
            expr = {"lower": read[0]}
        else:
            expr = {"object": {"texts": read, "length": {"len": read[0]}, "same": 1.5}}
        self._program.exprs[f"v{i}"] = expr
        self._produce(i, f"v{i}", is_text=kind != 3)
        return {"op": "expr", "expr": expr, "output": f"v{i}"}

    def _client(self, i: int) -> dict[str, Json]:
        args = {"texts": [{"var": name} for name in self._read()], "number": i}
        self._program.client_args[f"n{i}"] = args
        self._produce(i, f"v{i}")
        return {"op": "client", "name": "step", "args": args, "output": f"v{i}"}

    def _read(self) -> list[str]:
        """Return up to three known texts, preferring late ones, so that programs get deep."""
        late = self._texts[-6:]
        return self._source.sample(late, min(len(late), self._source.choice((0, 1, 1, 2, 3))))

    def _produce(self, i: int, *names: str, is_text: bool = True) -> None:
        self._program.variables[f"n{i}"] = names
        if is_text:
            self._texts += names

    def _sampling(self) -> dict[str, Json]:
        return {
            "max_tokens": self._source.randint(1, 12),
            "temperature": self._source.choice((0, 1.0)),
        }
