"""What the server says about a model."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from conure.engine.core.engine import EngineCore
from conure.engine.protocol import Hello, ModelPurpose
from conure.engine.testing.scripted_runner import FakeRunner
from conure.server.program.errors import ProgramError, PromptError
from conure.server.program.ir import GenerateNode
from conure.server.prompts.model_notices import UNTRAINED_TOOLS
from conure.server.prompts.served_model import MAX_EXCESS_TOKENS, ServedModel
from conure.server.prompts.tokenizer import PromptPiece

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object"}},
}


def hello(**changes: Any) -> Hello:
    return msgspec.structs.replace(EngineCore(FakeRunner(), 1).hello(), **changes)


def asking(*tools: dict[str, Any]) -> GenerateNode:
    """Return a call that offers tools."""
    content = {
        "op": "generate",
        "id": "ask",
        "messages": [{"role": "user", "content": "Is it raining?"}],
        "tools": list(tools),
        "output": {"variable": "answer", "as": "message"},
    }
    return msgspec.convert(content, GenerateNode)


def test_a_token_that_only_the_tokenizer_has_is_refused() -> None:
    model = ServedModel.of(hello(num_ids=200))
    model.check_id(199, "prompt")
    with pytest.raises(ProgramError, match="does not have token 200; its ids are below 200"):
        model.check_id(200, "prompt")


@pytest.mark.parametrize("template", ["", "{{ messages }}"])
def test_a_model_without_a_chat_template_is_known_as_such(template: str) -> None:
    assert ServedModel.of(hello(chat_template=template)).template.is_defined == bool(template)


@pytest.mark.parametrize(
    ("purpose", "num_logged"), [("demonstration", 1), ("general", 0), ("test", 0)]
)
def test_tools_of_the_built_in_model_are_logged_once(
    purpose: ModelPurpose, num_logged: int, caplog: pytest.LogCaptureFixture
) -> None:
    capabilities = [*hello().capabilities, "constraints"]
    model = ServedModel.of(hello(purpose=purpose, capabilities=capabilities))
    with caplog.at_level(logging.WARNING):
        model.check(asking(), "nodes[0]")
        assert not caplog.records
        for _ in range(2):
            model.check(asking(TOOL), "nodes[0]")
    assert [UNTRAINED_TOOLS in record.getMessage() for record in caplog.records] == (
        [True] * num_logged
    )


def test_tokens_far_beyond_the_limit_are_not_counted() -> None:
    model = ServedModel.of(hello())
    limit = model.max_len
    counted = PromptPiece("a" * (limit + MAX_EXCESS_TOKENS), special=False)
    assert len(model.encode(asking(), 0, [counted]).ids) == limit + MAX_EXCESS_TOKENS
    longer = PromptPiece("a" * (limit + MAX_EXCESS_TOKENS + 1), special=False)
    with pytest.raises(
        PromptError, match=rf"node ask: more than .* the limit of {limit} tokens"
    ) as refused:
        model.encode(asking(), 0, [longer])
    assert refused.value.code == "prompt.too_long"
    with pytest.raises(PromptError, match=r"the text: more than .* prompt tokens"):
        model.tokenize(
            "a" * (limit + MAX_EXCESS_TOKENS + 1), tools=[], bos=False, template_options={}
        )


def test_a_model_has_the_names_of_its_engine() -> None:
    model = ServedModel.of(hello(model="name", aliases=("owner/name",)))
    assert [*map(model.serves, ("name", "owner/name", "default", "other/name"))] == [
        True,
        True,
        True,
        False,
    ]
