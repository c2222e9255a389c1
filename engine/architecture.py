"""Which transformers models the local runner can run, and the hook they attend through.

`model_class` refuses by what a config says, before weights are read: classes that do not
attend through transformers' `AttentionInterface`, state-space and linear layers, windows and
chunks that exist only in a mask. What a config does not give away is found by `trial`, on
the loaded model.

A rotary embedding that changes once a sequence grows is right up to that length, which
`longest` says: keys are stored rotated and cannot be turned again.

Knows transformers' configs and the hook, no blocks and no contexts.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Final, Protocol

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

_LAYER_TYPES: Final = frozenset({"full_attention", "sliding_attention"})
_FOREIGN: Final = ("indices", "block_indices", "position_bias", "sinks")
"""Arguments of the hook that change what is attended to, and that no kernel here knows."""


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


def longest(config: PretrainedConfig) -> tuple[int | None, str]:
    """Return the tokens that a context may have at most, None without a bound, and why."""
    made_for: int | None = getattr(config, "max_position_embeddings", None)
    reason = f"the model was made for {made_for} tokens"
    for rope in _ropes(config):
        kind = rope.get("rope_type", rope.get("type"))
        if kind not in ("dynamic", "longrope"):
            continue
        switch = made_for
        if kind == "longrope":
            switch = rope.get("original_max_position_embeddings", made_for)
        if switch is not None and (made_for is None or switch <= made_for):
            made_for = int(switch)
            reason = f"its {kind} rotary embedding changes beyond {switch} tokens"
    return made_for, reason


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
    **others: Any,
) -> tuple[Tensor, None]:
    """Hand one layer's attention to whoever runs the forward pass; transformers calls it."""
    del dropout  # of training only
    for name in _FOREIGN:
        if others.get(name) is not None:
            raise ValueError(f"its attention takes {name!r}, which no kernel here knows")
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


def _unsupported(config: PretrainedConfig, found: type[PreTrainedModel]) -> str:
    """Return why a config cannot run, empty where nothing speaks against it."""
    layer_types = set(getattr(config, "layer_types", None) or ())
    # A text model's config is its own text config; one with images has another inside.
    is_text = config.get_text_config() is config
    findings = {
        "it is not a text-only decoder": config.is_encoder_decoder or not is_text,
        "it keeps a recurrent state (state-space or linear layers)": found._is_stateful,
        f"{found.__name__} does not attend through transformers' AttentionInterface": not (
            # Some that do have not said so; the other looks into the source.
            found._supports_attention_backend or found._can_set_attn_implementation()
        ),
        "its chunked attention exists in the attention mask only": bool(
            getattr(config, "attention_chunk_size", None)
        ),
        f"layers of type {', '.join(sorted(layer_types - _LAYER_TYPES))} are not supported": (
            bool(layer_types - _LAYER_TYPES)
        ),
        "its weights are quantised": getattr(config, "quantization_config", None) is not None,
    }
    return next((reason for reason, holds in findings.items() if holds), "")


def _ropes(config: PretrainedConfig) -> list[dict[str, Any]]:
    """Return the parameters of every rotary embedding; there may be one per layer type."""
    found: list[dict[str, Any]] = []
    for name in ("rope_parameters", "rope_scaling"):
        parameters = getattr(config, name, None) or {}
        found += [one for one in (parameters, *parameters.values()) if isinstance(one, dict)]
    return found
