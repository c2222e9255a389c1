"""A model's Jinja template, run under limits.

A chat template comes with the weights, from strangers. It runs in Jinja's immutable sandbox
(no access to Python's insides, nothing it is given can be changed) with the additions that
Hugging Face's templates expect: loop controls, `raise_exception`, `strftime_now`, a `tojson`
that escapes no HTML, and `{% generation %}`, which marks text and changes none.

Bounded: the turns of all loops and the calls of all macros together, in number and in
processor time (a step is counted at the head of each body); the length of a `range`, of a
repetition (`"x" * n`), a power and a `%` format; the length of the output; the depth of
recursion. Not bounded: the memory of strings that never reach the output, made by filters,
methods and concatenation (`center`, `replace`, doubling in a loop). Whoever serves a model
chose its template; the limits are there for accidents and for hostile *messages*.

Knows Jinja. Refuses to know messages and tokens. Kept true: a rendering depends on the
variables alone, `strftime_now` among them; it may run in any thread.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..program.errors import PromptError
from .unseen import is_string, printed, trim

MAX_OUTPUT_CHARS: Final = 64 * 2**20
MAX_STEPS: Final = 4_000_000
MAX_CPU_S: Final = 10.0
_STEPS_PER_LOOK: Final = 1_024
_MAX_POWER_BITS: Final = 4_096
_STEP: Final = "__step"
"""The variable behind the calls that `_count_steps` plants; no template spells it."""
_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a template's own code can raise on messages that it was not written for."""


class TemplateSandbox:
    """One compiled template."""

    def __init__(self, source: str) -> None:
        """Compile a template.

        Raises:
            PromptError: `prompt.template` if the source is no template.
        """
        environment = _Environment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, LoopControlExtension],
            finalize=printed,
        )
        environment.filters["tojson"] = _to_json
        environment.filters["trim"] = trim
        environment.tests["string"] = is_string
        environment.globals["raise_exception"] = _raise_exception
        # Its output is random and as long as it is asked to be.
        environment.globals.pop("lipsum", None)
        try:
            tree = environment.parse(source)
            _count_steps(tree)
            self.rereads = _rereads(tree)
            """What it writes may be changed, or come back as a value, by a block around it."""
            self._template = environment.from_string(tree)
            # Jinja layers an empty scope over the environment's, to be joined by every rendering.
            self._template.globals = dict(self._template.globals)
        except (jinja2.TemplateError, RecursionError) as error:
            raise PromptError(
                "prompt.template", f"The model's chat template does not compile: {error}"
            ) from error

    def render(self, variables: Mapping[str, Any], *, strftime: Callable[[str], str]) -> str:
        """Return the text of the template with these variables.

        Args:
            variables: plain JSON values by name; a string may be `Unseen`.
            strftime: formats the local time, for templates that call `strftime_now`.

        Raises:
            PromptError: `prompt.template` if the template refuses the variables, fails on
                them, or exceeds a limit.
        """
        budget = _Budget()
        values = {**variables, _STEP: budget.step, "strftime_now": strftime}
        parts: list[str] = []
        length = 0
        try:
            for part in self._template.generate(values):
                parts.append(part)
                length += len(part)
                if length > MAX_OUTPUT_CHARS:
                    raise jinja2.TemplateRuntimeError(
                        f"its output is longer than {MAX_OUTPUT_CHARS} characters"
                    )
        except _FAILURES as error:
            reason = str(error) or type(error).__name__
            raise PromptError(
                "prompt.template", f"The model's chat template refuses this chat: {reason}"
            ) from error
        return "".join(parts)


class _Budget:
    """Steps that one rendering has taken."""

    __slots__ = ("_deadline", "_num_steps")

    def __init__(self) -> None:
        self._num_steps = 0
        self._deadline: float | None = None

    def step(self) -> None:
        """Count a step; raises a template error when there were too many."""
        self._num_steps += 1
        if self._num_steps % _STEPS_PER_LOOK:
            return
        now = time.thread_time()
        if self._deadline is None:
            self._deadline = now + MAX_CPU_S
        if now > self._deadline or self._num_steps > MAX_STEPS:
            raise jinja2.TemplateRuntimeError("its loops run too long")


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with operators that make much of little under guard."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply a guarded operator.

        Raises:
            SecurityError: if the result would be out of proportion.
        """
        is_whole = isinstance(left, int) and isinstance(right, int)
        if operator == "**" and is_whole and left.bit_length() * right > _MAX_POWER_BITS:
            raise SecurityError("a power is too large")
        if operator == "%" and isinstance(left, str) and re.search(r"\d{4}|\*", left):
            raise SecurityError("the width of a format is too large")
        if operator == "*":
            for text, count in ((left, right), (right, left)):
                if (
                    isinstance(text, str | list | tuple)
                    and isinstance(count, int)
                    and len(text) * count > MAX_OUTPUT_CHARS
                ):
                    raise SecurityError(f"a repetition of {count} is too long")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """`{% generation %}`: marks what the model said, for training; here it only scopes names."""

    tags = frozenset({"generation"})  # type: ignore[assignment]  # Jinja says set and only reads.

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the body in a scope of its own, as the marked one has."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _count_steps(tree: nodes.Template) -> None:
    """Plant a call of the step counter at the head of every body that can run again."""
    environment = tree.environment
    assert environment is not None
    for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        assert isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock)
        call = nodes.Call(nodes.Name(_STEP, "load"), [], [], None, None)
        statement = nodes.ExprStmt(call).set_lineno(node.lineno)
        node.body.insert(0, statement.set_environment(environment))


def _rereads(tree: nodes.Template) -> bool:
    captures: tuple[type[nodes.Node], ...] = (
        nodes.AssignBlock,
        nodes.Block,
        nodes.CallBlock,
        nodes.FilterBlock,
        nodes.Macro,
        nodes.ScopedEvalContextModifier,  # `autoescape`
    )
    if any(tree.find(kind) is not None for kind in captures):
        return True
    return any(loop.recursive for loop in tree.find_all(nodes.For))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
