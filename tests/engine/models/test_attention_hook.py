"""Which configs the local runner refuses, and how long its contexts may be."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from conure.engine.models import attention_hook, context_length
from conure.engine.protocol import EngineError


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3"])
def test_ordinary_decoders_are_accepted(family: str) -> None:
    found = attention_hook.model_class(AutoConfig.for_model(family), family)
    assert found.__name__.endswith("ForCausalLM")


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("t5", {}, "no decoder"),
        ("gemma3", {}, "text-only"),
        ("mamba", {}, "recurrent state"),
        ("qwen3_next", {}, "recurrent state"),
        ("bloom", {}, "AttentionInterface"),
        ("minimax", {}, "linear_attention"),
        ("llama4_text", {"layer_types": None}, "chunked"),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, "quantised"),
    ],
)
def test_unsupported_configs_are_rejected_with_reason(
    family: str, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(EngineError, match=why) as refused:
        attention_hook.model_class(AutoConfig.for_model(family, **changes), "the/folder")
    assert refused.value.code == "model.unsupported"
    assert "the/folder" in refused.value.message


YARN: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_scaling": {**YARN, "type": "yarn"}}, 131072),
        ({"rope_scaling": {**YARN, "rope_type": "yarn"}}, 131072),
        ({"rope_parameters": {**YARN, "rope_type": "yarn", "rope_theta": 1e6}}, 131072),
        (
            {"rope_scaling": {**YARN, "type": "yarn"}, "max_position_embeddings": 163840},
            163840,
        ),
        ({"rope_scaling": {"factor": 4.0, "type": "linear"}}, 32768),
    ],
)
def test_yarn_lengthens_the_context(changes: dict[str, Any], expected: int) -> None:
    config = AutoConfig.for_model("qwen2", **{"max_position_embeddings": 32768, **changes})
    longest, reason = context_length.max_length(config)
    assert longest == expected
    assert reason == f"the model supports {expected} tokens"


@pytest.mark.parametrize(
    ("family", "changes", "expected", "why"),
    [
        ("llama", {}, 2048, "the model supports"),
        ("gpt2", {}, 1024, "the model supports"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            2048,
            "dynamic rotary embedding",
        ),
        (
            "phi3",
            {
                "max_position_embeddings": 512,
                "original_max_position_embeddings": 128,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 48,
                    "long_factor": [4.0] * 48,
                },
            },
            128,
            "longrope rotary embedding",
        ),
    ],
)
def test_rotary_embedding_limits_the_context(
    family: str, changes: dict[str, Any], expected: int, why: str
) -> None:
    longest, reason = context_length.max_length(AutoConfig.for_model(family, **changes))
    assert longest == expected
    assert why in reason
    assert str(expected) in reason
