"""The LlamaIndex LLM `Conure`, for llama-index-core 0.12 to 0.14.

Responsibility: LlamaIndex's LLM interface: chat and completion, complete and streamed, sync and
async. `CallBackend` sends the calls.

Invariants: events and callbacks are LlamaIndex's own, one pair per call.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.bridge.pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    model_validator,
)
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import LLM, ToolSelection
from llama_index.core.prompts import PromptTemplate
from llama_index.core.types import PydanticProgramMode

from conure.server.program.errors import NotFoundError
from conure.server.program.ir import Json

from ...client import Client
from ...client.client_cache import ModelClients
from ...client.exchange.models import find_named
from ..acceleration.scope import active_scope
from ..client_pickling import state_without_client
from .answer_checks import checked
from .answer_chunks import (
    AnswerCheck,
    achat_chunks,
    acompletion_chunks,
    chat_chunks,
    completion_chunks,
)
from .call_backend import CallBackend, DirectBackend
from .messages import (
    chat_response,
    check_text,
    completion_response,
    to_wire,
    tool_selections,
)
from .model_request import ModelRequest
from .request_options import format_fields, output_fields, refuse_unknown, tool_fields
from .server_tokenizer import ServerTokenizer

if TYPE_CHECKING:
    from llama_index.core.tools.types import BaseTool

RESERVED_OUTPUT = 512
"""Number of tokens that LlamaIndex leaves for an answer when it fills a prompt, if `max_tokens` is
not set. The answer itself may take all that the context leaves."""


class Conure(FunctionCallingLLM):
    """A model on a Conure server.

    Example:
        ```python
        llm = Conure(temperature=0, max_tokens=200)
        print(llm.complete("Say hello"))
        ```
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=(), extra="forbid")

    model: str = "default"
    """Name of a model on the server."""
    base_url: str | None = None
    """URL of the server. None: the environment variable CONURE_URL, else 127.0.0.1:8400."""
    api_key: str | None = Field(default=None, exclude=True, repr=False)
    """Bearer token for a proxy. None: the environment variable CONURE_API_KEY."""
    default_headers: dict[str, str] | None = Field(default=None, exclude=True, repr=False)
    """HTTP headers that are sent with every request, for example for a proxy."""
    client: Client | None = Field(default=None, exclude=True)
    """An open client, used instead of `base_url`. The LLM does not close it."""
    temperature: float | None = None
    """0 decodes greedily. None: 1."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens of an answer. None: all that the model's context leaves."""
    top_p: float | None = None
    stop: list[str] | None = None
    seed: int | None = None
    additional_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Options of every call that are not fields, such as `top_k`."""
    timeout: float | None = None
    """Seconds for one call, including the time in the queue. None: no limit."""
    max_retries: int = 4
    """Number of retries of a refused request (status 429, 502, 503, 504). A request that gets no
    answer is sent again for some seconds. 0 disables both."""
    is_chat_model: bool = True
    """True: a prompt is sent as one chat message, through the model's chat template. False: the
    model continues plain text; a chat is converted to text.
    """
    context_window: int | None = None
    """Maximum number of tokens of prompt and answer together. None: the server's limit."""
    pydantic_program_mode: PydanticProgramMode = PydanticProgramMode.LLM
    """Structured outputs are texts that the server constrains to their JSON schema."""

    _clients: ModelClients = PrivateAttr(default_factory=ModelClients)
    _model_infos: dict[str, dict[str, Json]] = PrivateAttr(default_factory=dict)

    _refuse_unknown = model_validator(mode="before")(classmethod(refuse_unknown))  # type: ignore[arg-type]  # pydantic binds it

    def __getstate__(self) -> dict[Any, Any]:
        return state_without_client(self, super().__getstate__)

    @classmethod
    def class_name(cls) -> str:
        """Return the name under which LlamaIndex serializes this LLM."""
        return "conure_llm"

    @property
    def metadata(self) -> LLMMetadata:
        """Metadata of the model, requested from the server once.

        Raises:
            NotFoundError: if the server has no such model.
            UnavailableError: if the server cannot be reached.
        """
        page = self._model_info()
        window = self.context_window or page["max_model_len"]
        return LLMMetadata(
            context_window=window,
            num_output=self.max_tokens or min(RESERVED_OUTPUT, max(1, window // 4)),
            is_chat_model=self.is_chat_model,
            is_function_calling_model=(
                self.is_chat_model and "tools" in (page.get("capabilities") or [])
            ),
            model_name=page["id"],
            system_role=MessageRole.SYSTEM,
        )

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Return the model's answer to a chat."""
        call = self.chat_request(messages, kwargs)
        final = self._check(call)(self.backend().answer(call))
        return chat_response(final.value, program=final.program)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """`chat` for asyncio."""
        call = self.chat_request(messages, kwargs)
        final = self._check(call)(await self.backend().aanswer(call))
        return chat_response(final.value, program=final.program)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Stream `chat`; the last chunk has the token counts."""
        call = self.chat_request(messages, kwargs)
        return chat_chunks(self.backend().stream(call), self._check(call))

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        """`stream_chat` for asyncio."""
        call = self.chat_request(messages, kwargs)
        return achat_chunks(self.backend().astream(call), self._check(call))

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Return the model's answer to a prompt."""
        call = self.completion_request(prompt, kwargs, formatted=formatted)
        final = self._check(call)(self.backend().answer(call))
        return completion_response(final.value, program=final.program)

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        """`complete` for asyncio."""
        call = self.completion_request(prompt, kwargs, formatted=formatted)
        final = self._check(call)(await self.backend().aanswer(call))
        return completion_response(final.value, program=final.program)

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        """Stream `complete`; the last chunk has the token counts."""
        call = self.completion_request(prompt, kwargs, formatted=formatted)
        return completion_chunks(self.backend().stream(call), self._check(call))

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """`stream_complete` for asyncio."""
        call = self.completion_request(prompt, kwargs, formatted=formatted)
        return acompletion_chunks(self.backend().astream(call), self._check(call))

    def structured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Any:
        """LlamaIndex's method, with answers constrained to the schema of `output_cls`."""
        options = self.structured_output_options(output_cls, llm_kwargs)
        return _without_span(LLM.structured_predict)(
            self, output_cls, prompt, llm_kwargs=options, **prompt_args
        )

    async def astructured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Any:
        """`structured_predict` for asyncio."""
        options = self.structured_output_options(output_cls, llm_kwargs)
        return await _without_span(LLM.astructured_predict)(
            self, output_cls, prompt, llm_kwargs=options, **prompt_args
        )

    def _structured_stream_call(
        self,
        output_cls: type[BaseModel],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Any:
        options = self.structured_output_options(output_cls, llm_kwargs)
        return super()._structured_stream_call(output_cls, prompt, options, **prompt_args)

    async def _structured_astream_call(
        self,
        output_cls: type[BaseModel],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Any:
        options = self.structured_output_options(output_cls, llm_kwargs)
        return await super()._structured_astream_call(output_cls, prompt, options, **prompt_args)

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        tool_choice: str | dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        messages = list(chat_history or [])
        if isinstance(user_msg, str):
            user_msg = ChatMessage(role=MessageRole.USER, content=user_msg)
        if user_msg is not None:
            messages.append(user_msg)
        prepared: dict[str, Any] = {"messages": messages}
        if tools:
            prepared["tools"] = [tool.metadata.to_openai_tool() for tool in tools]
            default = "required" if tool_required else self.additional_kwargs.get("tool_choice")
            prepared["tool_choice"] = tool_choice or default or "auto"
            if not allow_parallel_tool_calls:
                prepared["parallel_tool_calls"] = False
        return {**prepared, **kwargs}

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """Return the tool calls of an answer.

        Raises:
            ValueError: if there are none and `error_on_no_tool_call`.
            RunError: if the arguments of a call are not a JSON object.
        """
        tool_calls = tool_selections(response.message)
        if not tool_calls and error_on_no_tool_call:
            raise ValueError(
                f"Expected at least one tool call, but got {len(tool_calls)} tool calls."
            )
        return tool_calls

    def chat_request(
        self, messages: Sequence[ChatMessage], kwargs: Mapping[str, Any]
    ) -> ModelRequest:
        """Return the request of `chat`.

        Raises:
            ValueError: if an argument of the call is unknown, or if it has tools and
                `is_chat_model` is false.
            ProgramError: if a message has unsupported content, or text that is not Unicode.
        """
        if not self.is_chat_model:
            assert self.messages_to_prompt is not None  # LlamaIndex sets a default
            text = self.messages_to_prompt(messages)
            return self.completion_request(text, kwargs, formatted=True)
        wire = [to_wire(message) for message in messages]
        return ModelRequest(
            kwargs.get("model") or self.model,
            _output_fields(self, kwargs),
            messages=wire,
            extra=tool_fields({**self.additional_kwargs, **kwargs}),
            timeout_s=self.timeout,
        )

    def completion_request(
        self, prompt: str, kwargs: Mapping[str, Any], *, formatted: bool
    ) -> ModelRequest:
        """Return the request of `complete`; raises as `chat_request`."""
        if not formatted:
            assert self.completion_to_prompt is not None
            prompt = self.completion_to_prompt(prompt)
        if self.is_chat_model:
            return self.chat_request([ChatMessage(role=MessageRole.USER, content=prompt)], kwargs)
        if tool_fields({**self.additional_kwargs, **kwargs}):
            raise ValueError(
                "`tools` need a chat template, but this Conure has is_chat_model=False: remove "
                "the tools, or set is_chat_model=True"
            )
        return ModelRequest(
            kwargs.get("model") or self.model,
            _output_fields(self, kwargs),
            prompt=[{"text": check_text(prompt)}],
            timeout_s=self.timeout,
        )

    def backend(self) -> CallBackend:
        """Return the backend of calls: the running accelerated app, or else the server directly."""
        client = self.connection()
        scope = active_scope()
        if scope is not None:
            return scope.run_on(client)
        return DirectBackend(client, self._clients.asynchronous(client))

    def connection(self) -> Client:
        """Return the client that calls go through."""
        if self.client is not None:
            return self.client
        key = self.api_key or os.environ.get("CONURE_API_KEY")
        headers = tuple(sorted((self.default_headers or {}).items()))
        return self._clients.client(self.base_url, self.max_retries, key, headers=headers)

    @property
    def tokenizer(self) -> ServerTokenizer:
        """The tokenizer of the model, for `Settings.tokenizer`. It keeps what it has counted."""
        return ServerTokenizer(self.connection(), self.model)

    def _check(self, call: ModelRequest) -> AnswerCheck:
        """Return the check of the answers to a call."""
        return partial(checked, call=call, has_parser=self.output_parser is not None)

    def structured_output_options(
        self, output_cls: type[BaseModel], llm_kwargs: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Return the arguments of a call whose answer is an `output_cls`.

        They contain a `constraint`, unless the answer is a tool call.
        """
        options = dict(llm_kwargs or {})
        mode = self.pydantic_program_mode
        is_text = mode == PydanticProgramMode.LLM or (
            mode == PydanticProgramMode.DEFAULT and not self.metadata.is_function_calling_model
        )
        if is_text and "constraint" not in options:
            options |= format_fields(output_cls)
        return options

    def _model_info(self) -> dict[str, Json]:
        """Return the model's entry in `/v1/models`."""
        if self.model not in self._model_infos:
            pages = self.connection().models()
            found = find_named(pages, self.model)
            if found is None and self.model == "default":
                found = next(iter(pages), None)
            if found is None:
                known = ", ".join(str(page["id"]) for page in pages) or "none"
                raise NotFoundError(
                    "model_not_found", f"model {self.model!r} not found; the server has: {known}"
                )
            self._model_infos[self.model] = found
        return self._model_infos[self.model]


def _output_fields(llm: Conure, kwargs: Mapping[str, Any]) -> dict[str, Json]:
    names = ("temperature", "max_tokens", "top_p", "seed", "stop")
    settings = {name: getattr(llm, name) for name in names}
    return output_fields(settings, llm.additional_kwargs, kwargs)


def _without_span(method: Any) -> Any:
    """Return a method of LlamaIndex without its span, because the override has one."""
    return getattr(method, "__wrapped__", method)
