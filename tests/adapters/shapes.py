"""Chains of many shapes, as apps have them, each with an input and how much of it is planned.

`served` is how many of its model calls come from the plan, `missed` how many were not
foreseen; both are counted over one run.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from operator import itemgetter
from typing import Any, NamedTuple, cast

from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import (
    CommaSeparatedListOutputParser,
    JsonOutputParser,
    JsonOutputToolsParser,
    StrOutputParser,
)
from langchain_core.prompts import (
    ChatPromptTemplate,
    FewShotPromptTemplate,
    MessagesPlaceholder,
    PromptTemplate,
)
from langchain_core.runnables import (
    ConfigurableField,
    Runnable,
    RunnableBranch,
    RunnableGenerator,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
    RunnablePick,
)
from langchain_core.runnables.base import coerce_to_runnable
from langchain_core.runnables.router import RouterRunnable
from langchain_core.tools import tool
from pydantic import BaseModel

from conure.adapters.langchain import ChatConure

TEXT = StrOutputParser()


def ask(template: str) -> Any:
    return PromptTemplate.from_template(template)


class Shape(NamedTuple):
    """One chain."""

    chain: Runnable[Any, Any]
    given: Any
    served: int
    missed: int = 0


class City(BaseModel):
    """A city."""

    name: str
    size: int


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def find(query: str) -> list[Document]:
    return [Document(page_content=f"{query} {n}") for n in range(2)]


def join(documents: list[Document]) -> str:
    return "\n".join(document.page_content for document in documents)


def shout(text: str) -> str:
    return text.upper()


def halves(text: str) -> list[str]:
    return [text[: len(text) // 2], text[len(text) // 2 :]]


def steps(text: str) -> list[dict[str, str]]:
    return [{"step": word} for word in text.split()[:3]]


def drafts(text: str) -> list[dict[str, Any]]:
    return [{"text": text}, {"text": text * 2}]


def called(llm: ChatConure) -> Callable[[str], Any]:
    def call(text: str) -> Any:
        return llm.invoke(text).content

    return call


def broken_json(message: AIMessage) -> Any:
    return json.loads(f"{{{message.content}")


def shapes(llm: ChatConure) -> dict[str, Shape]:
    """All of them, on a model."""
    families = (_plain, _prompts, _steps, _control, _models, _apps)
    return {name: shape for family in families for name, shape in family(llm).items()}


def _say(llm: Runnable[Any, Any], template: str = "{x}") -> Any:
    return ask(template) | llm | TEXT


def _shape(chain: Any, given: Any, served: int, missed: int = 0) -> Shape:
    return Shape(coerce_to_runnable(chain), given, served, missed)


def _plain(llm: ChatConure) -> dict[str, Shape]:
    say = _say(llm)
    pair: Any = RunnableParallel(a=_say(llm, "a {x}"), b=_say(llm, "b {x}"))
    wide: Any = RunnableParallel({f"n{n}": _say(llm, f"{n} {{x}}") for n in range(12)})
    keys = "".join(f"{{n{n}}}" for n in range(12))
    tea = {"x": "tea"}
    return {
        "model alone": _shape(llm, "tea", 1),
        "prompt and model": _shape(ask("{x}") | llm, tea, 1),
        "prompt, model, text": _shape(say, tea, 1),
        "chain of five": _shape(say | say | say | say | say, tea, 5),
        "refine": _shape(
            RunnablePassthrough.assign(draft=_say(llm, "draft {x}"))
            | RunnablePassthrough.assign(critique=_say(llm, "criticise {draft}"))
            | ask("{x}: improve {draft} by {critique}")
            | llm
            | TEXT,
            tea,
            3,
        ),
        "parallel": _shape(pair, tea, 2),
        "parallel and join": _shape(pair | ask("{a} {b}") | llm | TEXT, tea, 3),
        "nested parallel": _shape(
            RunnableParallel(p=pair | ask("{a}{b}") | llm | TEXT, q=pair | ask("{b}") | llm | TEXT)
            | ask("{p} {q}")
            | llm,
            tea,
            7,
        ),
        "wide and join": _shape(wide | ask(keys) | llm | TEXT, tea, 13),
        "skeleton of thought": _shape(
            RunnablePassthrough.assign(plan=_say(llm, "skeleton of {x}"))
            | RunnableParallel(
                one=ask("point 1 of {plan}") | llm | TEXT,
                two=ask("point 2 of {plan}") | llm | TEXT,
            )
            | ask("{one}\n{two}")
            | llm,
            tea,
            4,
        ),
        "assign and pick": _shape(
            RunnablePassthrough.assign(y=say) | RunnablePick("y") | ask("{y}!") | llm, tea, 2
        ),
        "pick many": _shape(
            RunnablePassthrough.assign(y=say, z=_say(llm, "z {x}"))
            | RunnablePick(["y", "z"])
            | ask("{y}{z}")
            | llm,
            tea,
            3,
        ),
        "itemgetters": _shape(
            {"x": itemgetter("q"), "y": itemgetter("q") | say} | ask("{x} {y}") | llm,
            {"q": "tea"},
            2,
        ),
        "same prompt twice": _shape({"a": say, "b": say} | ask("{a}{b}") | llm, tea, 3),
        "dict in a prompt": _shape(
            {"d": RunnableParallel(a=say)} | ask("{d}") | llm, {"x": "it's"}, 2
        ),
    }


def _prompts(llm: ChatConure) -> dict[str, Shape]:
    chat = ChatPromptTemplate.from_messages(
        [("system", "You {mood}."), MessagesPlaceholder("history"), ("human", "{x}")]
    )
    few = FewShotPromptTemplate(
        examples=[{"q": "1", "a": "2"}],
        example_prompt=ask("{q}:{a}"),
        prefix="Go",
        suffix="{x}:",
        input_variables=["x"],
    )
    history = [HumanMessage("hi"), AIMessage("ho")]
    given = {"x": "tea", "history": history, "mood": "sing"}
    return {
        "history": _shape(chat | llm | TEXT, given, 1),
        "history and rewriting": _shape(
            RunnablePassthrough.assign(x=chat | llm | TEXT) | chat | llm | TEXT, given, 2
        ),
        "partial": _shape(chat.partial(mood="hum") | llm, {"x": "a", "history": []}, 1),
        "few-shot": _shape(few | llm | TEXT | ask("{y}") | llm, {"x": "3"}, 2),
        "mustache": _shape(
            PromptTemplate.from_template("{{x}}", template_format="mustache") | llm | TEXT,
            {"x": "tea"},
            1,
        ),
        "bare value": _shape(ask("{x}") | llm | TEXT | ask("again {y}") | llm, "tea", 2),
        "messages by hand": _shape(
            (lambda x: [SystemMessage("s"), HumanMessage(x)]) | llm | TEXT, "tea", 1
        ),
    }


def _steps(llm: ChatConure) -> dict[str, Shape]:
    say = _say(llm)
    docs = {"c": RunnableLambda(find) | join, "q": RunnablePassthrough()}
    answer = ask("{c}\n\n{q}") | llm | TEXT

    def upper(chunks: Any) -> Any:
        for chunk in chunks:
            yield chunk.upper()

    async def aupper(chunks: Any) -> AsyncIterator[str]:
        async for chunk in chunks:
            yield chunk.upper()

    return {
        "retrieval": _shape(docs | answer, "why", 1),
        "retrieval after rewriting": _shape(say | docs | answer, "why", 2),
        "function in the middle": _shape(say | shout | say | ask("{z}") | llm, "tea", 3),
        "function at the end": _shape(say | shout, "tea", 1),
        "generator at the end": _shape(say | RunnableGenerator(upper, aupper), "tea", 1),
        "generator in the middle": _shape(say | RunnableGenerator(upper, aupper) | say, "tea", 2),
        "message read by hand": _shape(
            ask("{x}") | llm | (lambda message: message.content[::-1]) | say, "tea", 2
        ),
        "two functions between": _shape(say | shout | (lambda t: {"x": t}) | say, "tea", 2),
        "tap": _shape(say | RunnablePassthrough(cast(Any, shout)) | say, "tea", 2),
        "sql": _shape(
            RunnablePassthrough.assign(query=_say(llm, "SQL for {x}"))
            | RunnablePassthrough.assign(rows=lambda d: [len(d["query"])])
            | ask("{x}: {query} gave {rows}")
            | llm
            | TEXT,
            {"x": "tea"},
            2,
        ),
        "list parser": _shape(
            say | CommaSeparatedListOutputParser() | (lambda items: items[0]) | say, "tea", 2
        ),
        "set from a function": _shape(
            say | (lambda t: {"x": t, "odd": {1, 2}}) | ask("{x}") | llm, "tea", 2
        ),
        "value that cannot travel": _shape(
            say | (lambda t: {t: object()} and [{t}]) | (lambda s: sorted(s[0])[0]) | say, "t", 2
        ),
        "multi-query": _shape(
            say
            | halves
            | RunnableLambda(find).map()
            | (lambda found: join([d for each in found for d in each]))
            | say,
            "why",
            2,
        ),
    }


def _control(llm: ChatConure) -> dict[str, Shape]:
    say = _say(llm)
    long = _say(llm, "long {x}") | ask("{y}") | llm | TEXT
    branch: Any = RunnableBranch((lambda d: len(d["x"]) > 3, long), _say(llm, "short {x}"))
    router = RouterRunnable({"tea": say, "sea": _say(llm, "sea {x}")})
    fails = ask("{x}") | llm | broken_json
    return {
        "branch taken": _shape(branch, {"x": "coffee"}, 2),
        "branch not taken": _shape(branch | ask("{z}") | llm, {"x": "tea"}, 2),
        "branch on an answer": _shape(
            RunnablePassthrough.assign(kind=say)
            | RunnableBranch(
                (lambda d: "a" in d["kind"], _say(llm, "A {kind}") | ask("{y}") | llm), say
            ),
            {"x": "tea"},
            3,
        ),
        "map": _shape((lambda d: [d, d + "!", d * 2]) | say.map(), "tea", 3),
        "map and reduce": _shape(halves | say.map() | ", ".join | say, "lemonade", 3),
        "map of a chain with a function": _shape(
            halves | (say | shout | say).map() | ", ".join | say, "lemonade", 5
        ),
        "map of messages": _shape(RunnableLambda(halves) | (ask("{x}") | llm).map(), "lemonade", 2),
        "fallback not needed": _shape(
            (say | ask("{y}") | llm).with_fallbacks([_say(llm, "other {x}")]) | TEXT | say,
            "tea",
            3,
        ),
        "fallback": _shape(fails.with_fallbacks([_say(llm, "other {x}")]) | say, {"x": "tea"}, 3),
        "retry": _shape((say | shout).with_retry(stop_after_attempt=2) | say, "tea", 2),
        "router": _shape(router | say, {"key": "sea", "input": "x"}, 1, 1),
        "chain made in a function": _shape(
            RunnableLambda(lambda x: (say | say) if x else llm) | say, "tea", 3
        ),
        "model called in a function": _shape(RunnableLambda(called(llm)) | say, "tea", 1, 1),
        "skip": _shape(RunnablePassthrough() | say, "tea", 1),
    }


def _models(llm: ChatConure) -> dict[str, Shape]:
    say = _say(llm)
    other = FakeListChatModel(responses=["fake"])
    choose: Callable[..., Any] = ConfigurableField
    return {
        "bound stop": _shape(ask("{x}") | llm.bind(stop=["a"]) | TEXT | say, "tea", 2),
        "bound model": _shape(ask("{x}") | llm.bind(model="fake") | TEXT | say, "tea", 2),
        "named": _shape(say.with_config(run_name="Say", tags=["t"]) | say, "tea", 2),
        "listener": _shape(say.with_listeners(on_end=lambda run: None) | say, "tea", 2),
        "another model between": _shape(say | other | TEXT | say, "tea", 2),
        "json": _shape(
            ask("city {x}")
            | llm.with_structured_output(City.model_json_schema())
            | ask("{name} has {size}")
            | llm,
            "tea",
            2,
        ),
        "json mode": _shape(
            ask("{x}") | llm.bind(constraint={"regex": r"\{\}"}) | JsonOutputParser(), "tea", 1
        ),
        "pydantic": _shape(
            ask("city {x}")
            | llm.with_structured_output(City)
            | (lambda city: city.name)
            | ask("{n}")
            | llm,
            "tea",
            2,
        ),
        "include raw": _shape(
            ask("city {x}") | llm.with_structured_output(City, include_raw=True), "tea", 1
        ),
        "tools": _shape(
            ask("{x}")
            | llm.bind_tools([add], tool_choice="add")
            | (lambda message: str(message.tool_calls[0]["name"]))
            | say,
            "tea",
            2,
        ),
        "choices": _shape(
            ask("{x}") | llm.bind(constraint={"choices": ["yes", "no"]}) | TEXT | say, "tea", 2
        ),
        "configurable": _shape(
            ask("{x}") | llm.configurable_fields(temperature=choose(id="t")) | TEXT | say,
            "tea",
            2,
        ),
    }


def _apps(llm: ChatConure) -> dict[str, Shape]:
    """Patterns as apps combine them."""
    say = _say(llm)
    turn = ChatPromptTemplate.from_messages(
        [("system", "Use:\n{context}"), MessagesPlaceholder("history"), ("human", "{input}")]
    )
    standalone = RunnableBranch(
        (lambda d: not d["history"], RunnableLambda(itemgetter("input"))),
        _say(llm, "{history} {input} alone"),
    )
    rated = RunnablePassthrough.assign(
        score=_say(llm.bind(constraint={"regex": "[0-9]"}), "Rate {text}") | RunnableLambda(int)
    )
    tried = RunnableParallel(
        {f"try{n}": ask("{x}") | llm.bind(temperature=1.0, seed=n) | TEXT for n in range(3)}
    )
    return {
        "answers that vote": _shape(
            tried | (lambda d: max(sorted(d.values()), key=list(d.values()).count)) | say, "tea", 4
        ),
        "retrieval with a memory": _shape(
            RunnablePassthrough.assign(context=standalone | find | join) | turn | llm | TEXT,
            {"input": "why", "history": [HumanMessage("hi"), AIMessage("ho")]},
            2,
        ),
        "the same at its beginning": _shape(
            RunnablePassthrough.assign(context=standalone | find | join) | turn | llm | TEXT,
            {"input": "why", "history": []},
            1,
        ),
        "plan and execute": _shape(
            RunnablePassthrough.assign(steps=_say(llm, "plan {x}") | steps)
            | RunnablePassthrough.assign(
                done=itemgetter("steps") | _say(llm, "do {step}").map() | ", ".join
            )
            | ask("{x}: {done}")
            | llm,
            {"x": "tea"},
            4,
        ),
        "map and rank": _shape(
            RunnableLambda(drafts)
            | rated.map()
            | (lambda found: max(found, key=lambda each: each["score"])["text"])
            | say,
            "tea",
            3,
        ),
        "guard beside the answer": _shape(
            RunnableParallel(
                answer=say,
                safe=ask("Safe? {x}") | llm.bind(constraint={"choices": ["yes", "no"]}) | TEXT,
            )
            | RunnableBranch((lambda d: d["safe"] == "yes", itemgetter("answer")), lambda d: "?")
            | say,
            {"x": "tea"},
            3,
        ),
        "tools, run and told": _shape(
            ask("{x}")
            | llm.bind_tools([add], tool_choice="add")
            | JsonOutputToolsParser(first_tool_only=True)
            | itemgetter("args")
            | str
            | say,
            "tea",
            2,
        ),
    }
