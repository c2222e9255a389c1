"""Conformance tests of LlamaIndex LLMs, inherited by a test class per LLM.

LlamaIndex has no such suite. A subclass provides the fixture `llm`, an LLM whose answer is a
function of its prompt. Class attributes switch optional features. The suite runs on core 0.12 and
0.14, and also against LlamaIndex's `MockLLM`, which shows that it has no special requirements.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from importlib.metadata import version
from typing import Any, Final

import pytest
from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.callbacks import CallbackManager
from llama_index.core.callbacks.base_handler import BaseCallbackHandler
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.program import LLMTextCompletionProgram
from llama_index.core.prompts import ChatPromptTemplate, PromptTemplate
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from llama_index.core.response_synthesizers import refine as refine_module
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index_instrumentation import get_dispatcher

from conure.adapters.client import Client
from conure.adapters.llamaindex import Conure

CORE: Final = tuple(int(part) for part in version("llama-index-core").split(".")[:3])
HAS_QUERY_PIPELINE: Final = CORE < (0, 13)
STREAMS_STRUCTURED: Final = "stream_call" in vars(LLMTextCompletionProgram)
"""A structured answer can be streamed."""
CONCURRENT: Final = 10
"""Calls that the test of concurrency sends at once."""
RESERVES_ANSWERS: Final = hasattr(refine_module, "DEFAULT_RESPONSE_PADDING_SIZE")
"""`Refine` leaves room for an answer in every chunk, so that no chunk is split later."""

CHAT = [
    ChatMessage(role=MessageRole.SYSTEM, content="Be brief."),
    ChatMessage(role=MessageRole.USER, content="Name a tree."),
]
PROMPT = "Name a bird."


class Person(BaseModel):
    name: str
    age: int


class Recorder(BaseEventHandler):
    """Records dispatched events."""

    seen: list[Any] = []  # noqa: RUF012 - pydantic copies it

    @classmethod
    def class_name(cls) -> str:
        return "Recorder"

    def handle(self, event: Any, **kwargs: Any) -> None:
        self.seen.append(event)

    def names(self, part: str) -> list[str]:
        """Return the names of events that contain `part`, in order."""
        return [name for event in self.seen if part in (name := event.class_name())]


class Handler(BaseCallbackHandler):
    """Records starts and ends of callback events."""

    def __init__(self) -> None:
        super().__init__([], [])
        self.starts: list[tuple[str, Any]] = []
        self.ends: list[tuple[str, Any]] = []

    def on_event_start(self, event_type: Any, payload: Any = None, **kwargs: Any) -> str:  # type: ignore[override]  # the rest by name
        self.starts.append((event_type.value, payload))
        return ""

    def on_event_end(self, event_type: Any, payload: Any = None, **kwargs: Any) -> None:  # type: ignore[override]  # the rest by name
        self.ends.append((event_type.value, payload))

    def start_trace(self, trace_id: str | None = None) -> None:
        pass

    def end_trace(self, trace_id: Any = None, trace_map: Any = None) -> None:
        pass


@pytest.fixture
def events() -> Iterator[Recorder]:
    """Yield the recorder of one test."""
    root = get_dispatcher()
    recorder = Recorder()
    root.add_event_handler(recorder)
    yield recorder
    root.event_handlers.remove(recorder)


@pytest.fixture
async def make_llm(client: Client) -> AsyncIterator[Callable[..., Conure]]:
    """Return a factory of LLMs; close their connections in the test's event loop."""
    made: list[Conure] = []

    def make(**settings: Any) -> Conure:
        llm = Conure(**{"client": client, "temperature": 0, "max_tokens": 40, **settings})
        made.append(llm)
        return llm

    yield make
    for llm in made:
        await llm._clients.aclose()


class LLMConformance:
    """Tests of one LLM class."""

    is_async = True
    """The async methods do not block the event loop."""
    has_own_chat = True
    """`chat` does not call `complete`, which would send its own events."""
    pieces_grow = True
    """The text of a chunk includes its delta; the mock omits the last letter."""
    has_counts = True
    """Responses have token counts."""
    is_held_to_schemas = True
    """Structured outputs always match their schema."""
    streams_structured = True

    @property
    def chat(self) -> str:
        """Return a part of the names of chat events."""
        return "LLM" if self.has_own_chat else "LLMChat"

    def needs_own_awaited_methods(self) -> None:
        if not self.is_async:
            pytest.skip("its awaited methods call the others, and have their events as well")

    @pytest.fixture
    def llm(self) -> Any:
        raise NotImplementedError("a suite needs an LLM")

    @pytest.fixture
    def patient_llm(self) -> Any:
        """An LLM that answers only when `CONCURRENT` calls wait; None skips the tests of it."""
        return None

    def test_llm_is_serializable(self, llm: Any) -> None:
        assert isinstance(llm, BaseLLM)
        assert "BaseLLM" in [kind.__name__ for kind in type(llm).__mro__]
        assert llm.class_name() == type(llm).class_name()
        written = llm.to_dict()
        assert written["class_name"] == llm.class_name()
        assert "callback_manager" not in written

    def test_metadata_describes_the_llm(self, llm: Any) -> None:
        metadata = llm.metadata
        assert isinstance(metadata, LLMMetadata)
        assert metadata.context_window > metadata.num_output
        assert metadata.model_name

    def test_chat_returns_assistant_message(self, llm: Any) -> None:
        response = llm.chat(CHAT)
        assert isinstance(response, ChatResponse)
        assert response.message.role == MessageRole.ASSISTANT
        assert response.message.content

    def test_completion_returns_text(self, llm: Any) -> None:
        response = llm.complete(PROMPT)
        assert isinstance(response, CompletionResponse)
        assert response.text
        assert str(response) == response.text

    async def test_async_answers_match(self, llm: Any) -> None:
        assert (await llm.achat(CHAT)).message.content == llm.chat(CHAT).message.content
        assert (await llm.acomplete(PROMPT)).text == llm.complete(PROMPT).text

    def test_stream_concatenates_to_answer(self, llm: Any) -> None:
        so_far = ""
        for piece in llm.stream_chat(CHAT):
            so_far += piece.delta or ""
            assert piece.message.content == so_far or not self.pieces_grow
        assert so_far == llm.chat(CHAT).message.content
        so_far = ""
        for piece in llm.stream_complete(PROMPT):
            so_far += piece.delta or ""
            assert piece.text == so_far or not self.pieces_grow
        assert so_far == llm.complete(PROMPT).text

    async def test_async_stream_concatenates_to_answer(self, llm: Any) -> None:
        chat = [piece async for piece in await llm.astream_chat(CHAT)]
        assert "".join(piece.delta or "" for piece in chat) == llm.chat(CHAT).message.content
        text = [piece async for piece in await llm.astream_complete(PROMPT)]
        assert "".join(piece.delta or "" for piece in text) == llm.complete(PROMPT).text
        assert text[-1].text == llm.complete(PROMPT).text

    def test_streams_have_the_same_counts(self, llm: Any) -> None:
        if not self.has_counts:
            pytest.skip("it does not count")
        for whole, stream in (
            (llm.chat(CHAT), llm.stream_chat(CHAT)),
            (llm.complete(PROMPT), llm.stream_complete(PROMPT)),
        ):
            counts = whole.additional_kwargs
            assert counts["prompt_tokens"] > 0
            assert counts["completion_tokens"] > 0
            *others, last = stream
            assert last.additional_kwargs == counts
            assert all(not piece.additional_kwargs for piece in others)

    def test_call_has_one_start_and_one_end(self, llm: Any, events: Recorder) -> None:
        llm.chat(CHAT)
        assert events.names(self.chat) == ["LLMChatStartEvent", "LLMChatEndEvent"]
        start, end = (event for event in events.seen if "LLMChat" in event.class_name())
        assert [message.content for message in start.messages] == [m.content for m in CHAT]
        assert start.model_dict["class_name"] == llm.class_name()
        assert end.response.message.content == llm.chat(CHAT).message.content
        events.seen.clear()
        llm.complete(PROMPT)
        assert events.names("LLM") == ["LLMCompletionStartEvent", "LLMCompletionEndEvent"]

    async def test_async_call_has_one_start_and_one_end(self, llm: Any, events: Recorder) -> None:
        self.needs_own_awaited_methods()
        await llm.achat(CHAT)
        assert events.names(self.chat) == ["LLMChatStartEvent", "LLMChatEndEvent"]
        events.seen.clear()
        await llm.acomplete(PROMPT)
        assert events.names("LLM") == ["LLMCompletionStartEvent", "LLMCompletionEndEvent"]

    def test_every_chunk_sends_an_event(self, llm: Any, events: Recorder) -> None:
        num_pieces = len(list(llm.stream_chat(CHAT)))
        assert events.names(self.chat) == [
            "LLMChatStartEvent",
            *["LLMChatInProgressEvent"] * num_pieces,
            "LLMChatEndEvent",
        ]
        events.seen.clear()
        num_pieces = len(list(llm.stream_complete(PROMPT)))
        assert events.names("LLM") == [
            "LLMCompletionStartEvent",
            *["LLMCompletionInProgressEvent"] * num_pieces,
            "LLMCompletionEndEvent",
        ]

    async def test_every_async_chunk_sends_an_event(self, llm: Any, events: Recorder) -> None:
        self.needs_own_awaited_methods()
        num_pieces = len([piece async for piece in await llm.astream_chat(CHAT)])
        assert events.names(self.chat) == [
            "LLMChatStartEvent",
            *["LLMChatInProgressEvent"] * num_pieces,
            "LLMChatEndEvent",
        ]

    def test_call_reaches_callbacks(self, llm: Any) -> None:
        handler = Handler()
        llm.callback_manager = CallbackManager([handler])
        text = llm.complete(PROMPT).text
        assert [kind for kind, _ in handler.starts] == ["llm"]
        assert [kind for kind, _ in handler.ends] == ["llm"]
        assert text in map(str, handler.ends[0][1].values())

    def test_template_is_predicted_and_streamed(self, llm: Any) -> None:
        for template in (
            PromptTemplate("Say {thing}, or {{else}}."),
            ChatPromptTemplate(message_templates=[ChatMessage(role="user", content="Say {thing}")]),
        ):
            whole = llm.predict(template, thing="a {brace}")
            assert whole
            assert "".join(llm.stream(template, thing="a {brace}")) == whole

    async def test_template_is_predicted_and_streamed_async(self, llm: Any) -> None:
        template = PromptTemplate("Say {thing}.")
        whole = await llm.apredict(template, thing="tea")
        assert whole == llm.predict(template, thing="tea")
        pieces = [piece async for piece in await llm.astream(template, thing="tea")]
        assert "".join(pieces) == whole

    def test_system_prompt_changes_prediction(self, llm: Any) -> None:
        template = PromptTemplate("Say {thing}.")
        plain = llm.predict(template, thing="tea")
        llm.system_prompt = "You are a cat."
        assert llm.predict(template, thing="tea") != plain

    async def test_concurrent_calls_do_not_mix(self, llm: Any) -> None:
        prompts = [f"Number {n}." for n in range(12)]
        made = await asyncio.gather(*(llm.acomplete(prompt) for prompt in prompts))
        assert [each.text for each in made] == [llm.complete(prompt).text for prompt in prompts]

    async def test_async_calls_run_concurrently(self, patient_llm: Any) -> None:
        if not self.is_async or patient_llm is None:
            pytest.skip("its awaited methods block, or no patient one is at hand")
        calls = (patient_llm.acomplete(f"Number {number}.") for number in range(CONCURRENT))
        assert all(each.text for each in await asyncio.gather(*calls))

    def test_structured_output_matches_class(self, llm: Any, events: Recorder) -> None:
        if not self.is_held_to_schemas:
            pytest.skip("it is not held to schemas")
        made = llm.structured_predict(Person, PromptTemplate("Who is {who}?"), who="she")
        assert isinstance(made, Person)
        assert events.names("Structured") == [
            "LLMStructuredPredictStartEvent",
            "LLMStructuredPredictEndEvent",
        ]
        response = llm.as_structured_llm(Person).complete("Who?")
        assert isinstance(response.raw, Person)

    async def test_async_structured_output_matches_class(self, llm: Any) -> None:
        if not self.is_held_to_schemas:
            pytest.skip("it is not held to schemas")
        template = PromptTemplate("Who is {who}?")
        made = await llm.astructured_predict(Person, template, who="she")
        assert made == llm.structured_predict(Person, template, who="she")
        assert isinstance((await llm.as_structured_llm(Person).achat(CHAT)).raw, Person)

    async def test_structured_stream_ends_complete(self, llm: Any) -> None:
        if not self.streams_structured:
            pytest.skip("this version of LlamaIndex, or this LLM, has no structured streams")
        template = PromptTemplate("Who is {who}?")
        whole = llm.structured_predict(Person, template, who="she")
        pieces = list(llm.stream_structured_predict(Person, template, who="she"))
        assert pieces[-1].model_dump() == whole.model_dump()
        awaited = await llm.astream_structured_predict(Person, template, who="she")
        assert [piece async for piece in awaited][-1].model_dump() == whole.model_dump()

    @pytest.mark.parametrize(
        "mode", [mode for mode in ResponseMode if mode.value not in ("no_text", "context_only")]
    )
    async def test_every_synthesizer_accepts_the_llm(self, llm: Any, mode: ResponseMode) -> None:
        nodes = [NodeWithScore(node=TextNode(text=f"Fact {n}. " * 5)) for n in range(3)]
        synthesizer = get_response_synthesizer(llm=llm, response_mode=mode)
        whole = synthesizer.synthesize("Why?", nodes=nodes)
        assert str(whole)
        assert str(await synthesizer.asynthesize("Why?", nodes=nodes)) == str(whole)
