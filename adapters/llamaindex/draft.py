"""Calls of one part of an app, put together as `LLM.predict` will put them together.

Knows LlamaIndex's prompt templates and how its LLMs use them. Refuses to run code of the
user on text that is not there: a prompt that a function has a hand in is not planned.

Kept true: a drafted call is the call that the app makes, if its answers are what it reads.
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
)

from conure.server.program.ir import Expression

from .call import Call
from .llm import Conure
from .plan import SLOT, Planned, Slot, with_slots

_PRINTING = re.compile(r"""\{\{\s*\w+\s*\}\}|\{%\s*(?:chat\s+role=(['"])\w+\1|endchat)\s*%\}""")
"""What a RichPromptTemplate may do in a plan: print a variable, begin and end a message."""


class NotPlanned(Exception):  # noqa: N818 - nothing is wrong; the app runs as it is
    """A part of an app that is left to the app, and why."""


class Draft:
    """The calls of one part of an app, while they are planned."""

    def __init__(self, llm: Conure, place: str, fresh: Callable[[str], str]) -> None:
        """Plans nothing yet.

        Args:
            llm: that is called.
            place: names the part.
            fresh: makes a variable of a hint.
        """
        self.llm = llm
        self.calls: list[Planned] = []
        self.prompt_args: Mapping[str, Any] = {}
        """What every prompt is filled with, beside its own."""
        self.output_cls: type[Any] | None = None
        """What every answer is made an instance of; None: it is text."""
        self._place = place
        self._fresh = fresh
        self._salt = uuid.uuid4().hex[:8]
        self._num_slots = 0

    def slot(self, text: Expression) -> Slot:
        """A place in a prompt for a text that only the server has, with a mark of its own."""
        self._num_slots += 1
        return Slot(SLOT.format(f"{self._salt}.{self._num_slots}"), text)

    def add(
        self,
        template: BasePromptTemplate,
        prompt_args: dict[str, Any],
        slots: Sequence[Slot] = (),
        reads: Sequence[Planned] = (),
        when: Expression = None,
    ) -> Planned | None:
        """One call, as `LLM.predict` makes it; None if its prompt cannot be known.

        Args:
            template: of the prompt.
            prompt_args: what it is filled with; marks stand for answers.
            slots: what the marks stand for.
            reads: calls whose answers it reads.
            when: condition under which it runs.
        """
        if slots and _is_rich_chat(plain(self.llm, template)):
            return None  # its messages are trimmed and escaped as the text in them demands
        call = predicted(self.llm, template, {**self.prompt_args, **prompt_args}, self.output_cls)
        if slots:
            made = with_slots(call, slots)
            if made is None:
                return None
            call = made
        variable = self._fresh(self._place.partition(".")[0])
        names = frozenset(each.variable for each in reads)
        planned = Planned(variable, call, names, when, self._place)
        self.calls.append(planned)
        return planned


def predicted(
    llm: Conure,
    template: BasePromptTemplate,
    prompt_args: dict[str, Any],
    output_cls: type[Any] | None = None,
) -> Call:
    """The call that `llm.predict(template, **prompt_args)` makes.

    Args:
        llm: that is called.
        template: of the prompt.
        prompt_args: what it is filled with.
        output_cls: the call is that of `llm.structured_predict`, with this class.

    Raises:
        NotPlanned: if code of the user has a hand in the prompt.
    """
    template = plain(llm, template)
    held: dict[str, Any] = {}
    if output_cls is not None:
        held = llm.held(output_cls, None)
        if "constraint" not in held:
            raise NotPlanned("its answers are calls to tools")
        template = template.model_copy()
        template.output_parser = PydanticOutputParser(output_cls)
    if llm.metadata.is_chat_model:
        return llm.chat_call(llm._get_messages(template, **prompt_args), held)
    if output_cls is not None:
        return llm.completion_call(template.format(llm=llm, **prompt_args), held, formatted=True)
    return llm.completion_call(llm._get_prompt(template, **prompt_args), held, formatted=True)


def plain(llm: Conure, template: BasePromptTemplate) -> BasePromptTemplate:
    """The template that is used for this LLM, if nothing but LlamaIndex renders it.

    Raises:
        NotPlanned: if code of the user has a hand in it.
    """
    if isinstance(template, SelectorPromptTemplate):
        template = template.select(llm)
    if type(template) is RichPromptTemplate:
        if re.search(r"\{[{%#]", _PRINTING.sub("", template.template_str)):
            raise NotPlanned("its RichPromptTemplate does more than to print variables")
    elif type(template) not in (PromptTemplate, ChatPromptTemplate):
        raise NotPlanned(f"a {type(template).__name__} is rendered by code of its own")
    if template.function_mappings:
        raise NotPlanned("its prompt has function_mappings")
    if template.output_parser is not None or llm.output_parser is not None:
        raise NotPlanned("its prompt has an output parser")
    if not llm.is_chat_model:
        _check_formatters(llm)
    return template


def _is_rich_chat(template: BasePromptTemplate) -> bool:
    return isinstance(template, RichPromptTemplate) and template.is_chat_template


def _check_formatters(llm: Conure) -> None:
    """Refuse functions that a bare prompt goes through, where they are not LlamaIndex's."""
    if llm.completion_to_prompt is not default_completion_to_prompt:
        raise NotPlanned("its LLM has a completion_to_prompt of its own")
    if llm.messages_to_prompt is not messages_to_prompt:
        raise NotPlanned("its LLM has a messages_to_prompt of its own")
    wrapper = llm.query_wrapper_prompt
    if wrapper is not None and (type(wrapper) is not PromptTemplate or wrapper.function_mappings):
        raise NotPlanned("its LLM has a query_wrapper_prompt with code of its own")
