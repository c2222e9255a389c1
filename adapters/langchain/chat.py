"""A LangChain chat model whose every call is a program of one node.

Inside an accelerated chain (`accelerate`) a call is a node of that chain's program instead,
often one that is running already. Knows LangChain's chat model protocol (generate and
stream, with and without await), and where an answer comes from. Refuses to know chains.

Kept true: a stream that is left early, or a call that is interrupted, is cancelled on the
server; the streamed pieces joined are the text of the answer.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from typing import Any, Literal

from langchain_core.callbacks import (
    AsyncCallbackManagerForLLMRun,
    CallbackManagerForLLMRun,
)
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import AliasChoices, ConfigDict, Field, PrivateAttr, SecretStr

from conure.server.program.ir import Json

from ..client import AsyncClient, Client
from ..connection import following
from ..leaving import acancelled_unless_done, cancelled_unless_done
from ..own import OwnClients
from .async_replay import AsyncReplay
from .calls import ANSWER, CALL, ModelCall, repeated
from .conversations import Conversations
from .current import CURRENT
from .messages import from_wire, to_wire
from .replay import Replay
from .settings import (
    choice_of,
    constraint_of,
    default_profile,
    hints_of,
    num_answers_of,
    sampling_of,
    session_of,
    tools_of,
)
from .stream import AnswerStream, Whole, result_of
from .structured import structured


class ChatConure(BaseChatModel):
    """A chat model that a Conure server runs.

    Example:
        ```python
        llm = ChatConure(temperature=0, max_tokens=200)
        llm.invoke("Say hello").content
        ```
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, populate_by_name=True)

    model: str = Field(default="default", validation_alias=AliasChoices("model", "model_name"))
    """Name of a model that the server has."""
    api_key: SecretStr | None = Field(
        default_factory=lambda: SecretStr(key) if (key := os.getenv("CONURE_API_KEY")) else None
    )
    """Sent as a bearer token, for a proxy that asks for one. None: the variable CONURE_API_KEY."""
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
    n: int | None = None
    """Answers to every call, all of them in `ChatResult.generations`. None: 1."""
    timeout: float | None = None
    """Seconds for one call, queueing included. None: as long as it takes."""
    max_retries: int = 4
    """Repeats of a request that was refused or got no answer."""
    streaming: bool = False
    """Let `invoke` stream as well, for callbacks that want tokens."""
    profile: Any = Field(default_factory=default_profile, exclude=True)
    """What the model can do, a `ModelProfile`; LangChain asks for it since core 1.1."""

    _own: OwnClients = PrivateAttr(default_factory=OwnClients)
    _said: Conversations = PrivateAttr(default_factory=Conversations)

    @property
    def _llm_type(self) -> str:
        return "conure"

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Yes, without its client; keys stay out of it."""
        return True

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        """Where `langchain_core.load` finds the class."""
        return ["conure", "adapters", "langchain"]

    @property
    def lc_secrets(self) -> dict[str, str]:
        """Fields that are written down as the name of a variable."""
        return {"api_key": "CONURE_API_KEY"}

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

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | dict[str, Any] | bool | None = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Let answers call tools. A call that is begun is held to its tool's schema.

        Args:
            tools: functions, classes, tools or their JSON.
            tool_choice: `any` (some tool), the name of one, `auto`, `none`.
            strict: arguments keep all of the schema; a schema that no grammar can enforce is
                refused. Else they keep what can be enforced.
            parallel_tool_calls: False: one call at most.
            **kwargs: other arguments of the calls.

        Raises:
            ValueError: if `tool_choice` names no tool.
        """
        wire = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
        choice = choice_of(tool_choice, [tool["function"]["name"] for tool in wire])
        if choice is not None:
            kwargs["tool_choice"] = choice
        if parallel_tool_calls is not None:
            kwargs["parallel_tool_calls"] = parallel_tool_calls
        return self.bind(tools=wire, **kwargs)

    def with_structured_output(
        self,
        schema: Any,
        *,
        include_raw: bool = False,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Answers that are values of a schema; the engine lets nothing else through.

        Args:
            schema: a pydantic class, a TypedDict or a JSON schema.
            include_raw: answer with a dict of `raw`, `parsed` and `parsing_error`.
            method: `json_schema` holds the answer to the schema, `function_calling` makes it
                the arguments of a tool, `json_mode` holds it to being a JSON object.
            strict: of the tool, under `function_calling`.
            **kwargs: none are known.

        Raises:
            ValueError: for an argument that is not known.
        """
        if kwargs:
            raise ValueError(f"Received unsupported arguments {kwargs}")
        if method == "function_calling":
            return super().with_structured_output(schema, include_raw=include_raw)
        if method not in ("json_schema", "json_mode"):
            raise ValueError(
                f"method is json_schema, function_calling or json_mode; not {method!r}"
            )
        return structured(self, schema, method, strict=strict, include_raw=include_raw)

    def sampling(
        self, kwargs: Mapping[str, Any], *, stop: list[str] | None = None, strict: bool = True
    ) -> dict[str, Json]:
        """Sampling fields of one call: the call's own, over those of the model.

        Raises:
            ValueError: if `strict` and an argument of the call is not known.
        """
        own: dict[str, Json] = {
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "top_p": self.top_p,
            "seed": self.seed,
            "stop": self.stop,
        }
        return sampling_of(own, kwargs, stop=stop, strict=strict)

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
        """The `generate` node of one call to this model.

        Raises:
            ValueError: if an argument of the call is not known.
        """
        sampling = self.sampling(kwargs, stop=stop)
        return {
            "id": node_id,
            "op": "generate",
            "model": kwargs.get("model") or self.model,
            "messages": messages,
            "output": {"variable": variable, "as": form, **sampling, **constraint_of(kwargs)},
            **tools_of(kwargs),
        }

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = self._call(messages, stop, kwargs, run_manager)
        if (replay := self._replay()) is not None:
            return replay.result(call.nodes, self.timeout)
        with self._going_on(call):
            run = self._client().submit(call.program(self.timeout), **following(self.timeout))
            with cancelled_unless_done(run):
                values = run.result(wait_s=self.timeout)
        return self._result(call, [values[name] for name in call.answers], run.id)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = self._call(messages, stop, kwargs, run_manager)
        if (replay := self._areplay()) is not None:
            return await replay.result(call.nodes, self.timeout)
        with self._going_on(call):
            run = await self._aclient().submit(
                call.program(self.timeout), **following(self.timeout)
            )
            async with acancelled_unless_done(run):
                values = await run.result(wait_s=self.timeout)
        return self._result(call, [values[name] for name in call.answers], run.id)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        call = self._call(messages, stop, kwargs, run_manager)
        node, replay = call.only_node(), self._replay()
        chunks = self._chunks(call) if replay is None else replay.chunks(node, self.timeout)
        with contextlib.closing(chunks):
            for chunk in chunks:
                if run_manager:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        call = self._call(messages, stop, kwargs, run_manager)
        node, replay = call.only_node(), self._areplay()
        chunks = self._achunks(call) if replay is None else replay.chunks(node, self.timeout)
        async with aclosing(chunks):
            async for chunk in chunks:
                if run_manager:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def _chunks(self, call: ModelCall) -> Generator[ChatGenerationChunk, None, None]:
        """The answer to a call of its own, in pieces."""
        with self._going_on(call):
            run = self._client().submit(call.program(self.timeout), follow=True)
            stream = AnswerStream(ANSWER, CALL, run.id)
            with cancelled_unless_done(run), contextlib.closing(run.events()) as events:
                for event in events:
                    yield from stream.feed(event)
        if stream.value is not None:
            self._remember(call, from_wire(stream.value, program=run.id), run.id)

    async def _achunks(self, call: ModelCall) -> AsyncGenerator[ChatGenerationChunk, None]:
        """The answer to a call of its own, in pieces."""
        with self._going_on(call):
            run = await self._aclient().submit(call.program(self.timeout), follow=True)
            stream = AnswerStream(ANSWER, CALL, run.id)
            async with acancelled_unless_done(run), aclosing(run.events()) as events:
                async for event in events:
                    for chunk in stream.feed(event):
                        yield chunk
        if stream.value is not None:
            self._remember(call, from_wire(stream.value, program=run.id), run.id)

    def _replay(self) -> Replay | None:
        """The run of an accelerated chain that this call belongs to."""
        frame = CURRENT.get()
        if frame is None or not isinstance(frame.replay, Replay):
            return None
        return frame.replay if frame.replay.is_of(self._client()) else None

    def _areplay(self) -> AsyncReplay | None:
        frame = CURRENT.get()
        if frame is None or not isinstance(frame.replay, AsyncReplay):
            return None
        return frame.replay if frame.replay.is_of(self._aclient()) else None

    def _call(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None,
        kwargs: Mapping[str, Any],
        manager: CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun | None,
    ) -> ModelCall:
        wire = [to_wire(message) for message in messages]
        node = self.node(CALL, ANSWER, wire, kwargs, stop=stop)
        if manager is not None:
            node["meta"] = hints_of(
                manager.metadata, run_id=manager.run_id, parent_run_id=manager.parent_run_id
            )
        thread, resumed = session_of(node.get("meta")), None
        if thread is None and CURRENT.get() is None:
            resumed = self._said.resumed(wire)
        return ModelCall(repeated(node, num_answers_of(self.n, kwargs)), thread, resumed)

    def _result(self, call: ModelCall, values: list[dict[str, Json]], program: str) -> ChatResult:
        result = result_of([Whole(value, program) for value in values])
        self._remember(call, result.generations[0].message, program)
        return result

    @contextlib.contextmanager
    def _going_on(self, call: ModelCall) -> Iterator[None]:
        """Without an answer, what the call goes on with is there for the next one that tries."""
        try:
            yield
        except BaseException:
            if call.resumed is not None:
                self._said.give_back(call.resumed)
            raise

    def _remember(self, call: ModelCall, answer: BaseMessage, program: str) -> None:
        """Know an answer again where it is gone on with."""
        if call.thread is None:
            session = call.session or f"conversation {program}"
            self._said.said(call.messages, to_wire(answer), session)

    def _client(self) -> Client:
        if self.client is not None:
            return self.client
        key = None if self.api_key is None else self.api_key.get_secret_value()
        return self._own.client(self.base_url, self.max_retries, key)

    def _aclient(self) -> AsyncClient:
        return self._own.asynchronous(self._client())
