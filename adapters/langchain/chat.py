"""A LangChain chat model whose every call is a program of one node.

Knows LangChain's chat model protocol (generate and stream, with and without await) and
the one-node program. Refuses to know chains: `walk` reads those.

Kept true: a stream that is left early, or a call that is interrupted, is cancelled on the
server; the streamed pieces joined are the text of the answer.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, NoReturn, cast

from langchain_core.callbacks import (
    AsyncCallbackManagerForLLMRun,
    CallbackManagerForLLMRun,
)
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from pydantic import ConfigDict, Field, PrivateAttr

from conure.server.program.errors import ConureError
from conure.server.program.ir import Json, Sampling
from conure.server.program.status import Event

from ..client import AsyncClient, AsyncRun, Client, Retry, Run
from ..steps import Desk, Shift
from .messages import from_wire, metadata_of, to_wire, usage_of

ANSWER = "answer"
"""The variable of a one-node program."""

_SAMPLING = frozenset(Sampling.__struct_fields__)


class ChatConure(BaseChatModel):
    """A chat model that a Conure server runs.

    Example:
        ```python
        llm = ChatConure(temperature=0, max_tokens=200)
        llm.invoke("Say hello").content
        ```
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, populate_by_name=True)

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
    timeout: float | None = None
    """Seconds for one call, queueing included. None: as long as it takes."""
    max_retries: int = 4
    """Repeats of a request that was refused or got no answer."""
    streaming: bool = False
    """Let `invoke` stream as well, for callbacks that want tokens."""

    # Filled by `setdefault`, so that calls in several threads agree on one connection pool.
    _own: dict[str, Client] = PrivateAttr(default_factory=dict)
    _async: dict[str, AsyncClient] = PrivateAttr(default_factory=dict)

    @property
    def _llm_type(self) -> str:
        return "conure"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model": self.model, **self.sampling({})}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        settings = self.sampling(kwargs, stop=stop, strict=False)
        params = LangSmithParams(
            ls_provider="conure",
            ls_model_name=str(kwargs.get("model", self.model)),
            ls_model_type="chat",
        )
        if "temperature" in settings:
            params["ls_temperature"] = settings["temperature"]
        if "max_tokens" in settings:
            params["ls_max_tokens"] = settings["max_tokens"]
        if settings.get("stop"):
            params["ls_stop"] = settings["stop"]
        return params

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> NoReturn:
        """Not supported yet.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "ChatConure.bind_tools: tool calling is not supported yet; ask for the call as text "
            "in the prompt, or use a chat model that has tools for this step"
        )

    def with_structured_output(self, schema: Any, **kwargs: Any) -> NoReturn:
        """Not supported yet.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "ChatConure.with_structured_output: constrained output is not supported yet; pipe "
            "the model into an output parser instead"
        )

    def sampling(
        self, kwargs: Mapping[str, Any], *, stop: list[str] | None = None, strict: bool = True
    ) -> dict[str, Json]:
        """Sampling fields of one call: the call's own, over those of the model.

        Raises:
            ValueError: if `strict` and an argument of the call is not known.
        """
        settings: dict[str, Json] = {
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "top_p": self.top_p,
            "seed": self.seed,
            "stop": self.stop,
        }
        for name, value in kwargs.items():
            if name in _SAMPLING:
                settings[name] = value
            elif strict and name not in ("model", "stream") and value is not None:
                raise ValueError(f"ChatConure does not know the argument {name}={value!r}")
        if stop is not None:
            settings["stop"] = stop
        if isinstance(settings["stop"], str):
            settings["stop"] = [settings["stop"]]
        return {name: value for name, value in settings.items() if value not in (None, [])}

    def node(
        self,
        node_id: str,
        variable: str,
        messages: list[dict[str, Json]],
        kwargs: Mapping[str, Any],
        *,
        stop: list[str] | None = None,
        form: str = "message",
    ) -> dict[str, Json]:
        """The `generate` node of one call to this model."""
        sampling = self.sampling(kwargs, stop=stop)
        return {
            "id": node_id,
            "op": "generate",
            "model": kwargs.get("model") or self.model,
            "messages": messages,
            "output": {"variable": variable, "as": form, **sampling},
        }

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        run = self._client().submit(self._program(messages, stop, kwargs))
        with _cancelled_unless_done(run):
            value = run.get(ANSWER, wait_s=self.timeout)
        return _result(value, run.id)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        run = await self._aclient().submit(self._program(messages, stop, kwargs))
        async with _acancelled_unless_done(run):
            value = await run.get(ANSWER, wait_s=self.timeout)
        return _result(value, run.id)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        run = self._client().submit(self._program(messages, stop, kwargs))
        stream = _Stream(run.id)
        with _cancelled_unless_done(run), contextlib.closing(run.events()) as events:
            for event in events:
                for chunk in stream.feed(event):
                    if run_manager:
                        run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk
            stream.check()

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        run = await self._aclient().submit(self._program(messages, stop, kwargs))
        stream = _Stream(run.id)
        async with _acancelled_unless_done(run), aclosing(run.events()) as events:
            async for event in events:
                for chunk in stream.feed(event):
                    if run_manager:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk
            stream.check()

    def _program(
        self, messages: list[BaseMessage], stop: list[str] | None, kwargs: Mapping[str, Any]
    ) -> dict[str, Json]:
        wire = [to_wire(message) for message in messages]
        node = self.node("chat", ANSWER, wire, kwargs, stop=stop)
        body: dict[str, Json] = {
            "program": {"name": "ChatConure", "nodes": [node], "outputs": [ANSWER]}
        }
        if self.timeout is not None:
            body["options"] = {"deadline_s": self.timeout}
        return body

    def _client(self) -> Client:
        if self.client is not None:
            return self.client
        if not self._own:
            client = Client(self.base_url, retry=Retry(max_retries=self.max_retries))
            self._own.setdefault(ANSWER, client)
        return self._own[ANSWER]

    def _aclient(self) -> AsyncClient:
        if not self._async:
            self._async.setdefault(ANSWER, self._client().asynchronous())
        return self._async[ANSWER]


class _Stream:
    """The chunks of one answer, from the events of its program."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._shift = Shift(Desk(), program, [ANSWER])
        self._num_sent = 0

    def feed(self, event: Event) -> Iterator[ChatGenerationChunk]:
        """Chunks that an event is worth."""
        self._shift.take(event, {})
        if event.type == "node.delta":
            yield from self._text(event.data["text"], event.data["offset"])
        elif event.type == "variable.committed" and event.data["variable"] == ANSWER:
            yield from self._last(event.data["value"])

    def check(self) -> None:
        """Raises what the program failed with, if it did."""
        if not self._shift.needs_status():
            self._shift.result(None)

    def _text(self, text: str, offset: int) -> Iterator[ChatGenerationChunk]:
        # A restarted call begins again at offset 0 and, its seed being the same, says the
        # same: what was sent before is skipped. A gap waits for the committed value.
        if offset <= self._num_sent < offset + len(text):
            piece = text[self._num_sent - offset :]
            self._num_sent += len(piece)
            yield ChatGenerationChunk(message=AIMessageChunk(content=piece))

    def _last(self, value: dict[str, Json]) -> Iterator[ChatGenerationChunk]:
        yield from self._text(value.get("content") or "", 0)
        last = AIMessageChunk(
            content="",
            response_metadata=metadata_of(value, program=self._program),
            usage_metadata=usage_of(value),
            chunk_position="last",
        )
        yield ChatGenerationChunk(message=last, generation_info=_generation_info(value))


def _result(value: Json, program: str) -> ChatResult:
    message = from_wire(cast(dict[str, Json], value), program=program)
    generation = ChatGeneration(message=message, generation_info=_generation_info(value))
    return ChatResult(generations=[generation], llm_output={"model_name": value.get("model")})


def _generation_info(value: dict[str, Json]) -> dict[str, Json]:
    return {"finish_reason": value.get("finish_reason")}


@contextlib.contextmanager
def _cancelled_unless_done(run: Run) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with contextlib.suppress(ConureError):
            run.cancel()
        raise


@contextlib.asynccontextmanager
async def _acancelled_unless_done(run: AsyncRun) -> AsyncIterator[None]:
    try:
        yield
    except BaseException:
        with contextlib.suppress(ConureError):
            await run.cancel()
        raise
