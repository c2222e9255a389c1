"""The export of traces: what is recorded, when, and the content of the spans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conure.adapters.training import training_examples
from conure.server.program.errors import ConflictError, NotFoundError
from conure.server.runtime.quota import QuotaLimits

from ...inprocess import (
    Program,
    ServerHarness,
    answer,
    call,
    client,
    generate,
    insert,
    server_harness,
    var,
)

ASK = {
    "id": "ask",
    "op": "generate",
    "messages": [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"text": "What is "}, {"input": "topic"}]},
    ],
    "output": {"variable": "reply", "max_tokens": 64, "temperature": 0.5, "as": "message"},
}


async def spans(harness: ServerHarness, program: str, *, token_ids: bool = False) -> list[Any]:
    exporter = harness.executor.traces
    lines = await exporter.export(program, tenant=harness.tenant, token_ids=token_ids)
    return [json.loads(line) async for line in lines]


async def test_chat_call_becomes_a_span_of_openinference(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit(
            [ASK], inputs={"topic": "tea"}, outputs=["reply"], trace=True, session="s1"
        )
        status = await program.end()
        reply = await program.value("reply")
        root, span = await spans(harness, program.id)
        assert root["parent_id"] is None
        assert root["attributes"]["openinference.span.kind"] == "CHAIN"
        assert json.loads(root["attributes"]["input.value"]) == {"topic": "tea"}
        assert json.loads(root["attributes"]["output.value"]) == {"reply": reply}
        assert root["attributes"]["session.id"] == "s1"
        assert (root["start_time"], root["end_time"]) == (status.created_at, status.finished_at)
        assert span["parent_id"] == root["context"]["span_id"]
        assert span["context"]["trace_id"] == root["context"]["trace_id"]
        assert (span["name"], span["status_code"]) == ("ask", "OK")
        assert root["start_time"] <= span["start_time"] <= span["end_time"] <= root["end_time"]
        found = span["attributes"]
        assert found["openinference.span.kind"] == "LLM"
        assert found["llm.input_messages.0.message.role"] == "system"
        assert found["llm.input_messages.1.message.content"] == "What is tea"
        assert found["llm.output_messages.0.message.content"] == reply["content"]
        assert found["llm.token_count.prompt"] == reply["usage"]["prompt_tokens"]
        assert found["llm.finish_reason"] == reply["finish_reason"]
        parameters = json.loads(found["llm.invocation_parameters"])
        assert (parameters["temperature"], parameters["max_tokens"]) == (0.5, 64)
        assert not any("token_ids" in name for name in found)


async def test_token_ids_are_those_that_the_engine_read_and_wrote(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        nodes = [generate("one", "Say ", insert("what"), ": ", stop=["e"])]
        nodes[0]["prompt"] += [{"text": " and "}, {"output": "two", "max_tokens": 4}]
        program = await harness.submit(
            nodes, inputs={"what": "hi"}, outputs=["one", "two"], trace=True
        )
        await program.end()
        _, *calls = await spans(harness, program.id, token_ids=True)
        text = "Say hi: "
        for span, variable in zip(calls, ("one", "two"), strict=True):
            found = span["attributes"]
            value = await program.value(variable)
            assert found["conure.variable"] == variable
            assert found["llm.prompts.0.prompt.text"] == text
            assert found["llm.choices.0.completion.text"] == value
            # The fake engine's tokens are bytes.
            assert bytes(found["conure.prompt_token_ids"]).decode() == text
            assert bytes(found["conure.output_token_ids"]).decode() == value
            text += f"{value} and "


async def test_program_without_the_option_has_no_trace(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([generate("one", "A ")], outputs=["one"])
        await program.end()
        with pytest.raises(ConflictError, match='"trace": true') as refused:
            await spans(harness, program.id)
        assert refused.value.code == "trace.not_recorded"
        journal = harness.executor.services.journal
        assert await journal.events(harness.tenant, program.id, is_trace=True) == []


async def test_trace_records_are_not_events(tmp_path: Path) -> None:
    kinds = {}
    for trace in (False, True):
        async with server_harness(tmp_path / str(trace)) as harness:
            program = await harness.submit([generate("one", "A ")], outputs=["one"], trace=trace)
            await program.end()
            kinds[trace] = [event.type for event in await program.events()]
            program_id = program.id
        # After a restart, the events come from the journal.
        async with server_harness(tmp_path / str(trace)) as harness:
            again = await Program(harness, program_id).events()
            assert [event.type for event in again] == kinds[trace]
    assert kinds[True] == kinds[False]


async def test_trace_survives_a_restart_in_the_middle(tmp_path: Path) -> None:
    nodes = [
        generate("one", "A "),
        client("look", "found", args={"text": var("one")}),
        generate("two", insert("one"), insert("found")),
    ]
    async with server_harness(tmp_path) as harness:
        program = await harness.submit(nodes, outputs=["two"], trace=True)
        await program.event("client.requested")
        root, *before = await spans(harness, program.id)
        assert (root["status_code"], root["end_time"]) == ("UNSET", None)
        assert [span["name"] for span in before] == ["one"]
    async with server_harness(tmp_path) as harness:
        program = Program(harness, program.id)
        await program.put("found", "B")
        await program.end()
        root, *after = await spans(harness, program.id)
        assert root["status_code"] == "OK"
        assert [span["name"] for span in after] == ["one", "step", "two"]
        assert after[0] == before[0]
        step = after[1]["attributes"]
        assert step["openinference.span.kind"] == "TOOL"
        assert json.loads(step["input.value"]) == {"text": answer("A ")}
        assert step["output.value"] == "B"


async def test_functions_are_tools(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        add = call("add", "calc", "sum", args={"expression": {"lit": "1 + 2"}})
        program = await harness.submit([add], outputs=["sum"], trace=True)
        await program.end()
        _, span = await spans(harness, program.id)
        assert (span["name"], span["attributes"]["output.value"]) == ("calc", "3")


async def test_failed_and_killed_calls_have_a_status(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        nodes = [
            generate("long", "A ", max_tokens=4_000, ignore_eos=True, job="slow"),
            generate("bad", "B ", max_tokens=2, constraint={"type": "int"}, on_error="isolate"),
            {"id": "stop", "op": "kill", "targets": ["long"], "after": ["bad"]},
        ]
        nodes[1]["prompt"][-1]["constraint"] = {"choices": ["long choice"]}
        nodes[1]["prompt"][-1]["as"] = "value"
        program = await harness.submit(
            nodes, outputs=["long"], trace=True, jobs={"slow": {"on_error": "isolate"}}
        )
        await program.end()
        _, *found = await spans(harness, program.id)
        by_name = {span["name"]: span for span in found}
        assert by_name.keys() <= {"long", "bad"}
        assert {span["status_code"] for span in found} == {"ERROR"}
        bad = by_name["bad"]["attributes"]
        assert bad["exception.type"] == "output.incomplete"
        assert bad["llm.choices.0.completion.text"] == "lo"
        assert len(found) == len(by_name), "a failed call has one span"


async def test_record_that_does_not_fit_is_marked(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        harness.executor.services.quota_limits = QuotaLimits(journal_bytes=20_000)
        program = await harness.submit([generate("one", "A " * 3_000)], outputs=["one"], trace=True)
        status = await program.end()
        assert status.status == "done"
        _, span = await spans(harness, program.id)
        assert span["status_code"] == "ERROR"
        assert span["attributes"]["exception.type"] == "quota.journal_bytes"


async def test_deleted_program_has_no_trace(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([generate("one", "A ")], outputs=["one"], trace=True)
        await program.end()
        await harness.executor.erase(program.id, tenant=harness.tenant)
        with pytest.raises(NotFoundError, match="keep-days"):
            await spans(harness, program.id)
        with pytest.raises(NotFoundError):
            await spans(ServerHarness(harness.executor, "other"), program.id)


async def test_damaged_trace_ends_with_an_error(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        nodes = [generate(f"n{number}", f"{number} ") for number in range(40)]
        program = await harness.submit(nodes, outputs=["n0"], trace=True)
        await program.end()
        journal = harness.executor.services.journal
        records = await journal.events(harness.tenant, program.id, limit=1_000, is_trace=True)
        journal._writer._connection.execute(
            "UPDATE event SET data = CAST('{}' AS BLOB) WHERE seq = ?", (records[30].seq,)
        )
        *readable, last = await spans(harness, program.id)
        assert last["error"]["code"] == "store.damaged"
        assert len(readable) < 41


async def test_complete_outputs_become_training_examples(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        nodes = [ASK, generate("whole", "A "), generate("cut", "B ", max_tokens=1)]
        program = await harness.submit(
            nodes, inputs={"topic": "tea"}, outputs=["reply", "whole"], trace=True
        )
        await program.end()
        found = await spans(harness, program.id, token_ids=True)
        examples = {next(iter(each)): each for each in training_examples(found)}
        chat, text = examples["messages"], examples["prompt"]
        assert [each["role"] for each in chat["messages"]] == ["system", "user", "assistant"]
        assert (text["prompt"], text["completion"]) == ("A ", answer("A "))
        assert bytes(text["completion_token_ids"]).decode() == text["completion"]
        assert len(examples) == len(list(training_examples(found))) == 2
