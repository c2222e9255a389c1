"""Calls of one part of an app, put together as `LLM.predict` will put them together.

Knows LlamaIndex's prompt templates and how its LLMs use them. Refuses to run code of the
user on text that is not there: a prompt that a function has a hand in is not planned.

Kept true: a drafted call is the call that the app makes, if its answers are what it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llama_index.core.prompts import (
    BasePromptTemplate,
    ChatPromptTemplate,
    PromptTemplate,
    SelectorPromptTemplate,
)

from conure.server.program.ir import Expression

from .call import Call
from .llm import Conure
from .plan import Planned, Slot, with_slots


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
        self._place = place
        self._fresh = fresh

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
        call = predicted(self.llm, template, prompt_args)
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


def predicted(llm: Conure, template: BasePromptTemplate, prompt_args: dict[str, Any]) -> Call:
    """The call that `llm.predict(template, **prompt_args)` makes.

    Raises:
        NotPlanned: if code of the user has a hand in the prompt.
    """
    template = plain(llm, template)
    if llm.metadata.is_chat_model:
        return llm.chat_call(llm._get_messages(template, **prompt_args), {})
    prompt = llm._get_prompt(template, **prompt_args)
    return llm.completion_call(prompt, {}, formatted=True)


def plain(llm: Conure, template: BasePromptTemplate) -> BasePromptTemplate:
    """The template that is used for this LLM, if nothing but LlamaIndex renders it.

    Raises:
        NotPlanned: if code of the user has a hand in it.
    """
    if isinstance(template, SelectorPromptTemplate):
        template = template.select(llm)
    if type(template) not in (PromptTemplate, ChatPromptTemplate):
        raise NotPlanned(f"a {type(template).__name__} is rendered by code of its own")
    if template.function_mappings:
        raise NotPlanned("its prompt has function_mappings")
    if template.output_parser is not None or llm.output_parser is not None:
        raise NotPlanned("its prompt has an output parser")
    return template
