"""The calls of one part of an app, built as `LLM.predict` builds them.

A plan contains placeholders for answers that do not exist yet. User code must not run on them, so a
prompt that depends on a user's function is not planned.

Invariant: a planned call is the call that the app makes, once the answers in its prompt are known.
"""

from __future__ import annotations

import inspect
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

from llama_index.core.base.llms.generic_utils import messages_to_prompt
from llama_index.core.llms.llm import default_completion_to_prompt
from llama_index.core.output_parsers import PydanticOutputParser
from llama_index.core.prompts import (
    BasePromptTemplate,
    ChatPromptTemplate,
    PromptTemplate,
    RichPromptTemplate,
    SelectorPromptTemplate,
    chat_prompts,
)

from conure.server.program.ir import Expression

from ...speculation.planned_call import PlannedCall
from ..llm.llm import Conure
from ..llm.model_request import ModelRequest
from .prompt_inputs import PLACEHOLDER_FORMAT, PlaceholderInput, planned_call, with_inputs

_ALLOWED_MARKUP = re.compile(
    r"""\{\{\s*\w+\s*\}\}|\{%\s*(?:chat\s+role=(['"])\w+\1|endchat)\s*%\}"""
)
"""What a planned RichPromptTemplate may contain: printed variables, starts and ends of messages."""

_LIBRARY_TEMPLATES = frozenset(
    template.template_str
    for template in vars(chat_prompts).values()
    if isinstance(template, RichPromptTemplate)
)
"""Texts of LlamaIndex's own RichPromptTemplates, which run no user code."""

_UNRELATED_METHODS = re.compile(r"__\w+__|model_\w+|class_name")
"""Names of methods that do not change the calls of an LLM. Pydantic adds some to subclasses."""


class NotPlanned(Exception):  # noqa: N818 - not an error; the app runs as usual
    """A part of an app cannot be planned; the message is the reason."""


class PlanBuilder:
    """Collects the planned calls of one part of an app."""

    def __init__(self, llm: Conure, place: str, fresh: Callable[[str], str]) -> None:
        """Start without calls.

        Args:
            llm: LLM of the part.
            place: name of the part.
            fresh: makes a new variable name from a hint.
        """
        self.llm = llm
        self.calls: list[PlannedCall] = []
        self.prompt_args: Mapping[str, Any] = {}
        """Template variables of all prompts."""
        self.output_cls: type[Any] | None = None
        """Class that answers are parsed into; None: answers are text."""
        self._place = place
        self._fresh = fresh
        self._salt = uuid.uuid4().hex[:8]
        self._num_inputs = 0

    def placeholder(self, text: Expression) -> PlaceholderInput:
        """Return a unique placeholder for text that only the server has."""
        self._num_inputs += 1
        return PlaceholderInput(PLACEHOLDER_FORMAT.format(f"{self._salt}.{self._num_inputs}"), text)

    def add(
        self,
        template: BasePromptTemplate,
        prompt_args: dict[str, Any],
        inputs: Sequence[PlaceholderInput] = (),
        reads: Sequence[PlannedCall] = (),
        when: Expression = None,
    ) -> PlannedCall | None:
        """Add the call that `LLM.predict` makes.

        Args:
            template: template of the prompt.
            prompt_args: template variables; they contain placeholders in place of answers.
            inputs: expressions for the placeholders.
            reads: calls whose answers the prompt and the condition read.
            when: condition under which the call runs.

        Returns:
            The planned call; None if placeholders cannot express how its prompt depends on answers.

        Raises:
            NotPlanned: if the prompt depends on user code.
        """
        template = checked_template(self.llm, template, replaces_parser=self.output_cls is not None)
        if inputs and _is_rich_chat(template):
            # LlamaIndex trims and escapes the messages of such a template, depending on their text.
            return None
        prompt_args = {**self.prompt_args, **prompt_args}
        known = _request_of_predict(self.llm, template, prompt_args, self.output_cls)
        call = with_inputs(known, inputs) if inputs else known
        if call is None:
            return None
        return self.add_request(call, frozenset(each.variable for each in reads), when)

    def add_request(
        self, call: ModelRequest, reads: frozenset[str] = frozenset(), when: Expression = None
    ) -> PlannedCall:
        """Add a call whose request is known; `reads` are variables that it reads."""
        variable = self._fresh(self._place.partition(".")[0])
        planned = planned_call(variable, call, reads, when, self._place)
        self.calls.append(planned)
        return planned


def _request_of_predict(
    llm: Conure,
    template: BasePromptTemplate,
    prompt_args: dict[str, Any],
    output_cls: type[Any] | None,
) -> ModelRequest:
    """Return the call that `llm.predict(template, **prompt_args)` makes.

    Args:
        llm: LLM of the call.
        template: the result of `checked_template`.
        prompt_args: template variables.
        output_cls: if given, return the call of `llm.structured_predict` with this class.

    Raises:
        NotPlanned: if the answer would be a call of a tool.
    """
    kwargs: dict[str, Any] = {}
    if output_cls is not None:
        kwargs = llm.structured_output_options(output_cls, None)
        if "constraint" not in kwargs:
            raise NotPlanned("its answers are calls to tools")
        template = template.model_copy()
        template.output_parser = PydanticOutputParser(output_cls)
    if llm.is_chat_model:
        return llm.chat_request(llm._get_messages(template, **prompt_args), kwargs)
    if output_cls is not None:
        return llm.completion_request(
            template.format(llm=llm, **prompt_args), kwargs, formatted=True
        )
    return llm.completion_request(llm._get_prompt(template, **prompt_args), kwargs, formatted=True)


def check_llm(llm: Conure) -> None:
    """Check that nothing but the requests of an LLM determines its calls.

    Raises:
        NotPlanned: if a subclass overrides a method, or a rate limiter delays the calls.
    """
    if (name := overridden_method(llm)) is not None:
        raise NotPlanned(f"its LLM is a {type(llm).__name__}, which overrides {name!r}")
    if getattr(llm, "rate_limiter", None) is not None:  # since core 0.14
        raise NotPlanned("the rate limiter of its LLM decides when a call runs")


def overridden_method(llm: Conure) -> str | None:
    """Return the name of a method of `Conure` that the class of an LLM overrides."""
    classes = type(llm).__mro__
    for kind in classes[: classes.index(Conure)]:
        for name in vars(kind):
            method = inspect.getattr_static(Conure, name, None)
            is_method = isinstance(method, FunctionType | property | classmethod | staticmethod)
            if is_method and not _UNRELATED_METHODS.fullmatch(name):
                return name
    return None


def checked_template(
    llm: Conure, template: BasePromptTemplate, *, replaces_parser: bool = False
) -> BasePromptTemplate:
    """Return the template that this LLM uses, once it is clear that it runs no user code.

    Args:
        llm: LLM of the call.
        template: template of the prompt.
        replaces_parser: the call does not use the output parser of the template.

    Raises:
        NotPlanned: if rendering the template runs user code; the message is the reason.
    """
    if isinstance(template, SelectorPromptTemplate):
        template = template.select(llm)
    if type(template) is RichPromptTemplate:
        text = template.template_str
        if text not in _LIBRARY_TEMPLATES and re.search(r"\{[{%#]", _ALLOWED_MARKUP.sub("", text)):
            raise NotPlanned("its RichPromptTemplate does more than print variables")
    elif type(template) not in (PromptTemplate, ChatPromptTemplate):
        raise NotPlanned(f"a {type(template).__name__} is rendered by custom code")
    if template.function_mappings:
        raise NotPlanned("its prompt has function_mappings")
    has_parser = template.output_parser is not None and not replaces_parser
    if has_parser or llm.output_parser is not None:
        raise NotPlanned("its prompt has an output parser")
    if not llm.is_chat_model:
        _check_formatters(llm)
    return template


def _is_rich_chat(template: BasePromptTemplate) -> bool:
    return isinstance(template, RichPromptTemplate) and template.is_chat_template


def _check_formatters(llm: Conure) -> None:
    """Raise `NotPlanned` if a completion prompt passes through a user's function."""
    if llm.completion_to_prompt is not default_completion_to_prompt:
        raise NotPlanned("its LLM has a custom completion_to_prompt")
    if llm.messages_to_prompt is not messages_to_prompt:
        raise NotPlanned("its LLM has a custom messages_to_prompt")
    wrapper = llm.query_wrapper_prompt
    if wrapper is not None and (type(wrapper) is not PromptTemplate or wrapper.function_mappings):
        raise NotPlanned("its LLM has a query_wrapper_prompt with custom code")
