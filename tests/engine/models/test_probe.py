"""What a trial determines of a loaded model, and which models it rejects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from conure.engine.models import attention_backend, attention_hook, checkpoint, probe, registry
from conure.engine.models.llama import LlamaLikeDecoder
from conure.engine.protocol import EngineError

from .. import shrunk
from ..families import changes


def small(family: str, **changes: Any) -> Any:
    attention_hook.register()
    config = AutoConfig.for_model(family, **{**shrunk.SMALL, **changes})
    model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]  # theirs
        config, attn_implementation=attention_backend.ATTENTION
    )
    return model.eval()


def test_probe_returns_shape_and_window_per_layer() -> None:
    layers = probe.probe(small("gemma2", sliding_window=9), "it")
    assert [(one.kv_heads, one.key_dim, one.value_dim) for one in layers] == [(2, 16, 16)] * 3
    assert [one.window for one in layers] == [9, None, 9]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_layers_of_our_decoders_equal_those_that_the_probe_finds(
    family: str, tmp_path: Path
) -> None:
    folder = shrunk.write(tmp_path, family, **shrunk.FAMILIES[family])
    source = checkpoint.read(folder)
    config = registry.read_config(source, is_dummy=False)
    ours = registry.load("it", source, config, "float32", "cpu", is_dummy=False).model
    assert isinstance(ours, LlamaLikeDecoder)
    theirs = small(family, **shrunk.FAMILIES[family])
    assert probe.probe(ours, "it") == probe.probe(theirs, "it")


def test_mask_only_window_is_rejected() -> None:
    with pytest.raises(EngineError, match="mask only"):
        probe.probe(small("llama", sliding_window=9), "it")


def test_layers_that_bypass_the_hook_are_rejected() -> None:
    model = small("llama")
    model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (
        torch.zeros_like(hidden_states),
        None,
    )
    with pytest.raises(EngineError, match="2 of its 3 layers"):
        probe.probe(model, "it")


def test_layers_with_equal_index_are_rejected() -> None:
    model = small("llama")
    model.model.layers[1].self_attn.layer_idx = 0
    with pytest.raises(EngineError, match="cannot be distinguished"):
        probe.probe(model, "it")


def test_layers_that_look_ahead_are_rejected() -> None:
    model = small("llama")
    model.model.layers[2].self_attn.is_causal = False
    with pytest.raises(EngineError, match="later tokens"):
        probe.probe(model, "it")


def test_failing_model_is_rejected_with_its_error() -> None:
    model = small("llama")
    model.model.layers[0].mlp.down_proj.weight.data = torch.zeros(3, 3)
    with pytest.raises(EngineError, match="running a few tokens failed"):
        probe.probe(model, "it")


def test_layers_that_mix_neighbours_are_rejected() -> None:
    model = small("llama")
    mlp = model.model.layers[1].mlp
    inner = mlp.forward
    # As in a convolution: every token depends on the token packed before it.
    mlp.forward = lambda hidden_states: inner(hidden_states + 0.3 * hidden_states.roll(1, 1))
    with pytest.raises(EngineError, match="more than keys and values"):
        probe.probe(model, "it")


def test_counted_positions_are_rejected() -> None:
    model = small("llama")
    inner = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda hidden_states, position_ids: inner(
        hidden_states, position_ids=torch.arange(position_ids.shape[1])[None]
    )
    with pytest.raises(EngineError, match="more than keys and values"):
        probe.probe(model, "it")


def test_attention_outside_the_hook_is_rejected(
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
    with pytest.raises(EngineError, match="differ between the hook and its own attention"):
        probe.probe(model, "it")


@pytest.mark.parametrize("name", ["indices", "position_bias"])
def test_unsupported_hook_argument_is_rejected(name: str) -> None:
    model = small("llama")
    for layer in model.model.layers:
        inner = layer.self_attn.forward
        layer.self_attn.forward = lambda *args, inner=inner, **kwargs: inner(
            *args, **kwargs, **{name: torch.ones(1)}
        )
    with pytest.raises(EngineError, match=f"needs '{name}'"):
        probe.probe(model, "it")


@pytest.mark.parametrize("seed", range(3))
def test_rounding_to_another_expert_is_accepted(seed: int) -> None:
    model = small(
        "mixtral", num_local_experts=8, num_experts_per_tok=2, dtype=torch.bfloat16
    ).bfloat16()
    shrunk.widen(model, seed)
    assert len(probe.probe(model, "it")) == 3


def test_shared_kv_layers_are_detected() -> None:
    layers = probe.probe(small("gemma4_text", **changes("gemma4_text")), "it")
    assert [layer.source for layer in layers] == [0, 1, 0, 1]
    assert [layer.key_dim for layer in layers] == [16, 32, 16, 32]
