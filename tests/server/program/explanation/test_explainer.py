"""Explanations of programs whose prompts are long."""

from __future__ import annotations

from pathlib import Path

import msgspec

from conure.server.explainer import COUNTED_CHARS
from conure.server.program.ir import Submission

from ...inprocess import server_harness


async def test_tokens_of_a_long_prompt_are_counted_in_parts(tmp_path: Path) -> None:
    text = "a" * (2 * COUNTED_CHARS + 1)
    prompt = [{"text": text}, {"input": "later"}, {"output": "o", "max_tokens": 1}]
    call = {"id": "c", "op": "generate", "prompt": prompt}
    body = msgspec.json.encode({"program": {"variables": {"later": {}}, "nodes": [call]}})
    submission = msgspec.json.decode(body, type=Submission)
    async with server_harness(tmp_path) as harness:
        explanation = await harness.executor.explainer.explain(submission, body=body, tenant="t")
    (node,) = explanation.nodes
    assert node.prompt
    assert node.prompt.tokens == len(text)
