"""A LlamaIndex LLM whose calls run on a Conure server.

Knows LlamaIndex's LLM interface (chat and completion, whole and in pieces, with and without
await) on core 0.12 and 0.14. Refuses to know where a call goes: `line` takes it.

Kept true: events and callbacks are LlamaIndex's own, one pair for every call; what the
metadata says is what the server said.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import aclosing, closing
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
from llama_index.core.bridge.pydantic import BaseModel, ConfigDict, Field, PrivateAttr
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import LLM, ToolSelection
from llama_index.core.prompts import PromptTemplate
from llama_index.core.types import PydanticProgramMode

from conure.server.program.errors import NotFoundError
from conure.server.program.ir import Json, Sampling

from ..client import Client
from ..own import OwnClients
from .call import Call
from .line import Direct, Final, Line
from .messages import answer_message, chat_response, completion_response, selections, to_wire
from .scope import current

if TYPE_CHECKING:
    from llama_index.core.tools.types import BaseTool

DEFAULT_OUTPUT = 512
"""Tokens that the server lets an answer have where `max_tokens` does not say."""

_SAMPLING = frozenset(Sampling.__struct_fields__)
_BESIDE = frozenset({"constraint"})
_EXTRA = frozenset({"tools", "tool_choice"})


class Conure(FunctionCallingLLM):
    """A model that a Conure server runs.

    Example:
        ```python
        llm = Conure(temperature=0, max_tokens=200)
        print(llm.complete("Say hello"))
        ```
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=(), extra="forbid")

    model: str = "default"
    """Name of a model that the server has."""
    base_url: str | None = None
    """Of the server. None: the variable CONURE_URL, else 127.0.0.1:8400."""
    client: Client | None = Field(default=None, exclude=True)
    """An open client, used instead of `base_url`; its owner closes it."""
    temperature: float | None = None
    """0 is greedy. None: 1."""
    max_tokens: int | None = None
    top_p: float | None = None
    stop: list[str] | None = None
    seed: int | None = None
    additional_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Options of every call that have no field here, such as `top_k`."""
    timeout: float | None = None
    """Seconds for one call, queueing included. None: as long as it takes."""
    max_retries: int = 4
    """Repeats of a request that was refused or got no answer."""
    is_chat_model: bool = True
    """True: a prompt is a chat of one message, through the model's chat template. False: the
    model continues the bare text, also of a chat, which is then written out."""
    context_window: int | None = None
    """Tokens of prompt and answer together. None: what the server says of the model."""
    pydantic_program_mode: PydanticProgramMode = PydanticProgramMode.LLM
    """Structured outputs are text that the server holds to their JSON schema."""

    _own: OwnClients = PrivateAttr(default_factory=OwnClients)
    _pages: dict[str, dict[str, Json]] = PrivateAttr(default_factory=dict)

    def __getstate__(self) -> dict[Any, Any]:
        # LlamaIndex takes what cannot be pickled away from the LLM itself.
        if self.client is None:
            return super().__getstate__()
        if not isinstance(self.client.server, str):
            self.client.__reduce__()  # raises, and says why
        travelling = {"client": None, "base_url": self.client.server}
        return self.model_copy(update=travelling).__getstate__()

    @classmethod
    def class_name(cls) -> str:
        """The name under which LlamaIndex writes this LLM down."""
        return "conure_llm"

    @property
    def metadata(self) -> LLMMetadata:
        """What the server says of the model; asked once.

        Raises:
            NotFoundError: if the server has no such model.
            UnavailableError: if it cannot be reached.
        """
        page = self._page()
        window = self.context_window or page["max_model_len"]
        return LLMMetadata(
            context_window=window,
            num_output=self.max_tokens or min(DEFAULT_OUTPUT, max(1, window // 4)),
            is_chat_model=self.is_chat_model,
            is_function_calling_model="tools" in (page.get("capabilities") or []),
            model_name=page["id"],
            system_role=MessageRole.SYSTEM,
        )

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """The model's answer to a chat."""
        final = self.line().answer(self.chat_call(messages, kwargs))
        return chat_response(final.value, program=final.program)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """`chat`, with await."""
        final = await self.line().aanswer(self.chat_call(messages, kwargs))
        return chat_response(final.value, program=final.program)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """`chat` in pieces; counts come with the last one."""
        return _chat_pieces(self.line().stream(self.chat_call(messages, kwargs)))

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        """`stream_chat`, with await."""
        return _achat_pieces(self.line().astream(self.chat_call(messages, kwargs)))

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """The model's answer to a prompt."""
        final = self.line().answer(self.completion_call(prompt, kwargs, formatted=formatted))
        return completion_response(final.value, program=final.program)

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        """`complete`, with await."""
        call = self.completion_call(prompt, kwargs, formatted=formatted)
        final = await self.line().aanswer(call)
        return completion_response(final.value, program=final.program)

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        """`complete` in pieces; counts come with the last one."""
        call = self.completion_call(prompt, kwargs, formatted=formatted)
        return _pieces(self.line().stream(call))

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """`stream_complete`, with await."""
        call = self.completion_call(prompt, kwargs, formatted=formatted)
        return _apieces(self.line().astream(call))

    def structured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Any:
        """LlamaIndex's own, with the answer held to the schema of `output_cls`."""
        held = self.held(output_cls, llm_kwargs)
        return _without_span(LLM.structured_predict)(
            self, output_cls, prompt, llm_kwargs=held, **prompt_args
        )

    async def astructured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Any:
        """`structured_predict`, with await."""
        held = self.held(output_cls, llm_kwargs)
        return await _without_span(LLM.astructured_predict)(
            self, output_cls, prompt, llm_kwargs=held, **prompt_args
        )

    def _structured_stream_call(
        self,
        output_cls: type[BaseModel],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Any:
        held = self.held(output_cls, llm_kwargs)
        return super()._structured_stream_call(output_cls, prompt, held, **prompt_args)

    async def _structured_astream_call(
        self,
        output_cls: type[BaseModel],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Any:
        held = self.held(output_cls, llm_kwargs)
        return await super()._structured_astream_call(output_cls, prompt, held, **prompt_args)

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        messages = list(chat_history or [])
        if isinstance(user_msg, str):
            user_msg = ChatMessage(role=MessageRole.USER, content=user_msg)
        if user_msg is not None:
            messages.append(user_msg)
        prepared: dict[str, Any] = {"messages": messages, **kwargs}
        if tools:
            prepared["tools"] = [tool.metadata.to_openai_tool() for tool in tools]
            prepared["tool_choice"] = "required" if tool_required else "auto"
        return prepared

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The calls to tools that an answer asks for.

        Raises:
            ValueError: if there is none and `error_on_no_tool_call`.
        """
        made = selections(response.message)
        if not made and error_on_no_tool_call:
            raise ValueError(f"Expected at least one tool call, but got {len(made)} tool calls.")
        return made

    def chat_call(self, messages: Sequence[ChatMessage], kwargs: Mapping[str, Any]) -> Call:
        """What `chat` asks of the server.

        Raises:
            ValueError: if an argument of the call is not known.
            ProgramError: if a message cannot travel.
        """
        if not self.is_chat_model:
            assert self.messages_to_prompt is not None  # LlamaIndex sets its own
            text = self.messages_to_prompt(messages)
            return self.completion_call(text, kwargs, formatted=True)
        wire = [to_wire(message) for message in messages]
        return Call(
            self._model(kwargs),
            self._output(kwargs),
            messages=wire,
            extra=_extra(kwargs),
            timeout_s=self.timeout,
        )

    def completion_call(self, prompt: str, kwargs: Mapping[str, Any], *, formatted: bool) -> Call:
        """What `complete` asks of the server; raises as `chat_call` does."""
        if not formatted:
            assert self.completion_to_prompt is not None
            prompt = self.completion_to_prompt(prompt)
        if self.is_chat_model:
            return self.chat_call([ChatMessage(role=MessageRole.USER, content=prompt)], kwargs)
        return Call(
            self._model(kwargs),
            self._output(kwargs),
            prompt=[{"text": prompt}],
            timeout_s=self.timeout,
        )

    def line(self) -> Line:
        """Where calls go now: into the accelerated app that is running, if one is."""
        client = self.connection()
        scope = current()
        if scope is not None and not scope.is_over:
            return scope.session(client)
        return Direct(client, self._own.asynchronous(client))

    def connection(self) -> Client:
        """The client that calls go through."""
        if self.client is not None:
            return self.client
        return self._own.client(self.base_url, self.max_retries)

    def _model(self, kwargs: Mapping[str, Any]) -> str:
        return str(kwargs.get("model") or self.model)

    def _output(self, kwargs: Mapping[str, Any]) -> dict[str, Json]:
        """Sampling fields of one call: its own, over those of the model."""
        settings: dict[str, Json] = {
            name: getattr(self, name)
            for name in ("temperature", "max_tokens", "top_p", "seed", "stop")
        }
        for name, value in {**self.additional_kwargs, **kwargs}.items():
            if name in _SAMPLING or name in _BESIDE:
                settings[name] = value
            elif name not in _EXTRA and name != "model" and value is not None:
                raise ValueError(f"Conure does not know the argument {name}={value!r}")
        if isinstance(settings["stop"], str):
            settings["stop"] = [settings["stop"]]
        return {name: value for name, value in settings.items() if value not in (None, [])}

    def held(
        self, output_cls: type[BaseModel], llm_kwargs: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Arguments of a call whose answer is to be an `output_cls`: with a `constraint`, unless
        the answer is a call to a tool.
        """
        given = dict(llm_kwargs or {})
        mode = self.pydantic_program_mode
        is_text = mode == PydanticProgramMode.LLM or (
            mode == PydanticProgramMode.DEFAULT and not self.metadata.is_function_calling_model
        )
        if is_text and "constraint" not in given:
            given["constraint"] = {"json_schema": output_cls.model_json_schema()}
        return given

    def _page(self) -> dict[str, Json]:
        """What `/v1/models` says of the model."""
        if self.model not in self._pages:
            pages = self.connection().models()
            for index, page in enumerate(pages):
                if page["id"] == self.model or (index == 0 and self.model == "default"):
                    self._pages[self.model] = page
                    break
            else:
                known = ", ".join(str(page["id"]) for page in pages) or "none"
                raise NotFoundError(
                    "model_not_found", f"there is no model {self.model!r}; the server has: {known}"
                )
        return self._pages[self.model]


def _extra(kwargs: Mapping[str, Any]) -> dict[str, Json]:
    return {name: kwargs[name] for name in sorted(_EXTRA) if kwargs.get(name)}


def _without_span(method: Any) -> Any:
    """LlamaIndex gives an overriding method a span; the overridden one needs none then."""
    return getattr(method, "__wrapped__", method)


def _chat_pieces(stream: Generator[str | Final, None, None]) -> ChatResponseGen:
    text = ""
    with closing(stream):
        for piece in stream:
            if isinstance(piece, str):
                text += piece
            yield _chat_piece(piece, text)


async def _achat_pieces(stream: AsyncGenerator[str | Final, None]) -> ChatResponseAsyncGen:
    text = ""
    async with aclosing(stream):
        async for piece in stream:
            if isinstance(piece, str):
                text += piece
            yield _chat_piece(piece, text)


def _pieces(stream: Generator[str | Final, None, None]) -> CompletionResponseGen:
    for piece in _chat_pieces(stream):
        yield _completion_piece(piece)


async def _apieces(stream: AsyncGenerator[str | Final, None]) -> CompletionResponseAsyncGen:
    async with aclosing(_achat_pieces(stream)) as pieces:
        async for piece in pieces:
            yield _completion_piece(piece)


def _chat_piece(piece: str | Final, text: str) -> ChatResponse:
    if isinstance(piece, str):
        return ChatResponse(message=answer_message(text), delta=piece)
    last = chat_response(piece.value, program=piece.program)
    last.delta = ""
    return last


def _completion_piece(piece: ChatResponse) -> CompletionResponse:
    return CompletionResponse(
        text=piece.message.content or "",
        delta=piece.delta,
        raw=piece.raw,
        logprobs=piece.logprobs,
        additional_kwargs=piece.additional_kwargs,
    )
