"""Compilation of chains: prompts, names, and rejections with positions."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import JsonOutputParser, StrOutputParser
from langchain_core.prompts import (
    ChatPromptTemplate,
    FewShotPromptTemplate,
    MessagesPlaceholder,
    PromptTemplate,
)
from langchain_core.runnables import (
    ConfigurableField,
    Runnable,
    RunnableConfig,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
    RunnablePick,
)

from conure.adapters.client import Client
from conure.adapters.langchain import ChatConure, accelerate, to_program
from conure.adapters.langchain.chat.json_values import encode
from conure.adapters.langchain.chat.messages import to_wire_list
from conure.server.program.errors import ProgramError
from conure.server.program.ir import Submission

LLM = ChatConure(temperature=0, max_tokens=5)
TEXT: Runnable[Any, Any] = StrOutputParser()


def prompt(template: str, **kwargs: Any) -> ChatPromptTemplate:
    return ChatPromptTemplate.from_messages([("human", template)], **kwargs)


def nodes_of(chain: Any, **kwargs: Any) -> dict[str, Any]:
    program = to_program(chain, **kwargs).program
    msgspec.convert({"program": program}, Submission)
    return {node["id"]: node for node in program["nodes"]}


def rendered(chain: Any, given_input: Any) -> list[dict[str, Any]]:
    """Return the messages that the server would render for a chain with one call."""
    submission = to_program(chain).submission(given_input)
    wire = msgspec.json.decode(msgspec.json.encode(submission))
    msgspec.convert(wire, Submission)
    inputs = wire["inputs"]
    messages: list[dict[str, Any]] = []
    for message in wire["program"]["nodes"][-1]["messages"]:
        if "splice" in message:
            messages.extend(inputs[message["splice"]])
            continue
        content = message["content"]
        if isinstance(content, list):
            pieces = [s["text"] if "text" in s else inputs[s["input"]] for s in content]
            assert all(isinstance(piece, str) for piece in pieces)
            content = "".join(pieces)
        messages.append({**message, "content": content})
    return messages


TEMPLATES: list[Any] = [
    PromptTemplate.from_template("Say {a} {{literally}} and {b!r:>12}!"),
    PromptTemplate.from_template("{a}{b}", partial_variables={"b": "fixed"}),
    PromptTemplate.from_template("{a} {b}", partial_variables={"b": lambda: "called"}),
    PromptTemplate.from_template("Say {{a}} and {{b}}", template_format="mustache"),
    ChatPromptTemplate.from_messages(
        [
            ("system", "Be {b}."),
            SystemMessage("static {a}"),
            ("human", "{a}"),
            ("ai", "ok {b}"),
            ("human", [{"type": "text", "text": "{a}"}, {"type": "text", "text": "{b}"}]),
            MessagesPlaceholder("history", optional=True),
        ]
    ),
    ChatPromptTemplate.from_messages([("human", "{a} {b}")]).partial(b="over"),
    ChatPromptTemplate.from_messages([("human", "{a} {b}"), ("placeholder", "{history}")]),
    FewShotPromptTemplate(
        examples=[{"q": "1+1", "r": "2"}],
        example_prompt=PromptTemplate.from_template("Q {q} A {r}"),
        suffix="{a} {b}",
        input_variables=["a", "b"],
    ),
]
VALUE = st.one_of(
    st.text(max_size=20), st.integers(), st.lists(st.text(max_size=5), max_size=2), st.none()
)


@given(st.sampled_from(TEMPLATES), st.fixed_dictionaries({"a": VALUE, "b": VALUE}), st.booleans())
def test_prompt_matches_langchain(template: Any, values: dict[str, Any], has_history: bool) -> None:
    if has_history:
        values = {**values, "history": [("human", "before"), AIMessage("yes")]}
    expected = to_wire_list(template.invoke(values))
    assert rendered(template | LLM, values) == expected


@pytest.mark.parametrize("template_format", ["f-string", "mustache"])
@pytest.mark.parametrize("is_assigned", [False, True])
def test_a_record_replaces_partial_and_optional_variables(
    template_format: Any, is_assigned: bool
) -> None:
    slots = "{a} {b}" if template_format == "f-string" else "{{a}} {{b}}"
    history = MessagesPlaceholder("history", optional=True)
    template = ChatPromptTemplate.from_messages(
        [("human", slots), history], template_format=template_format
    ).partial(b="over")
    given = {"a": "x", "b": "mine", "history": [("human", "before")]}
    for values in (given, {"a": "x"}):
        record: Any = {name: itemgetter(name) for name in values}
        if is_assigned:
            record = RunnablePassthrough.assign(a=itemgetter("a"))
        expected = to_wire_list(template.invoke(values))
        assert rendered(record | template | LLM, values) == expected


def test_a_function_for_a_placeholder_runs_at_each_call() -> None:
    history: list[Any] = []
    template = ChatPromptTemplate.from_messages([MessagesPlaceholder("history"), ("human", "{a}")])
    program = to_program(template.partial(history=lambda: list(history)) | LLM)
    for text in ("one", "two"):
        history.append(("human", text))
        given = program.submission({"a": "x"})["inputs"]
        assert any(len(value) == len(history) for value in given.values() if type(value) is list)


@pytest.mark.parametrize("value", ["tea", 7, {"topic": "tea"}, ["a"], ("a", 1), Document("x")])
def test_single_variable_prompt_accepts_bare_value(value: Any) -> None:
    template = prompt("Say {topic}")
    assert rendered(template | LLM, value) == to_wire_list(template.invoke(value))


@pytest.mark.parametrize("value", ["tea", {"other": 1}])
def test_input_that_langchain_rejects_fails_at_submission(value: Any) -> None:
    template = prompt("{topic} {style}")
    with pytest.raises(Exception, match=r".") as expected:
        template.invoke(value)
    with pytest.raises(type(expected.value), match=re.escape(str(expected.value)[:40])):
        to_program(template | LLM).submission(value)


@pytest.mark.parametrize("value", ["hi", [("human", "hi"), AIMessage("yes")]])
def test_model_accepts_langchain_inputs(value: Any) -> None:
    assert rendered(LLM, value) == to_wire_list(value)


def test_names_show_positions() -> None:
    chain = (
        RunnableParallel(
            pros=prompt("Pros of {topic}") | LLM | TEXT,
            cons=prompt("Cons of {topic}") | LLM | TEXT,
        )
        | prompt("{pros} or {cons}")
        | LLM
        | TEXT
        | prompt("Shorter: {text}")
        | LLM
        | TEXT
    )
    compiled = to_program(chain, name="weigh")
    assert list(nodes_of(chain)) == ["pros_call", "cons_call", "answer_1_call", "answer_call"]
    assert compiled.inputs == ["topic"]
    assert compiled.outputs == ["answer"]
    assert compiled.program["name"] == "weigh"
    last = nodes_of(chain)["answer_call"]
    assert last["messages"][0]["content"] == [{"text": "Shorter: "}, {"input": "answer_1"}]
    assert last["output"] == {
        "variable": "answer",
        "as": "text",
        "temperature": 0,
        "max_tokens": 5,
    }


def test_keys_of_any_alphabet_name_valid_variables(client: Client) -> None:
    llm = LLM.model_copy(update={"client": client})
    say = prompt("{名}") | llm | TEXT
    chain: Runnable[Any, Any] = {"名前": say, "ärger": say} | prompt("{名前}{ärger}") | llm | TEXT
    plain = chain.invoke({"名": "x"})
    assert to_program(chain).run(client, {"名": "x"}) == plain
    fast = accelerate(chain)
    assert fast.invoke({"名": "x"}) == plain
    (run,) = fast.explain().runs
    assert (run.num_served, run.misses) == (3, [])


def test_equal_chains_give_equal_programs() -> None:
    def chain() -> Runnable[Any, Any]:
        return {"x": prompt("{a}") | LLM | TEXT, "n": lambda d: 1} | prompt("{x}{n}") | LLM

    assert to_program(chain()).program == to_program(chain()).program


def test_shared_input_is_one_variable() -> None:
    branches: dict[str, Any] = {f"b{n}": prompt(f"{n} {{text}}") | LLM | TEXT for n in range(5)}
    both = RunnableParallel(**branches, two=prompt("{text} {style}") | LLM)
    assert to_program(both).inputs == ["text", "style"]
    compiled = to_program(both)
    assert compiled.submission({"text": "t", "style": "s"})["inputs"] == {"text": "t", "style": "s"}
    with pytest.raises(TypeError, match="Expected mapping type"):
        compiled.submission("t")


def test_bind_and_config_set_arguments() -> None:
    llm = ChatConure(temperature=1, stop=["a"]).bind(stop=["b"], temperature=0).bind(seed=3)
    chain = prompt("{x}") | llm.with_config(run_name="think hard")
    node = nodes_of(chain)["think_hard_call"]
    assert node["output"] == {
        "variable": "think_hard",
        "as": "message",
        "temperature": 0,
        "seed": 3,
        "stop": ["b"],
    }
    chosen = LLM.configurable_fields(max_tokens=ConfigurableField(id="n"))
    node = nodes_of(prompt("{x}") | chosen.with_config(configurable={"n": 9}))["answer_call"]
    assert node["output"]["max_tokens"] == 9


def test_config_of_alternatives_reaches_the_chosen_one() -> None:
    llm = LLM.configurable_fields(max_tokens=ConfigurableField(id="n"))
    chains = (prompt("{x}") | llm).configurable_alternatives(
        ConfigurableField(id="kind"), default_key="a", b=prompt("{x}") | LLM
    )
    short = chains.with_config(configurable={"n": 9})
    assert nodes_of(short)["answer_call"]["output"]["max_tokens"] == 9
    prefixed = (prompt("{x}") | LLM).configurable_alternatives(
        ConfigurableField(id="kind"), default_key="a", prefix_keys=True, b=prompt("{x}") | llm
    )
    short = prefixed.with_config(configurable={"kind": "b", "kind==b/n": 9})
    assert nodes_of(short)["answer_call"]["output"]["max_tokens"] == 9


def test_arguments_are_bound_to_the_model_that_the_config_selects() -> None:
    llm = LLM.configurable_fields(max_tokens=ConfigurableField(id="n"))
    chain = prompt("{x}") | llm.bind(stop=["x"]).with_config(configurable={"n": 9})
    output = nodes_of(chain)["answer_call"]["output"]
    assert (output["max_tokens"], output["stop"]) == (9, ["x"])


def test_server_prints_dict_as_python() -> None:
    chain = (
        {"notes": {"a": prompt("{x}") | LLM | TEXT, "n": itemgetter("x")}} | prompt("{notes}") | LLM
    )
    printed = {"object": {"a": {"var": "a"}, "n": {"var": "x_2"}}}
    message = nodes_of(chain)["answer_call"]["messages"][0]
    assert message["content"] == [{"input": {"pyrepr": [printed]}}]


def test_consecutive_functions_are_one_step() -> None:
    def find(question: str) -> list[Document]:
        return [Document("x")]

    def join(documents: list[Document]) -> str:
        return documents[0].page_content

    chain = (
        {"context": RunnableLambda(find) | join, "question": RunnablePassthrough()}
        | prompt("{context} {question}")
        | LLM
    )
    compiled = to_program(chain)
    assert list(nodes_of(chain)) == ["context_join_step", "answer_call"]
    assert compiled.functions["join"](input="q") == "x"


def test_step_returns_each_needed_view() -> None:
    def both(text: str) -> dict[str, Any]:
        return {"history": [HumanMessage(text)], "n": (1, 2)}

    template = ChatPromptTemplate.from_messages([("placeholder", "{history}"), ("human", "{n}")])
    compiled = to_program(RunnableLambda(both) | template | LLM)
    value = compiled.functions["both"](input="q")
    assert value == {"history": [{"role": "user", "content": "q"}], "n": "(1, 2)"}
    ops = [node["op"] for node in compiled.program["nodes"]]
    assert ops == ["client", "generate", "expr", "expr"]
    messages = compiled.program["nodes"][1]["messages"]
    assert messages == [{"splice": "history"}, {"role": "user", "content": [{"input": "n"}]}]


async def test_functions_receive_values_of_the_chain() -> None:
    got: list[Any] = []

    def keep(value: Any) -> str:
        got.append(value)
        return "done"

    chain = (
        RunnablePassthrough.assign(
            text=prompt("{x}") | LLM | TEXT,
            message=prompt("{x}") | LLM,
            deep={"a": itemgetter("x")},
        )
        | keep
        | TEXT
    )
    compiled = to_program(chain)
    given = {"x": 1, "h": [HumanMessage("h")]}
    args = {
        "input": compiled.submission(given)["inputs"]["input"],
        "text": "t",
        "message": {"role": "assistant", "content": "m", "model": "default"},
        "deep": {"a": 1},
    }
    assert compiled.functions["keep"](**args) == "done"
    assert await compiled.async_functions["keep"](**args) == "done"
    for value in got:
        assert list(value) == ["x", "h", "text", "message", "deep"]
        assert value["h"] == [HumanMessage("h")]
        assert value["text"] == "t"
        assert isinstance(value["message"], AIMessage)
        assert value["deep"] == {"a": 1}


def test_parsers_and_attrgetters_are_functions() -> None:
    chain = prompt("{x}") | LLM | JsonOutputParser()
    compiled = to_program(chain)
    message = {"role": "assistant", "content": '```json\n{"a": 1}\n```'}
    assert compiled.functions["JsonOutputParser"](input=message) == {"a": 1}
    compiled = to_program(prompt("{x}") | LLM | RunnableLambda(attrgetter("content")))
    (function,) = compiled.functions.values()
    assert function(input=message) == message["content"]


def test_non_json_result_of_function_fails() -> None:
    compiled = to_program(prompt("{x}") | LLM | TEXT | (lambda text: {1, 2}))
    with pytest.raises(ProgramError, match="is a set, which cannot be sent as JSON"):
        compiled.functions["function"](input="x")


def test_a_refused_value_for_a_prompt_names_what_is_accepted() -> None:
    with pytest.raises(ProgramError) as refused:
        encode((1, 2), what="x", is_plain=True)
    assert "text, numbers, lists or dicts whose keys are text" in refused.value.message


def test_generator_function_is_concatenated() -> None:
    def letters(text: str) -> Any:
        yield from text.upper()

    compiled = to_program(prompt("{x}") | LLM | TEXT | RunnableLambda(letters))
    assert compiled.functions["letters"](input="ab") == "AB"


@pytest.mark.parametrize("value", [{1, 2}, object()])
def test_non_json_input_fails_at_submission(value: Any) -> None:
    function: Any = RunnableLambda(lambda v: "x")
    compiled = to_program(function | prompt("{x}") | LLM)
    with pytest.raises(ProgramError, match="cannot be sent as JSON"):
        compiled.submission(value)


CALL: Any = prompt("{x}") | LLM
REFUSED: list[tuple[Callable[[], Any], str, str]] = [
    (lambda: CALL | TEXT | prompt("{y:>9}") | LLM, "chain.steps[3]", "{y:>9} formats"),
    (lambda: CALL | TEXT | prompt("{y!r}") | LLM, "chain.steps[3]", "{y!r} formats"),
    (lambda: CALL | prompt("{y}") | LLM, "chain.steps[2]", "StrOutputParser"),
    (lambda: {"y": {"z": CALL}} | prompt("{y}") | LLM, "chain.steps[1]", "StrOutputParser"),
    (
        lambda: {"y": CALL | TEXT} | prompt("{y} {z}") | LLM,
        "chain.steps[1]",
        "variable 'z' has no value",
    ),
    (lambda: CALL | TEXT | prompt("{y} {z}") | LLM, "chain.steps[3]", "requires a dict"),
    (lambda: CALL | LLM, "chain.steps[2]", "got a model's message"),
    (lambda: {"y": CALL} | LLM, "chain.steps[1]", "got a dict"),
    (lambda: CALL | itemgetter("z"), "chain.steps[2]", "itemgetter('z')"),
    (lambda: RunnableParallel(y=CALL) | itemgetter("z"), "chain.steps[1]", "no item 'z'"),
    (
        lambda: CALL | TEXT | RunnablePassthrough.assign(z=TEXT),
        "chain.steps[3]",
        "assign requires a dict",
    ),
    (
        lambda: CALL | TEXT | ChatPromptTemplate.from_messages([MessagesPlaceholder("h")]) | LLM,
        "chain.steps[3]",
        "requires a list of messages",
    ),
    (
        lambda: (
            CALL | TEXT | PromptTemplate.from_template("{{y}}", template_format="mustache") | LLM
        ),
        "chain.steps[3]",
        "use an f-string template",
    ),
    (lambda: prompt("{x}") | LLM.bind(n=2), "chain.steps[1]", "n=2 requests several answers"),
    (lambda: CALL.with_listeners(on_end=print), "chain", "listeners"),
    (
        lambda: CALL.bind(stop=["a"]),
        "chain.steps[0]",
        "does not use the arguments that are bound to it: stop",
    ),
    (lambda: prompt("{x}") | LLM.bind(functions=[{}]), "chain.steps[1]", "functions"),
    (lambda: prompt("{x}") | print, "chain.steps[1]", "gets a prompt"),
    (lambda: prompt("{x}"), "chain", "ends with a prompt"),
    (lambda: RunnablePassthrough(), "chain", "nothing to run"),
]


@pytest.mark.parametrize(("make", "path", "message"), REFUSED, ids=[why for _, _, why in REFUSED])
def test_unsupported_part_is_rejected_with_position(
    make: Callable[[], Any], path: str, message: str
) -> None:
    with pytest.raises(ProgramError, match=re.escape(message)) as caught:
        to_program(make())
    assert caught.value.code == "to_program.unsupported"
    assert caught.value.path == path


def test_compilation_runs_no_user_code() -> None:
    def explode(*_: Any) -> Any:
        raise AssertionError

    chain: Any = (
        {"a": RunnableLambda(explode), "b": prompt("{x}").partial(x=explode) | LLM | TEXT}
        | prompt("{a} {b}")
        | LLM
        | explode
    )
    assert len(to_program(chain).functions) == 2


def test_call_with_tools_is_requested_as_message() -> None:
    def add(a: int) -> int:
        """Add."""
        return a

    compiled = to_program(prompt("{x}") | LLM.bind_tools([add]) | TEXT | prompt("{y}") | LLM)
    first, second = compiled.program["nodes"]
    assert (first["output"]["as"], first["tools"][0]["function"]["name"]) == ("message", "add")
    text = {"get": [{"var": first["output"]["variable"]}, "content"]}
    assert {"input": text} in second["messages"][-1]["content"]


def test_schema_becomes_output_constraint() -> None:
    schema = {"title": "T", "type": "object", "properties": {"a": {"type": "integer"}}}
    compiled = to_program(prompt("{x}") | LLM.with_structured_output(schema))
    assert compiled.program["nodes"][0]["output"]["constraint"] == {"json_schema": schema}


def test_pick_ignores_absent_keys(client: Client) -> None:
    llm = LLM.model_copy(update={"client": client})
    say: Any = prompt("{q}") | llm | TEXT
    answers: Any = RunnableParallel(a=say)
    for keys in (["a", "b"], "b", ["b"]):
        chain = RunnableParallel(picked=answers | RunnablePick(keys), c=say)
        assert to_program(chain).run(client, {"q": "tea"}) == chain.invoke({"q": "tea"})
    missing = RunnableParallel(picked=RunnablePassthrough.assign(a=say) | RunnablePick("b"), c=say)
    assert to_program(missing).run(client, {"q": "tea"})["picked"] is None


@pytest.mark.parametrize("template", ["{q}", "{q:>9}"])
def test_half_of_a_surrogate_pair_in_a_prompt_is_refused(client: Client, template: str) -> None:
    with pytest.raises(ProgramError, match="'q' has half of a surrogate pair"):
        to_program(prompt(template) | LLM).run(client, {"q": "\ud83d"})


def test_callable_without_a_hash_is_a_client_step() -> None:
    @dataclass
    class Prefix:
        length: int

        def __call__(self, text: str) -> str:
            return text[: self.length]

    nodes = nodes_of(prompt("{a}") | LLM | TEXT | RunnableLambda(Prefix(3)))
    assert [node["op"] for node in nodes.values()] == ["generate", "client"]


def test_functions_get_the_config_that_is_bound_to_them(client: Client) -> None:
    def note(text: str, config: RunnableConfig) -> list[object]:
        tags, metadata = config.get("tags", []), config.get("metadata", {})
        return [text, config.get("configurable"), sorted(tags), metadata["m"]]

    step = RunnableLambda(note).with_config(
        configurable={"a": 1, "b": 1}, tags=["inner"], metadata={"m": 1}
    )
    chain: Runnable[Any, Any] = (RunnablePassthrough() | step).with_config(
        configurable={"b": 2}, tags=["outer"]
    )
    plain = chain.invoke("tea")
    assert plain == ["tea", {"a": 1, "b": 2}, ["inner", "outer"], 1]
    assert to_program(chain).run(client, "tea") == plain


def test_functions_get_the_config_of_a_configurable_chain(client: Client) -> None:
    def note(text: str, config: RunnableConfig) -> list[object]:
        return [text, config.get("configurable"), config.get("tags")]

    chain: Any = RunnablePassthrough() | RunnableLambda(note)
    chain = chain.configurable_alternatives(ConfigurableField(id="kind"), default_key="a")
    chain = chain.with_config(configurable={"user": "alice"}, tags=["tea"])
    plain = chain.invoke("tea")
    assert plain == ["tea", {"user": "alice"}, ["tea"]]
    assert to_program(chain).run(client, "tea") == plain
