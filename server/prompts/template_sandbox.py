"""A sandbox that runs a model's Jinja chat template under limits.

A chat template is untrusted: it is part of the downloaded model. It runs in Jinja's immutable
sandbox (no access to Python internals, arguments cannot be modified), with the extensions that
Hugging Face templates expect: loop controls, `raise_exception`, `strftime_now`, a `tojson` without
HTML escaping, and `{% generation %}`, which has no effect on the text.

Limited are: the iterations of all loops and calls of all macros together, by number and processor
time (counted at the head of each body); the length of a `range`, a repetition (`"x" * n`), a power
and a `%` format; the length of the output; the recursion depth. Not limited is the memory of
strings that do not reach the output, built by filters, methods and concatenation (`center`,
`replace`, doubling in a loop). The operator chose the template; the limits protect against
accidents and hostile *messages*.

Out of scope: messages and tokens.

Invariants: a rendering depends only on its variables, including `strftime_now`; it may run in any
thread.
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

MAX_OUTPUT_CHARS: Final = 64 * 2**20
MAX_STEPS: Final = 4_000_000
MAX_CPU_S: Final = 10.0
_STEPS_PER_LOOK: Final = 1_024
_MAX_POWER_BITS: Final = 4_096
_STEP: Final = "__step"
"""Variable for the calls that `_count_steps` inserts. No template can use this name."""
_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Exceptions that a template raises on messages it was not written for."""


class TemplateSandbox:
    """A compiled template."""

    def __init__(self, source: str) -> None:
        """Compile a template.

        Raises:
            PromptError: `prompt.template` if the source is not a valid template.
        """
        environment = _Environment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, LoopControlExtension],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        # `lipsum` writes random text of any length.
        environment.globals.pop("lipsum", None)
        try:
            tree = environment.parse(source)
            _count_steps(tree)
            self._template = environment.from_string(tree)
            # Merge the globals once; otherwise Jinja merges its layers in every rendering.
            self._template.globals = dict(self._template.globals)
        except (jinja2.TemplateError, RecursionError) as error:
            raise PromptError(
                "prompt.template", f"The model's chat template does not compile: {error}"
            ) from error

    def render(self, variables: Mapping[str, Any], *, strftime: Callable[[str], str]) -> str:
        """Return the text of the template with these variables.

        Args:
            variables: plain JSON values by name.
            strftime: formats the local time, for templates that call `strftime_now`.

        Raises:
            PromptError: `prompt.template` if the template rejects the variables, fails on them, or
                exceeds a limit.
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
                "prompt.template", f"The model's chat template rejects this chat: {reason}"
            ) from error
        return "".join(parts)


class _Budget:
    """Counts the steps of one rendering."""

    __slots__ = ("_deadline", "_num_steps")

    def __init__(self) -> None:
        self._num_steps = 0
        self._deadline: float | None = None

    def step(self) -> None:
        """Count a step; raise a template error if the limit is exceeded."""
        self._num_steps += 1
        if self._num_steps % _STEPS_PER_LOOK:
            return
        now = time.thread_time()
        if self._deadline is None:
            self._deadline = now + MAX_CPU_S
        if now > self._deadline or self._num_steps > MAX_STEPS:
            raise jinja2.TemplateRuntimeError("its loops run too long")


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with limits on operators that produce large results."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply a limited operator.

        Raises:
            SecurityError: if the result would be too large.
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
    """`{% generation %}`: marks the model's output for training. Here it only opens a scope."""

    tags = frozenset({"generation"})  # type: ignore[assignment]  # Jinja declares a set and only reads it.

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the body in its own scope, as in Hugging Face's implementation."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _count_steps(tree: nodes.Template) -> None:
    """Insert a call of the step counter at the head of every body that can run repeatedly."""
    environment = tree.environment
    assert environment is not None
    for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        assert isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock)
        call = nodes.Call(nodes.Name(_STEP, "load"), [], [], None, None)
        statement = nodes.ExprStmt(call).set_lineno(node.lineno)
        node.body.insert(0, statement.set_environment(environment))


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
