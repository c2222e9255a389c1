"""The endpoint that counts tokens: the ids of a text, or of messages as a call would send them."""

from __future__ import annotations

from typing import Annotated, Any

from litestar import Request, post
from msgspec import UNSET, Meta, Struct, UnsetType

from ..program.content import Json, Message
from ..program.errors import ProgramError
from ..service import TokenizedPrompt
from .openapi import error_responses, json_body
from .request_context import read_record, service_of


class TokenizeQuestion(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /v1/tokenize`: exactly one of `prompt` and `messages` is set."""

    model: str = "default"
    prompt: Annotated[str, Meta(max_length=4_194_304)] | UnsetType = UNSET
    messages: Annotated[list[Message], Meta(max_length=10_000)] | UnsetType = UNSET
    tools: list[dict[str, Json]] | UnsetType = UNSET
    """Tools that the messages may call."""
    chat_template_kwargs: dict[str, Json] = {}
    """Options of the chat template."""
    add_special_tokens: bool = False
    """Begin a prompt with the model's BOS, as a completion does."""


@post(
    "/v1/tokenize",
    status_code=200,
    operation_class=json_body(TokenizeQuestion),
    responses=error_responses(),
    tags=["programs"],
)
async def tokenize(request: Request[Any, Any, Any]) -> TokenizedPrompt:
    """Return the token ids of a prompt by the model's tokenizer and chat template."""
    question: TokenizeQuestion = await read_record(request, TokenizeQuestion)
    prompt = question.prompt if question.messages is UNSET else question.messages
    if prompt is UNSET or (question.prompt is not UNSET and question.messages is not UNSET):
        raise ProgramError("tokenize.prompt", "give either 'prompt' or 'messages'")
    return await service_of(request).tokenize(
        question.model,
        prompt,
        tools=[] if question.tools is UNSET else question.tools,
        bos=question.add_special_tokens,
        template_options=question.chat_template_kwargs,
    )


ROUTES = (tokenize,)
BODIES = (TokenizeQuestion,)
