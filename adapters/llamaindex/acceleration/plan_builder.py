"""The calls of one part of an app, built as `LLM.predict` builds them.

User code must not run on text that does not exist yet: a prompt that depends on a user's function
is not planned.

Invariant: a planned call is the call that the app makes, once the answers in its prompt are known.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping, Sequence
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
from .prompt_slots import SLOT, PromptSlot, planned_call, with_slots

_PRINTING = re.compile(r"""\{\{\s*\w+\s*\}\}|\{%\s*(?:chat\s+role=(['"])\w+\1|endchat)\s*%\}""")
"""What a planned RichPromptTemplate may contain: printed variables, starts and ends of messages."""

_LIBRARY_TEMPLATES = frozenset(
    template.template_str
    for template in vars(chat_prompts).values()
    if isinstance(template, RichPromptTemplate)
)
"""Templates of LlamaIndex, whose code is known."""


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
        self._num_slots = 0

    def slot(self, text: Expression) -> PromptSlot:
        """Return a slot for text that only the server has, with a unique mark."""
        self._num_slots += 1
        return PromptSlot(SLOT.format(f"{self._salt}.{self._num_slots}"), text)

    def add(
        self,
        template: BasePromptTemplate,
        prompt_args: dict[str, Any],
        slots: Sequence[PromptSlot] = (),
        reads: Sequence[PlannedCall] = (),
        when: Expression = None,
    ) -> PlannedCall | None:
        """Add the call that `LLM.predict` makes; return None if its prompt cannot be known.

        Args:
            template: template of the prompt.
            prompt_args: template variables; they contain marks in place of answers.
            slots: expressions for the marks.
            reads: calls whose answers the prompt and the condition read.
            when: condition under which the call runs.
        """
        if slots and _is_rich_chat(plain(self.llm, template)):
            # LlamaIndex trims and escapes the messages of such a template, depending on their text.
            return None
        call = predicted(self.llm, template, {**self.prompt_args, **prompt_args}, self.output_cls)
        if slots:
            made = with_slots(call, slots)
            if made is None:
                return None
            call = made
        return self.add_request(call, frozenset(each.variable for each in reads), when)

    def add_request(
        self, call: ModelRequest, reads: frozenset[str] = frozenset(), when: Expression = None
    ) -> PlannedCall:
        """Add a call whose request is known; `reads` are variables that it reads."""
        variable = self._fresh(self._place.partition(".")[0])
        planned = planned_call(variable, call, reads, when, self._place)
        self.calls.append(planned)
        return planned


def predicted(
    llm: Conure,
    template: BasePromptTemplate,
    prompt_args: dict[str, Any],
    output_cls: type[Any] | None = None,
) -> ModelRequest:
    """Return the call that `llm.predict(template, **prompt_args)` makes.

    Args:
        llm: LLM of the call.
        template: template of the prompt.
        prompt_args: template variables.
        output_cls: if given, return the call of `llm.structured_predict` with this class.

    Raises:
        NotPlanned: if the prompt depends on user code.
    """
    template = plain(llm, template, has_own_parser=output_cls is not None)
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


def plain(
    llm: Conure, template: BasePromptTemplate, *, has_own_parser: bool = False
) -> BasePromptTemplate:
    """Return the template that is used for this LLM.

    Args:
        llm: LLM of the call.
        template: template of the prompt.
        has_own_parser: the call replaces the output parser of the template.

    Raises:
        NotPlanned: if user code takes part in rendering it.
    """
    if isinstance(template, SelectorPromptTemplate):
        template = template.select(llm)
    if type(template) is RichPromptTemplate:
        text = template.template_str
        if text not in _LIBRARY_TEMPLATES and re.search(r"\{[{%#]", _PRINTING.sub("", text)):
            raise NotPlanned("its RichPromptTemplate does more than to print variables")
    elif type(template) not in (PromptTemplate, ChatPromptTemplate):
        raise NotPlanned(f"a {type(template).__name__} is rendered by custom code")
    if template.function_mappings:
        raise NotPlanned("its prompt has function_mappings")
    has_parser = template.output_parser is not None and not has_own_parser
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
