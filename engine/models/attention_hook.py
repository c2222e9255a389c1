"""The attention hook of transformers, and the configs that can run through it.

`model_class` rejects configs before weights are read: classes that do not attend through
transformers' `AttentionInterface`, state-space and linear layers, and windows or chunks that exist
only in an attention mask. `probe` finds, on the loaded model, what a config does not show.
"""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    PretrainedConfig,
    PreTrainedModel,
)

from ..protocol import EngineError
from .attention_backend import ATTENTION, CURRENT

_LAYER_TYPES: Final = frozenset({"full_attention", "sliding_attention"})
_UNSUPPORTED_ARGUMENTS: Final = ("indices", "block_indices", "position_bias", "sinks")
"""Arguments of the hook that change the attention and that no kernel supports. Sinks are supported
as `s_aux`, which transformers passes to this hook."""


def register() -> None:
    """Register the hook with transformers under `ATTENTION`. May be called repeatedly.

    Without a mask function under the same name, transformers builds no masks.
    """
    AttentionInterface.register(ATTENTION, _hook)


def model_class(config: PretrainedConfig, name: str) -> type[PreTrainedModel]:
    """Return the model class of a decoder config.

    Raises:
        EngineError: `model.unsupported` if the runner cannot run it correctly, with the reason.
    """
    # The mapping is annotated with pairs, but contains classes.
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if found is None:
        reason = f"transformers has no decoder for model type {config.model_type!r}"
    else:
        reason = _unsupported(config, found)
    if reason:
        raise EngineError("model.unsupported", f"cannot run {name}: {reason}")
    chosen: type[PreTrainedModel] = found
    return chosen


def _hook(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """Forward one layer's attention to the current backend. Called by transformers."""
    del dropout  # used in training only
    for name in _UNSUPPORTED_ARGUMENTS:
        if extra.get(name) is not None:
            layer = type(module).__name__
            raise ValueError(f"the attention of {layer} needs {name!r}, which no kernel supports")
    out = CURRENT.get().attend(
        module,
        query,
        key,
        value,
        mask=attention_mask,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return out, None


def _unsupported(config: PretrainedConfig, model: type[PreTrainedModel]) -> str:
    """Return why a config cannot run, or an empty string."""
    layer_types = set(getattr(config, "layer_types", None) or ())
    # The config of a text model is its own text config. Multimodal configs contain one.
    is_text = config.get_text_config() is config
    reasons = {
        "it is not a text-only decoder": config.is_encoder_decoder or not is_text,
        "it has a recurrent state (state-space or linear layers)": model._is_stateful,
        f"{model.__name__} does not attend through transformers' AttentionInterface": not (
            # Some classes do not declare support; the second check inspects their source.
            model._supports_attention_backend or model._can_set_attn_implementation()
        ),
        "its chunked attention exists in the attention mask only": bool(
            getattr(config, "attention_chunk_size", None)
        ),
        f"layers of type {', '.join(sorted(layer_types - _LAYER_TYPES))} are not supported": (
            bool(layer_types - _LAYER_TYPES)
        ),
        "its weights are quantised": getattr(config, "quantization_config", None) is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
