"""The configs that the engine reads without transformers."""

from __future__ import annotations

from typing import Any

import pytest

from conure.engine.models import llama_config
from conure.engine.models.llama_config import LlamaConfig

MINIMAL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
"""As published: without settings whose default every family shares."""
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(**changes: Any) -> LlamaConfig | None:
    config = {**MINIMAL, **changes}
    return llama_config.read({name: each for name, each in config.items() if each is not ...})


def test_size_of_heads_follows_from_their_number() -> None:
    found = read()
    assert found is not None
    assert found.head_dim == 32
    assert found.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert found.architecture == "LlamaForCausalLM"


def test_both_forms_of_rotary_settings_are_equal() -> None:
    old = read(rope_scaling=LLAMA3)
    new = read(rope_theta=..., rope_parameters={**LLAMA3, "rope_theta": 10000.0})
    assert old is not None
    assert old == new


@pytest.mark.parametrize("window", [9, None])
def test_mistral_has_a_window_in_every_layer(window: int | None) -> None:
    found = read(model_type="mistral", sliding_window=window)
    assert found is not None
    assert found.sliding_window == window


def test_window_of_qwen_is_off() -> None:
    found = read(model_type="qwen2", use_sliding_window=False, sliding_window=9)
    assert found is not None
    assert found.sliding_window is None


@pytest.mark.parametrize(
    "changes",
    [
        {"_name_or_path": "owner/model", "torch_dtype": "bfloat16", "use_cache": True},
        {"transformers.js_config": {"dtype": "q4"}, "rope_interleaved": False},
        {"auto_map": {"AutoModelForCausalLM": "modeling.Own"}},
        {"rope_scaling": None, "rope_theta": 1000000, "pretraining_tp": 1, "mlp_bias": False},
        {"model_type": "qwen2", "max_window_layers": 21, "sliding_window": 32768},
    ],
    ids=str,
)
def test_settings_of_published_models_are_known(changes: dict[str, Any]) -> None:
    assert read(**changes) is not None


@pytest.mark.parametrize("name", sorted(MINIMAL))
def test_missing_setting_is_left_to_transformers(name: str) -> None:
    assert read(**{name: ...}) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "gemma2"},
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"rope_interleaved": True},
        {"pretraining_tp": 2},
        {"num_key_value_heads": 3},
        {"hidden_size": 130},
        {"head_dim": 31},
        {"num_hidden_layers": 0},
        {"vocab_size": 1024.5},
        {"vocab_size": "1024"},
        {"rms_norm_eps": 0},
        {"tie_word_embeddings": None},
        {"quantization_config": {}},
        {"partial_rotary_factor": 0.5},
        {"sliding_window": 9, "model_type": "qwen2", "use_sliding_window": True},
        {"layer_types": ["sliding_attention"]},
        {"model_type": "mistral"},
        {"model_type": "qwen3"},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "linear"}},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {"rope_scaling": {**LLAMA3, "partial_rotary_factor": 0.5}},
        {"rope_scaling": {**LLAMA3, "low_freq_factor": None}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {"text_config": {}},
    ],
    ids=str,
)
def test_other_setting_is_left_to_transformers(changes: dict[str, Any]) -> None:
    assert read(**changes) is None
