"""What a trial learns of a loaded model, and which models it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from conure.engine import architecture, trial
from conure.engine.api import EngineError

from . import shrunk
from .families import changes


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


def test_layers_that_mix_neighbours_are_refused() -> None:
    model = small("llama")
    mlp = model.model.layers[1].mlp
    inner = mlp.forward
    # As a convolution would: every token sees a bit of the one packed before it.
    mlp.forward = lambda hidden_states: inner(hidden_states + 0.3 * hidden_states.roll(1, 1))
    with pytest.raises(EngineError, match="more than keys and values"):
        trial.probe(model, "it")


def test_positions_that_are_counted_instead_of_taken_are_refused() -> None:
    model = small("llama")
    inner = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda hidden_states, position_ids: inner(
        hidden_states, position_ids=torch.arange(position_ids.shape[1])[None]
    )
    with pytest.raises(EngineError, match="more than keys and values"):
        trial.probe(model, "it")


def test_attention_that_the_hook_does_not_see_whole_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.models.llama import modeling_llama

    inner = modeling_llama.eager_attention_forward

    def biased(module: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        out, weights = inner(module, query * 1.5, *args, **kwargs)
        return out, weights

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", biased)
    model = small("llama")
    shrunk.widen(model)
    with pytest.raises(EngineError, match="something else than by itself"):
        trial.probe(model, "it")


@pytest.mark.parametrize("name", ["indices", "position_bias"])
def test_an_argument_that_no_kernel_knows_is_refused(name: str) -> None:
    model = small("llama")
    for layer in model.model.layers:
        inner = layer.self_attn.forward
        layer.self_attn.forward = lambda *args, inner=inner, **kwargs: inner(
            *args, **kwargs, **{name: torch.ones(1)}
        )
    with pytest.raises(EngineError, match=f"takes '{name}'"):
        trial.probe(model, "it")


@pytest.mark.parametrize("seed", range(3))
def test_a_router_that_rounds_to_another_expert_is_no_reason_to_refuse(seed: int) -> None:
    model = small(
        "mixtral", num_local_experts=8, num_experts_per_tok=2, dtype=torch.bfloat16
    ).bfloat16()
    shrunk.widen(model, seed)
    assert len(trial.probe(model, "it")) == 3


def test_layers_that_read_earlier_ones_are_found() -> None:
    layers = trial.probe(small("gemma4_text", **changes("gemma4_text")), "it")
    assert [layer.source for layer in layers] == [0, 1, 0, 1]
    assert [layer.key_dim for layer in layers] == [16, 32, 16, 32]
