"""The essay's claims: the same values as single calls, and parallel features for one context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ...inprocess import server_harness
from ...stepped_engine import SteppedEngine, install
from .. import essay

ENGINES: dict[str, dict[str, Any]] = {
    "fake": {},
    "real": {"engine": "local", "model": "seeded", "dtype": "float32", "threads": 1},
}
NUM_FEATURES = 4
LENGTH = 40
CONTEXT = "Tea is a drink. " * 20
OPTIONS = "ignore_eos=True, temperature=0"
FEATURES = f"context = [user({CONTEXT!r})]\n" + "".join(
    f"with job():\n    f{number} = llm_chat(context + [system('Feature {number}?')], "
    f"max_tokens={LENGTH}, {OPTIONS})['content']\n    yield f{number}\n"
    for number in range(NUM_FEATURES)
)
STREAM = (
    f"all = llm_chat([user({CONTEXT!r}), system('Features?')], "
    f"max_tokens={NUM_FEATURES * LENGTH}, {OPTIONS})['content']\nyield all"
)


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize(
    "source", [essay.CRITIC, essay.FEATURES.replace("RESULT", "result")], ids=["critic", "features"]
)
async def test_single_calls_give_the_values_of_the_program(
    tmp_path: Path, kind: str, source: str
) -> None:
    async def rag(model: str, messages: list[Any]) -> dict[str, str]:
        return {"context": "found"}

    async with server_harness(tmp_path, {"rag": rag}, **ENGINES[kind]) as harness:
        program = await harness.submit_source(essay.bounded(source, 12), trace=True)
        status = await program.end()
        assert status.status == "done", status.error
        calls = await program.traced_calls()
        assert len(calls) >= 2
        for call in calls:
            node = {"id": "one", "op": "generate", "messages": call.messages}
            output = {"variable": "value", "as": "text", **call.parameters}
            single = await harness.submit([{**node, "output": output}], outputs=["value"])
            value = await single.value("value")
            await single.end()
            assert value == status.variables[call.variable].value or value == call.text


async def test_parallel_features_take_a_quarter_of_the_steps_and_compute_their_context_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, is_late=False)
    async with server_harness(tmp_path, block_size=1) as harness:
        (engine,) = harness.executor.services.engines.values()
        assert isinstance(engine, SteppedEngine)
        program = await harness.submit_source(FEATURES, trace=True)
        receipt = (await program.end()).receipt
        num_parallel = len(engine.steps)
        single = await harness.submit_source(STREAM)
        await single.end()
        assert num_parallel < (len(engine.steps) - num_parallel) / NUM_FEATURES * 1.25
        assert receipt
        assert receipt.output_tokens.decoded == NUM_FEATURES * LENGTH
        prompts = [call.prompt_ids for call in await program.traced_calls()]
        read = {tuple(ids[: end + 1]) for ids in prompts for end in range(len(ids))}
        assert receipt.prompt_tokens.computed == len(read)
        assert sum(map(len, prompts)) > 3 * len(read)
