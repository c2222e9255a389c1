"""Programs of an accelerated chain that are cancelled, by another client or at its end."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableLambda

from conure.adapters.client import Client
from conure.adapters.langchain import ChatConure, accelerate
from conure.adapters.speculation import request_tasks, run
from conure.server.app import create_app
from conure.server.config import Config
from conure.server.program.errors import RunError

from ..shapes import TEXT, ask


def test_cancelled_program_ends_the_chain(tmp_path: Path, submitted: list[str]) -> None:
    config = Config(engine="fake", data=tmp_path, time_per_output_token=0.01)
    with Client(app=create_app(config)) as client:
        short = ChatConure(client=client, temperature=0, max_tokens=2, ignore_eos=True)
        long = short.model_copy(update={"max_tokens": 2_000})
        chunks = accelerate(ask("{x}") | short | TEXT | ask("{y}") | long).stream("tea")
        next(chunks)
        (program,) = submitted
        client.attach(program).cancel()
        with pytest.raises(RunError) as raised:
            list(chunks)
        assert raised.value.code == "program.cancelled"
        assert submitted == [program]


def test_a_call_that_timed_out_ends_before_the_chain(tmp_path: Path) -> None:
    config = Config(engine="fake", data=tmp_path, time_per_output_token=0.01)
    with Client(app=create_app(config)) as client:
        quick = ChatConure(client=client, temperature=0, max_tokens=2, ignore_eos=True)
        slow = quick.model_copy(update={"max_tokens": 500, "timeout": 0.1})
        phases: set[str] = set()

        def wait_for_end(answer: AIMessage) -> AIMessage:
            program = client.attach(answer.response_metadata["program"])
            while "running" in (now := {node.status for node in program.status().nodes.values()}):
                time.sleep(0.01)
            phases.update(now)
            return answer

        call = (ask("{x}") | slow).with_fallbacks([ask("{x}") | quick])
        fast = accelerate(call | RunnableLambda(wait_for_end) | ask("{y}") | quick)
        fast.invoke("tea")
        assert "killed" in phases


async def test_the_end_of_a_run_does_not_wait_for_a_busy_server(
    double: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_tasks, "SUBMISSION_TIMEOUT_S", 0.0)
    busy = kit.Answer(429, kit.problem(429, "queue.full", "busy"), {"Retry-After": "30"})
    double.on("POST", "/v1/programs", busy)
    with await asyncio.to_thread(lambda: Client(app=double)) as client:
        llm = ChatConure(client=client)
        fast = accelerate(ask("{x}") | llm | TEXT | ask("{y}") | llm)
        running = asyncio.create_task(fast.ainvoke("tea"))
        while not double.seen:  # noqa: ASYNC110 - the client has a thread of its own
            await asyncio.sleep(0.001)
        running.cancel()
        started_s = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert time.monotonic() - started_s < run.CANCEL_TIMEOUT_S / 2
    assert [seen.method for seen in double.seen] == ["POST", "DELETE"]
