"""Nothing is lost silently: truncated texts, empty turns, and very large programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from conure.server.program.decoding.bodies import decode_submission
from conure.server.program.decoding.bounded_json import MAX_BODY_BYTES, MAX_ELEMENTS, check_bounds
from conure.server.program.errors import ProgramError, UnavailableError
from conure.server.runtime.admission import intake

from .inprocess import Program, client, generate, server_harness


def chat(splice: str) -> dict[str, Any]:
    return {
        "id": "n",
        "op": "generate",
        "messages": [{"splice": splice}],
        "output": {"variable": "x", "max_tokens": 2},
    }


async def test_a_text_cut_by_max_tokens_is_marked_everywhere(tmp_path: Path) -> None:
    nodes = [
        generate("a", "Count: ", writes="cut", max_tokens=2),
        {
            "id": "b",
            "op": "generate",
            "prompt": [{"text": "Pick: "}, {"output": "whole", "constraint": {"choices": ["A"]}}],
        },
    ]
    async with server_harness(tmp_path) as harness:
        program = await harness.submit(nodes, outputs=["cut", "whole"])
        status = await program.end()
        committed = {
            event.data["variable"]: event.data.get("truncated", False)
            for event in await program.events()
            if event.type == "variable.committed"
        }
        single = await program.get("cut")
    assert committed == {"cut": True, "whole": False}
    assert single.truncated
    assert status.variables["cut"].truncated
    assert not status.variables["whole"].truncated
    assert msgspec.to_builtins(status.receipt)["truncated"] == ["cut"]
    async with server_harness(tmp_path) as harness:  # from the journal
        stored = await harness.executor.status(program.id, tenant=harness.tenant)
    assert stored.variables["cut"].truncated
    assert not stored.variables["whole"].truncated


async def test_a_cut_text_stays_marked_when_the_server_restarts_before_the_end(
    tmp_path: Path,
) -> None:
    nodes = [generate("cut", "Count: ", max_tokens=2), client("ask", "x")]
    async with server_harness(tmp_path) as harness:
        program = await harness.submit(nodes, outputs=["cut", "x"])
        requested = await program.event("client.requested")
        await program.get("cut")
    async with server_harness(tmp_path) as harness:
        program = Program(harness, program.id)
        assert (await program.get("cut")).truncated
        await program.put("x", {"truncated": True}, requested.data["request_id"])
        status = await program.end()
    assert msgspec.to_builtins(status.receipt)["truncated"] == ["cut"]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user", "context": "Hello"}, "'context'"),
        ({"role": "user"}, "no `content`"),
        ({"role": "assistant", "content": None}, "no `content`"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "no `content`"),
    ],
)
async def test_a_spliced_message_without_content_is_refused(
    tmp_path: Path, message: dict[str, Any], words: str
) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([chat("m")], inputs={"m": message}, outputs=["x"])
        status = await program.end()
    assert status.error
    assert status.error.code == "prompt.splice"
    assert words in status.error.message


def test_a_written_message_without_content_is_refused() -> None:
    node = {**chat("m"), "messages": [{"role": "user"}]}
    body = msgspec.json.encode({"program": {"nodes": [node]}})
    with pytest.raises(ProgramError, match="empty turn"):
        decode_submission(body).program.nodes[0].make_slots()


async def test_a_program_of_a_million_words_is_accepted(tmp_path: Path) -> None:
    text = "word, " * 1_000_000
    body = msgspec.json.encode({"program": {"variables": {"t": {}}}, "inputs": {"t": text}})
    assert 4 * 1024 * 1024 < len(body) < MAX_BODY_BYTES
    nodes = [{"id": "size", "op": "expr", "expr": {"len": {"var": "t"}}, "output": "n"}]
    async with server_harness(tmp_path) as harness:
        program = await harness.submit(nodes, inputs={"t": text}, outputs=["n"])
        assert await program.value("n") == len(text)


def test_a_body_of_very_many_elements_is_refused() -> None:
    check_bounds(b"[" + b"0," * (MAX_ELEMENTS - 2) + b"0]")
    check_bounds(b'"' + b",[" * MAX_ELEMENTS + b'"')
    with pytest.raises(ProgramError) as caught:
        check_bounds(b"[" + b"{}," * MAX_ELEMENTS + b"0]")
    assert (caught.value.code, caught.value.status) == ("program.too_large", 413)


async def test_a_large_program_waits_until_live_programs_leave_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "LARGE_BODY_BYTES", 1_000)
    monkeypatch.setattr(intake, "MAX_LIVE_BYTES", 2_000)
    waiting = [{"id": "n", "op": "client", "name": "ask", "output": "x"}]
    async with server_harness(tmp_path) as harness:
        await harness.submit(waiting, inputs={"t": "x" * 1_200}, outputs=["x"])
        with pytest.raises(UnavailableError) as caught:
            await harness.submit(waiting, inputs={"t": "x" * 1_200}, outputs=["x"])
        await harness.submit([{"id": "n", "op": "expr", "expr": 1, "output": "x"}])
    assert (caught.value.code, caught.value.status) == ("queue.full", 429)
