"""Which transformers models the local runner can run, and how their layers look.

Two gates. `model_class` refuses by what a config says, before weights are read: classes that
do not attend through transformers' `AttentionInterface`, state-space and linear layers,
windows that exist only in a mask, rotary embeddings that change with the length of a
sequence. `probe` runs a loaded model once on a few tokens and looks at what arrives at the
hook: every layer exactly once, no mask, a window wherever the config speaks of one. What it
saw also gives the cache shapes, so layers may differ from each other.

Knows transformers' configs and the hook, no blocks and no contexts. Kept true: whatever
passes both gates attends to nothing but what the hook shows it.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    PretrainedConfig,
    PreTrainedModel,
)

from .api import EngineError

ATTENTION: Final = "conure"
"""The name of the hook among transformers' attention implementations."""

PROBE_TOKENS: Final = 3
_LAYER_TYPES: Final = frozenset({"full_attention", "sliding_attention"})
_MOVING_ROPE: Final = frozenset({"dynamic", "longrope"})


class Attending(Protocol):
    """What stands behind the hook during a forward pass."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attend for one layer: heads-first [1, H, T, D] in, [1, T, H, E] out."""
        ...


CURRENT: Final[ContextVar[Attending]] = ContextVar("attending")
"""Set around every forward pass. A context variable because some models drop the extra
arguments that would otherwise carry it to the hook."""


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer keeps per token."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None


def register() -> None:
    """Make the hook known to transformers under `ATTENTION`; doing it again is safe.

    No mask function is registered beside it: that keeps transformers from building masks.
    """
    AttentionInterface.register(ATTENTION, _hook)


def model_class(config: PretrainedConfig, name: str) -> type[PreTrainedModel]:
    """Return the class that runs a config as a decoder.

    Raises:
        EngineError: `model.unsupported` if the runner would compute it wrongly or not at
            all; the sentence says why.
    """
    # The mapping's annotations say pairs, it holds classes.
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    reason = f"transformers knows no decoder for model type {config.model_type!r}"
    if found is not None:
        reason = _unsupported(config, found)
    if found is None or reason:
        raise EngineError("model.unsupported", f"cannot run {name}: {reason}")
    chosen: type[PreTrainedModel] = found
    return chosen


def probe(model: PreTrainedModel, name: str) -> list[Layer]:
    """Run the model on a few tokens and return its layers in order.

    Raises:
        EngineError: `model.unsupported` if a layer does not attend through the hook, or not
            by the hook alone, or if the model fails.
    """
    seen = _Probe()
    token = CURRENT.set(seen)
    try:
        with torch.inference_mode():
            ids = torch.zeros(1, PROBE_TOKENS, dtype=torch.int64)
            positions = torch.arange(PROBE_TOKENS)[None]
            model(input_ids=ids, position_ids=positions, use_cache=False)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise EngineError(
            "model.unsupported", f"cannot run {name}: a trial of three tokens failed: {error}"
        ) from error
    finally:
        CURRENT.reset(token)
    reason = seen.complaint or _missing(seen, model.config)
    if reason:
        raise EngineError("model.unsupported", f"cannot run {name}: {reason}")
    return [seen.layers[index] for index in range(len(seen.layers))]


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
    **_: Any,
) -> tuple[Tensor, None]:
    """Hand one layer's attention to whoever runs the forward pass; transformers calls it."""
    del dropout  # of training only
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


@dataclass(slots=True)
class _Probe:
    """Notes what arrives at the hook."""

    layers: dict[int, Layer] = field(default_factory=dict)
    complaint: str = ""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        del scale, softcap, sinks
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int) or index in self.layers:
            self.complaint = "its attention layers cannot be told apart"
        elif mask is not None:
            self.complaint = "it builds an attention mask of its own"
        elif not getattr(module, "is_causal", True):
            self.complaint = "it attends to later tokens too"
        elif query.shape[2] != key.shape[2] or query.shape[2] != PROBE_TOKENS:
            self.complaint = "its attention does not see one key per token"
        else:
            self.layers[index] = Layer(key.shape[1], key.shape[3], value.shape[3], window)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


def _missing(seen: _Probe, config: PretrainedConfig) -> str:
    """Say what the config promises and the hook did not see; empty where nothing is amiss."""
    wanted = range(config.num_hidden_layers)
    if sorted(seen.layers) != list(wanted):
        return f"{len(seen.layers)} of its {len(wanted)} layers attend through the hook"
    types = getattr(config, "layer_types", None)
    if getattr(config, "sliding_window", None) is None and types is None:
        return ""
    default = "full_attention" if types is not None else "sliding_attention"
    for index, layer in seen.layers.items():
        layer_type = types[index] if types is not None else default
        if layer_type == "sliding_attention" and layer.window is None:
            return "its sliding window exists in the attention mask only"
    return ""


def _unsupported(config: PretrainedConfig, found: type[PreTrainedModel]) -> str:
    """Return why a config cannot run, empty where nothing speaks against it."""
    layer_types = set(getattr(config, "layer_types", None) or ())
    # A text model's config is its own text config; one with images has another inside.
    is_text = config.get_text_config() is config
    findings = {
        "it is not a text-only decoder": config.is_encoder_decoder or not is_text,
        "it keeps a recurrent state (state-space or linear layers)": found._is_stateful,
        f"{found.__name__} does not attend through transformers' AttentionInterface": (
            not found._supports_attention_backend
        ),
        f"layers of type {', '.join(sorted(layer_types - _LAYER_TYPES))} are not supported": (
            bool(layer_types - _LAYER_TYPES)
        ),
        "its chunked attention exists in the attention mask only": bool(
            getattr(config, "attention_chunk_size", None)
        ),
        "its rotary embedding changes with the length of the sequence": bool(
            _rope_types(config) & _MOVING_ROPE
        ),
        "its layers share keys and values": bool(getattr(config, "num_kv_shared_layers", 0)),
        "its weights are quantised": getattr(config, "quantization_config", None) is not None,
    }
    return next((reason for reason, holds in findings.items() if holds), "")


def _rope_types(config: PretrainedConfig) -> set[str]:
    """Return the kinds of rotary embedding of a config, which may have one per layer type."""
    found = set()
    for name in ("rope_parameters", "rope_scaling"):
        parameters = getattr(config, name, None) or {}
        for one in (parameters, *parameters.values()):
            if isinstance(one, dict):
                found.add(str(one.get("rope_type", one.get("type", "default"))))
    return found
