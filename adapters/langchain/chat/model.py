"""The LangChain chat model `ChatConure`.

Each call is a program of one node. Inside an accelerated chain (`accelerate`), a call is a node of
the chain's program instead, and often runs before the chain makes the call.

Out of scope: settings (`settings`), chains.

Invariants: an abandoned stream or an interrupted call is cancelled on the server; the streamed
chunks concatenate to the text of the answer; a call raises the same errors inside and outside of
an accelerated chain.
"""

from __future__ import annotations

import contextlib
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, Literal, Self, cast

from langchain_core.callbacks import (
    AsyncCallbackManagerForLLMRun,
    CallbackManagerForLLMRun,
)
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.tools import BaseTool
from pydantic import PrivateAttr

from conure.server.program.errors import ConureError
from conure.server.program.ir import Json

from ...call_errors import application_errors
from ...client import AsyncRun, Run
from ...client.cancellation import (
    acancel_unless_completed,
    acancel_unless_submitted,
    cancel_unless_completed,
    cancel_unless_submitted,
)
from ...client.connection import attach_arguments
from ...client.owned_generator import OwnedGenerator
from ...speculation.answer_stream import AnswerStream
from ..acceleration.active_run import current_run
from ..acceleration.chain_run import ChainRun
from .answer_cache import CompleteAnswerCache, cache_of
from .answer_chunks import (
    ALLOW_CUT_ANSWERS,
    CompleteAnswer,
    check_answers,
    chunks_of,
    invalid_answer,
    invalid_result,
    result_of,
)
from .call_meta import CallRun, current_meta, session_of
from .call_options import choice_of, num_answers_of, tool_of
from .messages import from_wire, to_wire
from .model_call import ANSWER, CALL, ModelCall, answer_nodes
from .sessions import SessionInference
from .settings import ChatSettings
from .structured_output import structured


class ChatConure(ChatSettings):
    """A chat model on a Conure server.

    Setup:
        In a checkout of Conure (`conure` on PyPI is another project), install it and start a
        server:

        ```bash
        pip install '.[serve,langchain]'
        conure serve Qwen/Qwen3-8B
        ```

    Key init args (completion params):
        model: name of a model on the server; `default` is the server's first model.
        temperature: 0 decodes greedily. Default: 1.
        max_tokens: maximum length of an answer. Default: the rest of the model's context.
        top_p, top_k, min_p, repetition_penalty, presence_penalty, frequency_penalty,
        logit_bias, stop, stop_token_ids, seed, logprobs, top_logprobs, min_tokens, ignore_eos,
        n: sampling, as in a program's output.

    Key init args (client params):
        base_url: URL of the server. Default: CONURE_URL, or `http://127.0.0.1:8400`.
        api_key: bearer token for a proxy. Default: the environment variable CONURE_API_KEY.
        timeout: seconds for one call.
        max_retries: number of retries of a refused request.
        default_headers: sent with every request.
        client: a `conure.Client` to use instead of these settings.

    Instantiate:
        ```python
        from conure.adapters.langchain import ChatConure

        llm = ChatConure(temperature=0, max_tokens=200)
        ```

    Invoke:
        ```python
        llm.invoke([("system", "You sell tea."), ("human", "What is fresh?")]).text
        ```

    Stream:
        ```python
        for chunk in llm.stream("What is fresh?"):
            print(chunk.text, end="")
        ```

    Async:
        ```python
        await llm.ainvoke("What is fresh?")
        ```

    Tool calling:
        ```python
        llm.bind_tools([weather], tool_choice="any").invoke("Rain in Oslo?").tool_calls
        ```

    Structured output:
        ```python
        llm.with_structured_output(Order).invoke("Two boxes of oolong, please.")
        ```

    Token usage:
        ```python
        llm.invoke("hi").usage_metadata  # with `input_token_details.cache_read`
        llm.get_num_tokens("hi")  # by the server's tokenizer
        ```

    Response metadata:
        ```python
        llm.invoke("hi").response_metadata  # model_name, finish_reason, program, ...
        ```
    """

    _session_inference: SessionInference = PrivateAttr(default_factory=SessionInference)

    def get_token_ids(self, text: str) -> list[int]:
        """Return the ids of a text by the server's tokenizer."""
        return self.connection().tokenize(text, model=self.model)

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        """Return the length of the prompt that a call with these messages sends.

        Without messages and tools, return 0: LangChain's `trim_messages` counts empty lists.
        """
        if not messages and not tools:
            return 0
        wire = [to_wire(message) for message in messages]
        declared = [tool_of(tool, strict=None) for tool in tools or ()]
        return len(self.connection().tokenize(wire, model=self.model, tools=declared))

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | dict[str, Any] | bool | None = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Declare tools that answers may call. The arguments of a call match the tool's schema.

        Args:
            tools: functions, classes, tools or their JSON.
            tool_choice: `any` (at least one tool), the name of a tool, `auto` or `none`.
            strict: enforce the whole schema, and reject a schema that a grammar cannot enforce.
                Otherwise the enforceable part of the schema is enforced.
            parallel_tool_calls: False limits an answer to one tool call.
            **kwargs: further arguments of each model call.

        Raises:
            ValueError: if `tool_choice` is not the name of a tool, or a tool can only be run by
                another provider.
        """
        wire = [tool_of(tool, strict=strict) for tool in tools]
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
        """Constrain answers to a schema, which the engine enforces, and parse them.

        An answer that was cut is an error (`parsing_error` with `include_raw`), never a value.

        Args:
            schema: a pydantic class, a TypedDict, a JSON schema, or OpenAI's dict of `name` and
                `schema`.
            include_raw: answer with a dict of `raw`, `parsed` and `parsing_error`.
            method: `json_schema` constrains the answer to the schema, `function_calling` uses
                the schema for the arguments of a tool, `json_mode` constrains the answer to a
                JSON object.
            strict: with `function_calling`, as in `bind_tools`. With `json_schema`, allow only
                fields that the schema mentions; for a class this is the default.
            **kwargs: rejected.

        Raises:
            ValueError: for an unknown argument or method.
        """
        if kwargs:
            raise ValueError(f"Received unsupported arguments {kwargs}")
        if method not in ("json_schema", "json_mode", "function_calling"):
            raise ValueError(
                f"method must be json_schema, function_calling or json_mode, got {method!r}"
            )
        return structured(self, schema, method, strict=strict, include_raw=include_raw)

    def stream(
        self,
        input: LanguageModelInput,  # noqa: A002 - LangChain's name
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        """Yield the answer in chunks, as `BaseChatModel.stream` does.

        The identifiers of the call are sent with it, as those of `invoke` are.
        """
        call_run = CallRun()
        chunks = super().stream(input, call_run.add_to(config), stop=stop, **kwargs)
        with contextlib.closing(cast("Generator[AIMessageChunk, None, None]", chunks)):
            with call_run.active():  # the first step starts the call
                first = next(chunks, None)
            if first is not None:
                yield first
                yield from chunks

    async def astream(
        self,
        input: LanguageModelInput,  # noqa: A002 - LangChain's name
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        """Yield the answer in chunks, as `stream` does."""
        call_run = CallRun()
        chunks = super().astream(input, call_run.add_to(config), stop=stop, **kwargs)
        async with OwnedGenerator(cast("AsyncGenerator[AIMessageChunk, None]", chunks)) as owned:
            with call_run.active():  # the first step starts the call
                first = await anext(owned, None)
            if first is not None:
                yield first
                # `owned` swaps the hooks of the loop for each chunk; the first step alone needs it.
                async for chunk in chunks:
                    yield chunk

    def _generate_with_cache(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        # LangChain may call `_stream` here, without the run manager.
        model = self._with_complete_cache(kwargs)
        with CallRun(run_manager).active():
            return super(ChatConure, model)._generate_with_cache(
                messages, stop, run_manager, **kwargs
            )

    async def _agenerate_with_cache(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        model = self._with_complete_cache(kwargs)
        with CallRun(run_manager).active():
            return await super(ChatConure, model)._agenerate_with_cache(
                messages, stop, run_manager, **kwargs
            )

    def _with_complete_cache(self, kwargs: Mapping[str, Any]) -> Self:
        """Return the model whose cache does not get answers that the call's parser refuses."""
        cache = cache_of(self.cache) if kwargs.get(ALLOW_CUT_ANSWERS) else None
        return (
            self if cache is None else self.model_copy(update={"cache": CompleteAnswerCache(cache)})
        )

    def _should_stream(self, **kwargs: Any) -> bool:
        # A stream has one answer: `invoke` with several does not stream for callbacks.
        has_one = num_answers_of(self.n, kwargs) == 1
        return (has_one or bool(kwargs.get("stream"))) and super()._should_stream(**kwargs)

    def _should_use_protocol_streaming(self, **kwargs: Any) -> bool:
        has_one = num_answers_of(self.n, kwargs) == 1
        return has_one and super()._should_use_protocol_streaming(**kwargs)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = self._model_call(messages, stop, kwargs, run_manager)
        try:
            with self._call_errors(call):
                chain_run = self._accelerated_run()
                if chain_run is not None and not chain_run.is_direct(call.nodes):
                    result = chain_run.result(call.nodes, self.timeout)
                else:
                    run = self._submit(call, chain_run, **attach_arguments(None))
                    with cancel_unless_completed(run):
                        values = run.result(wait_s=self._result_wait_s(run))
                    result = self._result(call, values, run.id)
                check_answers(result, kwargs)
                return result
        except ConureError as problem:
            return invalid_result(problem, kwargs)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = self._model_call(messages, stop, kwargs, run_manager)
        try:
            with self._call_errors(call):
                chain_run = self._accelerated_run()
                if chain_run is not None and not chain_run.is_direct(call.nodes):
                    result = await chain_run.aresult(call.nodes, self.timeout)
                else:
                    run = await self._asubmit(call, chain_run, **attach_arguments(None))
                    async with acancel_unless_completed(run):
                        values = await run.result(wait_s=self._result_wait_s(run))
                    result = self._result(call, values, run.id)
                check_answers(result, kwargs)
                return result
        except ConureError as problem:
            return invalid_result(problem, kwargs)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        call = self._model_call(messages, stop, kwargs, run_manager)
        try:
            with self._call_errors(call):
                node, chain_run = call.only_node(), self._accelerated_run()
                if chain_run is None or chain_run.is_direct([node]):
                    chunks = self._chunks(call, chain_run)
                else:
                    chunks = chain_run.chunks(node, self.timeout)
                with contextlib.closing(chunks):
                    for chunk in chunks:
                        check_answers(chunk, kwargs)
                        if run_manager:
                            run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                        yield chunk
        except ConureError as problem:
            yield ChatGenerationChunk(message=invalid_answer(problem, kwargs))

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        call = self._model_call(messages, stop, kwargs, run_manager)
        try:
            with self._call_errors(call):
                node, chain_run = call.only_node(), self._accelerated_run()
                if chain_run is None or chain_run.is_direct([node]):
                    chunks = self._achunks(call, chain_run)
                else:
                    chunks = chain_run.achunks(node, self.timeout)
                async with OwnedGenerator(chunks) as owned:
                    async for chunk in owned:
                        check_answers(chunk, kwargs)
                        if run_manager:
                            await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                        yield chunk
        except ConureError as problem:
            yield ChatGenerationChunk(message=invalid_answer(problem, kwargs))

    def _result_wait_s(self, run: Run | AsyncRun) -> float | None:
        """Return the time limit of `Run.result`.

        None if the events of the run are read: the server ends their stream at the deadline.
        """
        return None if run.is_followed else self.timeout

    def _submit(self, call: ModelCall, chain_run: ChainRun | None, **arguments: Any) -> Run:
        """Submit a call as its own program.

        Args:
            call: of no accelerated chain, or direct (`ChainRun.is_direct`).
            chain_run: the run of the accelerated chain around it.
            **arguments: further arguments of `Client.submit`.
        """
        client, program = self.connection(), call.program(self.timeout)
        with cancel_unless_submitted(client, program["id"]):
            run = client.submit(program, retry_within_s=self.timeout, **arguments)
        if chain_run is not None:
            chain_run.note_direct_program(run.id)
        return run

    async def _asubmit(
        self, call: ModelCall, chain_run: ChainRun | None, **arguments: Any
    ) -> AsyncRun:
        """`_submit`, with await."""
        client, program = self.async_connection(), call.program(self.timeout)
        async with acancel_unless_submitted(client, program["id"]):
            run = await client.submit(program, retry_within_s=self.timeout, **arguments)
        if chain_run is not None:
            chain_run.note_direct_program(run.id)
        return run

    def _chunks(
        self, call: ModelCall, chain_run: ChainRun | None
    ) -> Generator[ChatGenerationChunk, None, None]:
        """Yield the chunks of a call that is its own program; see `_submit`."""
        run = self._submit(call, chain_run, follow=True)
        stream = AnswerStream(ANSWER, CALL, run.id)
        with cancel_unless_completed(run), contextlib.closing(run.events()) as events:
            for event in events:
                yield from chunks_of(stream, event)
        if stream.value is not None:
            self._record(call, from_wire(stream.value, program=run.id), run.id)

    async def _achunks(
        self, call: ModelCall, chain_run: ChainRun | None
    ) -> AsyncGenerator[ChatGenerationChunk, None]:
        """`_chunks`, with await."""
        run = await self._asubmit(call, chain_run, follow=True)
        stream = AnswerStream(ANSWER, CALL, run.id)
        async with acancel_unless_completed(run), OwnedGenerator(run.events()) as events:
            async for event in events:
                for chunk in chunks_of(stream, event):
                    yield chunk
        if stream.value is not None:
            self._record(call, from_wire(stream.value, program=run.id), run.id)

    def _accelerated_run(self) -> ChainRun | None:
        """Return the run of the accelerated chain around this call.

        None outside of such a chain, after its end, and in a chain whose calls go to another
        server or have other headers.
        """
        active = current_run()
        if active is None or not active.run.bind_to(self.connection()):
            return None
        return active.run

    def _model_call(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None,
        kwargs: Mapping[str, Any],
        manager: CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun | None,
    ) -> ModelCall:
        wire = [to_wire(message) for message in messages]
        node = self.node(CALL, ANSWER, wire, kwargs, stop=stop)
        meta = current_meta() if manager is None else CallRun(manager).meta
        if meta is not None:
            node["meta"] = meta
        nodes = answer_nodes(node, num_answers_of(self.n, kwargs))
        thread = session_of(meta)
        resumed = None
        if thread is None and current_run() is None:
            # Resume last: a call that is refused above leaves the session to the next one.
            resumed = self._session_inference.resume(wire)
        return ModelCall(nodes, thread, resumed)

    def _result(self, call: ModelCall, values: Mapping[str, Json], program: str) -> ChatResult:
        result = result_of([CompleteAnswer(values[name], program) for name in call.answers])
        self._record(call, result.generations[0].message, program)
        return result

    @contextlib.contextmanager
    def _call_errors(self, call: ModelCall) -> Iterator[None]:
        """Convert the errors of a call by `application_errors`.

        If the call fails, its inferred session is restored, so that a retry finds it.
        """
        try:
            with application_errors(self.timeout):
                yield
        except BaseException:
            if call.resumed is not None:
                self._session_inference.restore(call.resumed)
            raise

    def _record(self, call: ModelCall, answer: BaseMessage, program: str) -> None:
        """Record an answer: a later call that continues the conversation gets its session."""
        if call.thread is None and current_run() is None:
            session = call.session or f"conversation {program}"
            self._session_inference.record(call.messages, to_wire(answer), session)
