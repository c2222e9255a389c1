"""What the essay's programs compute, step by step, on a fake and on a real engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conure.server.program.status import OutputTokens, ProgramStatus, Receipt

from ...inprocess import ServerHarness, server_harness
from ...stepped_engine import SteppedEngine, install
from .. import essay

ENGINES: dict[str, dict[str, Any]] = {
    "fake": {},
    "real": {"engine": "local", "device": "cpu", "threads": 1},
}

SPECULATION = (
    essay.SPECULATION.replace("'xxxx'", "''")
    .replace("QUESTION", "What is tea?")
    .replace(
        "default_result = llm_chat(model_name, message_list)",
        "default_result = llm_chat(model_name, message_list, max_tokens=200, ignore_eos=True)",
    )
    .replace("feature1_message_list)", "feature1_message_list, max_tokens=6, ignore_eos=True)")
    .replace("message_list2 )", "message_list2, max_tokens=6)")
)
"""Its decision is always a hit, while the default is being decoded."""


async def rag(model: str, messages: list[Any]) -> dict[str, str]:
    return {"context": "found"}


def engine_of(harness: ServerHarness) -> SteppedEngine:
    (engine,) = harness.executor.services.engines.values()
    assert isinstance(engine, SteppedEngine)
    return engine


def receipt_of(status: ProgramStatus) -> Receipt:
    assert isinstance(status.receipt, Receipt)
    return status.receipt


def prefixes(ids: list[int]) -> set[tuple[int, ...]]:
    """Return one entry for each token, which is equal only after the same tokens."""
    return {tuple(ids[: end + 1]) for end in range(len(ids))}


def output_of(status: ProgramStatus, node: str) -> OutputTokens:
    tokens = status.nodes[node].output_tokens
    assert isinstance(tokens, OutputTokens)
    return tokens


@pytest.mark.parametrize(("kind", "is_late"), [("fake", False), ("fake", True), ("real", False)])
async def test_a_killed_call_is_in_no_step_that_starts_two_steps_after_the_decision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, is_late: bool
) -> None:
    install(monkeypatch, is_late=is_late)
    async with server_harness(tmp_path, {"rag": rag}, **ENGINES[kind]) as harness:
        engine = engine_of(harness)
        decided: list[int] = []
        killed: list[int] = []

        def before_step() -> None:
            runs = list(harness.executor.programs)
            if not decided and any("branch.taken" in run.state.values for run in runs):
                decided.append(len(engine.steps))

        abort = engine.abort

        def recorded_abort(context: int, on_aborted: Any) -> None:
            killed.append(context)
            abort(context, on_aborted)

        engine.before_step = before_step
        monkeypatch.setattr(engine, "abort", recorded_abort)
        program = await harness.submit_source(SPECULATION)
        status = await program.end()
        assert status.status == "done", status.error
        (context,) = killed
        rows = [
            (number, row)
            for number, step in enumerate(engine.steps)
            for row in step
            if row.context == context
        ]
        last, _ = rows[-1]
        assert last < decided[0] + 2
        # Its prompt may take several steps. Every step after it decodes one token.
        num_decoding = sum(row.num_new == 1 for _, row in rows)
        output = output_of(status, "default_result")
        assert output.decoded == output.discarded
        assert num_decoding <= output.discarded <= num_decoding + 1
        assert receipt_of(status).output_tokens.discarded == output.discarded
        assert await harness.num_held() == [(0, 0)]


@pytest.mark.parametrize("kind", ENGINES)
async def test_critic_and_copilot_compute_every_token_of_their_prompts_once(
    tmp_path: Path, kind: str
) -> None:
    source = essay.bounded(essay.CRITIC.replace("HISTORY", "Tea is a drink. " * 20), 16)
    source = source.replace(
        "max_tokens=16, temperature", "max_tokens=16, ignore_eos=True, temperature"
    )
    settings: dict[str, Any] = ENGINES[kind] | (
        {"model": "seeded", "dtype": "float32"} if kind == "real" else {}
    )
    async with server_harness(tmp_path, block_size=1, **settings) as harness:
        program = await harness.submit_source(source, trace=True)
        status = await program.end()
        assert status.status == "done", status.error
        calls = await program.traced_calls()
        answer, *others = sorted(calls, key=lambda call: len(call.prompt_ids))
        assert answer.node == "answer_message"
        # Context, s2 and s3, each token once. The answer was computed while it was decoded, except
        # for its last token if no token was decoded after it.
        assert answer.finish_reason == "length"
        answer_ids = answer.prompt_ids + answer.output_ids[:-1]
        decoded = prefixes(answer_ids) - prefixes(answer.prompt_ids)
        read = prefixes(answer.prompt_ids).union(*(prefixes(each.prompt_ids) for each in others))
        assert decoded <= read
        tokens = receipt_of(status).prompt_tokens
        assert tokens.computed == len(read - decoded)
        assert receipt_of(status).blocks_held == 0
        assert (await harness.num_held())[0][1] == 0
