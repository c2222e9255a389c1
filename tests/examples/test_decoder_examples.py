"""The examples in the decoder language run, on the fake engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from conure.server.config import Config
from conure.server.executor import Executor
from conure.server.program.ir import SourceSubmission

FOLDER = Path(__file__).parents[2] / "examples" / "decoder"
EXAMPLES = {
    "critic": ({"question": "Is tea healthy?"}, {"answer", "critic", "copilot"}),
    "features": ({"article": "Tea is old. " * 20}, {"tone", "topic", "report"}),
    "speculation": ({"question": "Where is it?"}, {"found", "final"}),
    "react": ({"question": "What is 2 + 2?"}, {"turn", "answer"}),
}


def test_every_example_is_tested() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == EXAMPLES.keys()


@pytest.mark.parametrize("name", EXAMPLES)
async def test_an_example_ends_with_its_results(name: str, tmp_path: Path) -> None:
    inputs, expected = EXAMPLES[name]
    executor = Executor(Config(data=tmp_path, engine="fake"))
    await executor.start()
    try:
        source = SourceSubmission(
            source=(FOLDER / f"{name}.decoder").read_text("utf-8"), inputs=inputs
        )
        submission, body = await executor.compile(source)
        accepted, _ = await executor.submit(submission, body=body, tenant="t")
        async with asyncio.timeout(60):
            events = [each async for each in executor.events(accepted.id, tenant="t", after=0)]
        values = [each.data["value"] for each in events if each.type == "yield"]
        assert expected <= {key for value in values for key in value}
        assert (await executor.status(accepted.id, tenant="t")).status == "done"
    finally:
        await executor.stop()
