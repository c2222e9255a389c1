"""Which configs and models the local runner refuses, and what the probe learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from conure.engine import architecture
from conure.engine.api import EngineError

from . import shrunk


def small(family: str, **changes: Any) -> Any:
    architecture.register()
    config = AutoConfig.for_model(family, **{**shrunk.SMALL, **changes})
    model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]  # theirs
        config, attn_implementation=architecture.ATTENTION
    )
    return model.eval()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3"])
def test_ordinary_decoders_pass_the_first_gate(family: str) -> None:
    found = architecture.model_class(AutoConfig.for_model(family), family)
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
        ("gemma3n_text", {}, "share keys"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rotary"),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, "quantised"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_with_its_reason(
    family: str, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(EngineError, match=why) as refused:
        architecture.model_class(AutoConfig.for_model(family, **changes), "the/folder")
    assert refused.value.code == "model.unsupported"
    assert "the/folder" in refused.value.message


def test_the_probe_gives_the_shape_and_window_of_every_layer() -> None:
    layers = architecture.probe(small("gemma2", sliding_window=9), "it")
    assert [(one.kv_heads, one.key_dim, one.value_dim) for one in layers] == [(2, 16, 16)] * 3
    assert [one.window for one in layers] == [9, None, 9]


def test_a_window_that_only_a_mask_would_know_is_refused() -> None:
    with pytest.raises(EngineError, match="mask only"):
        architecture.probe(small("llama", sliding_window=9), "it")


def test_layers_that_bypass_the_hook_are_refused() -> None:
    model = small("llama")
    model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (
        torch.zeros_like(hidden_states),
        None,
    )
    with pytest.raises(EngineError, match="2 of its 3 layers"):
        architecture.probe(model, "it")


def test_layers_under_one_number_are_refused() -> None:
    model = small("llama")
    model.model.layers[1].self_attn.layer_idx = 0
    with pytest.raises(EngineError, match="told apart"):
        architecture.probe(model, "it")


def test_layers_that_look_ahead_are_refused() -> None:
    model = small("llama")
    model.model.layers[2].self_attn.is_causal = False
    with pytest.raises(EngineError, match="later tokens"):
        architecture.probe(model, "it")


def test_a_model_that_fails_on_a_trial_is_refused_with_its_error() -> None:
    model = small("llama")
    model.model.layers[0].mlp.down_proj.weight.data = torch.zeros(3, 3)
    with pytest.raises(EngineError, match="trial of three tokens failed"):
        architecture.probe(model, "it")
