"""The requests of Microsoft's Parrot client, good and bad, against a server with a fake engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from conure.server.app import create_app
from conure.server.config import Config

from ...inprocess import answer
from ...service_double import in_process

SAMPLING: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "max_gen_length": 8,
    "ignore_tokenizer_eos": False,
    "stop_token_ids": [],
    "stop_str": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "n": 1,
    "best_of": 1,
    "logit_bias": None,
    "repetition_penalty": 0.0,
    "length_penalty": 0.0,
}
"""All fields, as the client sends them."""
META: dict[str, Any] = {
    "models": [],
    "model_type": "token_id",
    "remove_pure_fill": True,
    "cache_prefix": True,
    "output_criteria": None,
    "fuse_fill": False,
    "func_name": "f",
}


def given(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "is_output": False, **fields}


def written(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "is_output": True, **fields}


class ParrotClient:
    """Sends requests as Microsoft's client does: a JSON body with every method."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http
        self.session: Any = None

    async def ask(self, method: str, path: str, **body: Any) -> httpx.Response:
        return await self.http.request(method, f"/v1{path}", json=body)

    async def open(self) -> int:
        opened = (await self.ask("POST", "/session", api_key="1")).json()
        assert isinstance(opened["session_auth"], str)
        assert type(opened["session_id"]) is int
        number: int = opened["session_id"]
        self.session = number
        return number

    async def call(self, template: str, *parameters: Any, **fields: Any) -> httpx.Response:
        body = {"template": template, "parameters": [*parameters], **fields}
        return await self.ask("POST", "/semantic_call", session_id=self.session, **body)

    async def get(self, variable: str, **fields: Any) -> httpx.Response:
        body = {"session_id": self.session, "session_auth": "1", "criteria": "latency", **fields}
        return await self.ask("GET", f"/semantic_var/{variable}", **body)

    async def set(self, variable: str, content: Any) -> httpx.Response:
        body = {"session_id": self.session, "session_auth": "1", "content": content}
        return await self.ask("POST", f"/semantic_var/{variable}", **body)

    async def declare(self, name: str) -> str:
        body = {"session_id": self.session, "session_auth": "1", "var_name": name}
        found = await self.ask("POST", "/semantic_var", **body)
        return good(found)["var_id"]  # type: ignore[no-any-return]  # JSON


def good(response: httpx.Response) -> Any:
    """Return the body of a success. The client accepts status 200 only."""
    assert response.status_code == 200, response.text
    return response.json()


def ids_of(response: httpx.Response) -> list[tuple[str, str]]:
    """Return name and variable of each bound parameter."""
    body = good(response)
    assert type(body["request_id"]) is int
    return [(each["parameter_name"], each["var_id"]) for each in body["param_info"]]


def check_error(response: httpx.Response, status: int, text: str) -> None:
    """Check an error: the client requires both fields, and shows them."""
    assert response.status_code == status, response.text
    body = response.json()
    assert isinstance(body["error"], str)
    assert isinstance(body["traceback"], str)
    assert text in body["error"]


@contextlib.asynccontextmanager
async def parrot(
    data: Path, functions: Mapping[str, Any] | None = None, **settings: Any
) -> AsyncIterator[ParrotClient]:
    app = create_app(Config(data=data, engine="fake", **settings), functions=functions)
    async with in_process(app) as http:
        yield ParrotClient(http)


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[ParrotClient]:
    opened: asyncio.Future[ParrotClient] = asyncio.get_running_loop().create_future()
    finished = asyncio.Event()

    async def run() -> None:
        async with parrot(tmp_path) as found:
            await found.open()
            opened.set_result(found)
            await finished.wait()

    # The application must end in the task that started it, and fixtures end in another one.
    running = asyncio.ensure_future(run())
    await asyncio.wait((opened, running), return_when=asyncio.FIRST_COMPLETED)
    yield opened.result()
    finished.set()
    await running


async def test_a_call_runs_when_its_output_is_requested(client: ParrotClient) -> None:
    call = await client.call(
        "Say {{a}}: {{b}}", given("a", value="hi"), written("b", sampling_config=SAMPLING), **META
    )
    [(_, a), (_, b)] = ids_of(call)
    assert [each["is_output"] for each in call.json()["param_info"]] == [False, True]
    listed = await client.ask("GET", "/semantic_var", session_id=client.session)
    before = {each["var_id"]: each["status"] for each in good(listed)["variables"]}
    assert before == {a: "done", b: "waiting"}
    content = good(await client.get(b))["content"]
    assert content == answer("Say hi: ")[:8]
    assert good(await client.get(b))["content"] == content


async def test_a_variable_is_declared_set_once_and_read(client: ParrotClient) -> None:
    variable = await client.declare("two words")
    assert good(await client.set(variable, "hello")) == {}
    assert good(await client.get(variable)) == {"content": "hello"}
    assert good(await client.get(variable, session_auth="wrong")) == {"content": "hello"}
    check_error(await client.set(variable, "again"), 409, "already has a value")
    # As in Parrot, the criterion of a value that exists is not read.
    assert good(await client.get(variable, criteria="fast")) == {"content": "hello"}
    body = {"session_id": client.session, "session_auth": "1"}
    found = await client.ask("GET", f"/semantic_var/{variable}", **body)
    assert good(found) == {"content": "hello"}


async def test_equal_names_are_different_variables(client: ParrotClient) -> None:
    first, second = await client.declare("x"), await client.declare("x")
    assert first != second
    good(await client.set(first, ""))
    assert good(await client.get(first)) == {"content": ""}


async def test_unknown_variables_are_errors(client: ParrotClient) -> None:
    check_error(await client.get("nope"), 404, "Unknown semantic variable id: 'nope'")
    check_error(await client.set("nope", "x"), 404, "Unknown semantic variable id: 'nope'")
    for unknown in ("nope", "75de7bcd-a664-3136-a142-d76e5d29d8c3"):
        call = await client.call("{{a}} {{b}}", given("a", var_id=unknown), written("b"))
        check_error(call, 404, f"Unknown semantic variable id: '{unknown}'")


async def test_unknown_sessions_are_errors(client: ParrotClient) -> None:
    client.session = 777
    text = "Session (session_id=777) not found"
    check_error(await client.get("x"), 404, text)
    declared = await client.ask("POST", "/semantic_var", session_id=777, var_name="x")
    check_error(declared, 404, text)
    check_error(await client.call("a {{b}}", written("b")), 404, text)
    check_error(await client.ask("DELETE", "/session/777", session_auth="1"), 404, text)
    check_error(await client.ask("DELETE", "/session/x", session_auth="1"), 404, "not found")
    native = {"session_id": 777, "func_name": "f", "parameters": [written("a")]}
    check_error(await client.ask("POST", "/py_native_call", **native), 404, text)


async def test_an_ended_session_is_not_found(client: ParrotClient) -> None:
    number = client.session
    variable = await client.declare("x")
    good(await client.set(variable, "hello"))
    info = good(await client.ask("GET", f"/session/{number}", session_auth="1"))
    assert info["session_id"] == number
    assert good(await client.ask("DELETE", f"/session/{number}", session_auth="1")) == {}
    check_error(await client.get(variable), 404, f"Session (session_id={number}) not found")
    again = await client.ask("DELETE", f"/session/{number}", session_auth="1")
    check_error(again, 404, f"Session (session_id={number}) not found")
    program = (await client.http.get(f"/v1/programs/{info['program']}")).json()
    assert program["status"] == "cancelled"


ACCEPTED: list[tuple[str, list[Any], dict[str, Any], list[str]]] = [
    ("a {{b}}", [written("b")], {}, ["b"]),
    ("a {{b}}", [written("b"), given("z", value="v")], {}, ["b"]),
    ("a {{b}}", [written("b")], {"zzz": 1, "retry_times": 1}, ["b"]),
    ("just text", [], {"remove_pure_fill": False}, []),
    ("{{a}} {{b}}", [given("a", value=7), written("b")], {}, ["a", "b"]),
    ("x{{a}} {{b}}", [given("a", value=""), written("b")], {}, ["a", "b"]),
    ("{{a}} {{a}} {{b}}", [given("a", value="v"), written("b")], {}, ["a", "a", "b"]),
    ("x {{b}} y {{b}}", [written("b")], {}, ["b", "b"]),
    ("x {{b}} y {{c}}", [written("b"), written("c")], {}, ["b", "c"]),
    ("x {{b}}", [written("b")], {"output_criteria": "latency"}, ["b"]),
    ("x {{b}}", [written("b")], {"model_type": "zzz"}, ["b"]),
    ("x {{b}}", [written("b")], {"models": ["other", "fake"]}, ["b"]),
    ("x {{b}}{{c}}", [written("b"), written("c")], {}, ["b", "c"]),
]


async def test_param_info_lists_the_placeholders(client: ParrotClient) -> None:
    for template, parameters, fields, names in ACCEPTED:
        bound = ids_of(await client.call(template, *parameters, **fields))
        assert [name for name, _ in bound] == names
        outputs = [variable for name, variable in bound if name in "bc"]
        assert len(set(outputs)) == len(outputs)
        for variable in outputs:
            assert good(await client.get(variable))["content"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"parameters": []}, "template"),
    ({"template": "a"}, "parameters"),
    ({"template": "a {{b}} {{c}}", "parameters": [written("b")]}, "{{c}}"),
    ({"template": "{{a}} {{b}}", "parameters": [given("a"), written("b")]}, "var_id or value"),
    (
        {
            "template": "{{a}} {{b}}",
            "parameters": [given("a", value="v", var_id="x"), written("b")],
        },
        "var_id or value",
    ),
    ({"template": "a {{b}}", "parameters": [written("b", var_id="x")]}, "neither var_id"),
    (
        {
            "template": "{{a}} {{b}}",
            "parameters": [given("a", value="v", sampling_config={}), written("b")],
        },
        "sampling_config",
    ),
    ({"template": "a {{b}}", "parameters": [written("b"), written("b")]}, "twice"),
    ({"template": "a {{b}}", "parameters": [written("b", zzz=1)]}, "zzz"),
    ({"template": "a {{b}}", "parameters": [written("b", sampling_config={"zzz": 1})]}, "zzz"),
    ({"template": "just text", "parameters": []}, "no output"),
    ({"template": "{{b}}", "parameters": [written("b")]}, "starts with the output"),
    (
        {"template": "x {{b}}", "models": ["nope"], "parameters": [written("b")]},
        "this server has fake",
    ),
    (
        {"template": "x {{b}}", "output_criteria": "soon", "parameters": [written("b")]},
        "unknown criterion 'soon'",
    ),
    (
        {"template": "x {{b}}", "parameters": [written("b", sampling_config={"top_p": 7})]},
        "<= 1",
    ),
]


async def test_inconsistent_calls_are_refused(client: ParrotClient) -> None:
    for body, text in REFUSED:
        answered = await client.ask("POST", "/semantic_call", session_id=client.session, **body)
        check_error(answered, 400, text)


async def test_an_unknown_criterion_of_a_future_value_is_an_error(client: ParrotClient) -> None:
    [(_, b)] = ids_of(await client.call("x {{b}}", written("b")))
    check_error(await client.get(b, criteria="fast"), 400, "use one of latency, throughput")
    check_error(await client.get("nope", criteria="fast"), 404, "Unknown semantic variable id")
    info = good(await client.ask("GET", f"/session/{client.session}", session_auth="1"))
    status = (await client.http.get(f"/v1/programs/{info['program']}")).json()
    assert [node["status"] for node in status["nodes"].values()] == ["waiting"], "not demanded"
    for criterion in ("TTFT", "TPOT"):
        [(_, b)] = ids_of(await client.call("x {{b}}", written("b")))
        assert good(await client.get(b, criteria=criterion))["content"]


async def test_a_variable_may_be_set_after_its_reader_was_submitted(client: ParrotClient) -> None:
    late = await client.declare("late")
    [_, (_, b)] = ids_of(await client.call("{{a}}: {{b}}", given("a", var_id=late), written("b")))
    waiting = asyncio.ensure_future(client.get(b))
    good(await client.set(late, "now"))
    assert good(await waiting)["content"] == answer("now: ")


async def test_text_after_the_last_output_is_dropped_unless_it_is_requested(
    client: ParrotClient,
) -> None:
    info = good(await client.ask("GET", f"/session/{client.session}", session_auth="1"))
    for keep in (False, True):
        call = await client.call("x {{b}} end", written("b"), remove_pure_fill=not keep)
        [(_, b)] = ids_of(call)
        assert good(await client.get(b))["content"] == answer("x ")
    status = (await client.http.get(f"/v1/programs/{info['program']}")).json()
    assert len(status["nodes"]) == 2


async def test_a_limit_is_reduced_to_what_the_context_leaves(tmp_path: Path) -> None:
    async with parrot(tmp_path, context_len=64) as client:
        await client.open()
        config = {**SAMPLING, "max_gen_length": 512, "ignore_tokenizer_eos": True}
        output = written("b", sampling_config=config)
        [(_, b)] = ids_of(await client.call("x" * 50 + "{{b}}", output))
        assert len(good(await client.get(b))["content"]) == 14
        [(_, b)] = ids_of(await client.call("x" * 64 + "{{b}}", written("b")))
        check_error(await client.get(b), 400, "exceed the limit of 64 tokens")


async def test_sessions_and_variables_survive_a_restart(tmp_path: Path) -> None:
    async with parrot(tmp_path) as client:
        number = await client.open()
        late = await client.declare("late")
        call = await client.call("{{a}}: {{b}}", given("a", var_id=late), written("b"))
        [_, (_, b)] = ids_of(call)
    async with parrot(tmp_path) as client:
        client.session = number
        good(await client.set(late, "now"))
        assert good(await client.get(b))["content"] == answer("now: ")
        good(await client.ask("DELETE", f"/session/{number}", session_auth="1"))


def shout(text: str) -> str:
    return text.upper()


def halves(text: str) -> dict[str, str]:
    return {"head": text[:2], "tail": text[2:]}


NOT_CODE = "never decoded: not even base64"


async def test_a_native_call_runs_the_registered_function_of_its_name(tmp_path: Path) -> None:
    async with parrot(tmp_path, functions={"shout": shout, "halves": halves}) as client:
        await client.open()
        source = await client.declare("source")
        body: dict[str, Any] = {"session_id": client.session, "func_code": NOT_CODE, "timeout": 1.0}
        parameters = [given("text", var_id=source), written("result")]
        call = await client.ask(
            "POST", "/py_native_call", func_name="shout", parameters=parameters, **body
        )
        [(_, same), (_, result)] = ids_of(call)
        assert same == source
        parameters = [given("text", value="abcd"), written("head"), written("tail")]
        call = await client.ask(
            "POST", "/py_native_call", func_name="halves", parameters=parameters, **body
        )
        [(_, head), (_, tail)] = ids_of(call)
        good(await client.set(source, "loud"))
        values = [good(await client.get(each))["content"] for each in (result, head, tail)]
        assert values == ["LOUD", "ab", "cd"]


async def test_byte_code_is_never_executed(client: ParrotClient) -> None:
    body: dict[str, Any] = {"session_id": client.session, "func_code": NOT_CODE}
    refused = await client.ask(
        "POST", "/py_native_call", func_name="f", parameters=[written("a")], **body
    )
    check_error(refused, 400, "executes no code from clients")
    assert "--functions" in refused.json()["error"]
    no_output = await client.ask("POST", "/py_native_call", func_name="f", parameters=[], **body)
    check_error(no_output, 400, "no output")


async def test_a_failed_call_answers_its_readers(tmp_path: Path) -> None:
    def broken() -> str:
        raise ValueError("secret")

    async with parrot(tmp_path, functions={"broken": broken}) as client:
        await client.open()
        body = {"session_id": client.session, "func_name": "broken", "parameters": [written("a")]}
        [(_, a)] = ids_of(await client.ask("POST", "/py_native_call", **body))
        failed = await client.get(a)
        check_error(failed, 424, "raised ValueError")
        assert "secret" not in failed.text


async def test_many_calls_run_at_once(client: ParrotClient) -> None:
    async def one(i: int) -> str:
        call = await client.call("{{a}}: {{b}}", given("a", value=str(i)), written("b"))
        [_, (_, b)] = ids_of(call)
        content: str = good(await client.get(b))["content"]
        return content

    contents = await asyncio.gather(*map(one, range(20)))
    assert contents == [answer(f"{i}: ") for i in range(20)]
