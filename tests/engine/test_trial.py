"""What a trial learns of a loaded model, and which models it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from conure.engine import architecture, trial
from conure.engine.api import EngineError

from . import shrunk


def small(family: str, **changes: Any) -> Any:
    architecture.register()
    config = AutoConfig.for_model(family, **{**shrunk.SMALL, **changes})
    model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]  # theirs
        config, attn_implementation=architecture.ATTENTION
    )
    return model.eval()


def test_the_probe_gives_the_shape_and_window_of_every_layer() -> None:
    layers = trial.probe(small("gemma2", sliding_window=9), "it")
    assert [(one.kv_heads, one.key_dim, one.value_dim) for one in layers] == [(2, 16, 16)] * 3
    assert [one.window for one in layers] == [9, None, 9]


def test_a_window_that_only_a_mask_would_know_is_refused() -> None:
    with pytest.raises(EngineError, match="mask only"):
        trial.probe(small("llama", sliding_window=9), "it")


def test_layers_that_bypass_the_hook_are_refused() -> None:
    model = small("llama")
    model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (
        torch.zeros_like(hidden_states),
        None,
    )
    with pytest.raises(EngineError, match="2 of its 3 layers"):
        trial.probe(model, "it")


def test_layers_under_one_number_are_refused() -> None:
    model = small("llama")
    model.model.layers[1].self_attn.layer_idx = 0
    with pytest.raises(EngineError, match="told apart"):
        trial.probe(model, "it")


def test_layers_that_look_ahead_are_refused() -> None:
    model = small("llama")
    model.model.layers[2].self_attn.is_causal = False
    with pytest.raises(EngineError, match="later tokens"):
        trial.probe(model, "it")


def test_a_model_that_fails_on_a_trial_is_refused_with_its_error() -> None:
    model = small("llama")
    model.model.layers[0].mlp.down_proj.weight.data = torch.zeros(3, 3)
    with pytest.raises(EngineError, match="trial of a few tokens failed"):
        trial.probe(model, "it")
