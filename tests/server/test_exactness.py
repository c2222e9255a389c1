"""Sharing never changes an output, and the receipt accounts for it: tests with a real model.

The seeded random model runs in the whole server, and transformers runs the same weights on the
same prompt ids, one call at a time, without sharing. In float32 and greedy, both must give the
same ids. Where they differ, the reference's two best logits must be within 1e-4 of each other;
after that, the reference predicts each token from the server's own prefix.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
import transformers

from conure.engine.protocol import StatusReport
from conure.engine.testing import random_model
from conure.server.program.status import ProgramStatus, Receipt
from conure.server.runtime.calls.prefix_registry import common_prefix_len
from conure.server.runtime.reporting.trace_records import TracedCall

from .inprocess import Program, ServerHarness, client, insert, server_harness, var

pytestmark = pytest.mark.asyncio(loop_scope="module")

MAX_TOKENS = 16
BLOCK = 16
TIE = 1e-4
GREEDY = {"max_tokens": MAX_TOKENS, "temperature": 0}

TEXT = """\
It was a bright cold day, and the clocks of the harbour were striking one after another. \
A boy with a blue cap ran along the quay, looking for the ship that was to leave at noon. \
Nobody had seen her come in, nobody knew her master, and the harbour book was silent too. """
CHUNKS = [f"{i}. {TEXT[7 * i :]}{TEXT[: 7 * i]}" for i in range(8)]


class Reference:
    """The reference: transformers alone."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            random_model.create_cached(), dtype=torch.float32
        )
        self._model = loaded.eval()
        self._eos = set(loaded.generation_config.eos_token_id)
        self._known: dict[tuple[int, ...], list[int]] = {}
        self.num_checked = 0
        self.num_ties = 0

    def check(self, trace: TracedCall) -> None:
        """Check that the server's ids are those of `generate`, except after ties."""
        expected = self._generate(trace.prompt_ids)
        self.num_checked += 1
        if trace.output_ids != expected:
            self._check_ties(trace.prompt_ids, trace.output_ids)

    def _generate(self, prompt: list[int]) -> list[int]:
        key = tuple(prompt)
        if key not in self._known:
            ids = torch.tensor([prompt])
            with torch.inference_mode():
                whole = self._model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    max_new_tokens=MAX_TOKENS,
                )
            output = whole[0, len(prompt) :].tolist()
            end = next((i for i, token in enumerate(output) if token in self._eos), len(output))
            self._known[key] = output[:end]
        return self._known[key]

    def _check_ties(self, prompt: list[int], output: list[int]) -> None:
        with torch.inference_mode():
            logits = self._model(torch.tensor([prompt + output])).logits[0]
        for i, token in enumerate(output):
            best = logits[len(prompt) - 1 + i].topk(2)
            if token == best.indices[0]:
                continue
            gap = float(best.values[0] - best.values[1])
            assert token == best.indices[1], f"output {i} is {token}, not {best.indices.tolist()}"
            assert gap < TIE, f"output {i} is {token}, the second best by {gap}"
            self.num_ties += 1


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def harness(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServerHarness]:
    data: Path = tmp_path_factory.mktemp("exactness")
    async with server_harness(
        data, engine="local", model="seeded", dtype="float32", threads=1, max_wait_s=0
    ) as harness:
        yield harness


def message(role: str, *parts: Any) -> dict[str, Any]:
    content = [{"text": part} if isinstance(part, str) else part for part in parts]
    return {"role": role, "content": content}


def chat(node: str, *messages: Any, **output: Any) -> dict[str, Any]:
    return {
        "id": node,
        "op": "generate",
        "messages": list(messages),
        "output": {"variable": node, **GREEDY, **output},
    }


INSTRUCTION = message("system", "Sum up the part of a story that you are given, in a few words.")
MAP_REDUCE = [
    *(
        chat(f"map{i}", INSTRUCTION, message("user", "The part: ", insert(f"chunk{i}")))
        for i in range(len(CHUNKS))
    ),
    chat(
        "reduce",
        message("system", "Join these."),
        message("user", *(part for i in range(8) for part in (insert(f"map{i}"), "\n"))),
    ),
]
INPUTS = {f"chunk{i}": chunk for i, chunk in enumerate(CHUNKS)}


async def end(program: Program) -> tuple[ProgramStatus, list[TracedCall]]:
    """Wait for the end of a program; return its status and its calls."""
    status = await program.end()
    assert status.status == "done", status.error
    return status, await program.traced_calls()


async def counters(harness: ServerHarness) -> StatusReport:
    [info] = await harness.executor.engines()
    assert (info.report.num_held, info.report.num_contexts) == (0, 0)
    return info.report


def check_counters(
    before: StatusReport,
    after: StatusReport,
    ended: Sequence[tuple[ProgramStatus, list[TracedCall]]],
) -> list[Receipt]:
    """Check that the receipts account for all work of the engine.

    The engine's `num_computed_tokens` counts prompt tokens that the model computed for the
    first time, and `num_decoded_tokens` the ids that it sampled (EOS included); the input token
    of a decode step counts in neither. So both are sums over receipts.
    """
    receipts = [status.receipt for status, _ in ended if status.receipt]
    assert len(receipts) == len(ended)
    prompt = [receipt.prompt_tokens for receipt in receipts]
    computed = after.num_computed_tokens - before.num_computed_tokens
    assert sum(tokens.computed for tokens in prompt) == computed
    recomputed = after.num_recomputed_tokens - before.num_recomputed_tokens
    assert sum(tokens.recomputed for tokens in prompt) == recomputed
    decoded = after.num_decoded_tokens - before.num_decoded_tokens
    assert sum(receipt.output_tokens.decoded for receipt in receipts) == decoded
    for (_, traces), tokens in zip(ended, prompt, strict=True):
        assert tokens.logical == sum(len(trace.prompt_ids) for trace in traces)
    return receipts


@pytest.mark.parametrize("copies", [1, 4, 16])
async def test_map_reduce_matches_transformers_ids(
    harness: ServerHarness, reference: Reference, copies: int
) -> None:
    before = await counters(harness)
    # Tenants share nothing; concurrent programs of one tenant share KV.
    tenants = [ServerHarness(harness.executor, f"{copies}.{i % 4}") for i in range(copies)]
    programs = await asyncio.gather(
        *(own.submit(MAP_REDUCE, inputs=INPUTS, outputs=["reduce"], trace=True) for own in tenants)
    )
    ended = await asyncio.gather(*map(end, programs))
    for _, traces in ended:
        assert len(traces) == 9
        for trace in traces:
            reference.check(trace)
    assert reference.num_ties < reference.num_checked / 10
    receipts = check_counters(before, await counters(harness), ended)
    maps = [t.prompt_ids for t in ended[0][1] if t.variable != "reduce"]
    common = min(common_prefix_len(maps[0], other) for other in maps[1:])
    common -= common % BLOCK
    assert common >= 3 * BLOCK
    tokens = receipts[0].prompt_tokens
    assert tokens.computed + tokens.shared.cache <= tokens.logical - 7 * common
    if copies == 1:
        # The model computed the instruction once, for all eight.
        assert tokens.computed == tokens.logical - 7 * common
        assert (tokens.shared.static, tokens.shared.generated) == (7 * common, 0)
    if copies == 16:
        # Text of the program was computed once per tenant.
        computed = sum(receipt.prompt_tokens.computed for receipt in receipts)
        assert computed <= 16 * (tokens.logical - 7 * common) - 12 * common


async def test_generated_tokens_are_not_prefilled_again(
    harness: ServerHarness, reference: Reference
) -> None:
    ask = message("user", "Tell me about the harbour and the boy with the blue cap, please.")
    nodes = [
        chat("first", ask, **{"as": "message"}),
        *(
            chat(name, ask, {"splice": "first"}, message("user", f"And now {name}."))
            for name in ("more", "less")
        ),
        {
            "id": "grow",
            "op": "generate",
            "prompt": [
                {"text": "Once upon a time there was "},
                {"output": "who", **GREEDY},
                {"text": " who went to "},
                {"input": "place"},
                {"text": " to find "},
                {"output": "what", **GREEDY},
            ],
        },
        client("where", "place", args={"who": var("who")}),
    ]
    before = await counters(harness)
    program = await harness.submit(nodes, outputs=["more", "less", "what"], trace=True)
    await program.event("client.requested")
    await program.put("place", "the sea")
    status, traces = await end(program)
    found = {trace.variable: trace for trace in traces}
    for trace in found.values():
        reference.check(trace)
    [receipt] = check_counters(before, await counters(harness), [(status, traces)])
    first, who = found["first"], found["who"]
    for name in ("more", "less"):
        kept = first.prompt_ids + first.output_ids
        assert found[name].prompt_ids[: len(kept)] == kept
        node = status.nodes[name]
        assert node.prompt_tokens
        # The last generated token has no KV until it is filled.
        assert node.prompt_tokens.shared >= len(kept) - 1
    kept = who.prompt_ids + who.output_ids
    assert found["what"].prompt_ids[: len(kept)] == kept
    shared = receipt.prompt_tokens.shared
    written = 2 * (len(first.output_ids) - 1) + len(who.output_ids)
    assert written <= shared.generated <= written + 2
    assert receipt.retokenized == 0
