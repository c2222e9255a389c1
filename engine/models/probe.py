"""Probe of a loaded model: KV shapes of its layers, and a test of paged attention on it.

A transformers model can run over paged keys and values if it behaves as a decoder over them. The
probe runs a few tokens three times: through the hook; with the model's own eager attention; and
through the hook again, with each token as a separate sequence that continues stored keys and
values, in a batch with unrelated tokens. The logits must match. This detects recurrent states,
convolutions, positions that are counted instead of read, and masks and biases that bypass the hook.
A sliding window, which needs longer sequences, is only checked for being passed where the config
declares one. A decoder of `llama` is known from its config, and is not run.

Invariants: a model that passes attends only to what the hook provides, and its layers store what
`LayerKVSpec` describes.

Shapes: T packed tokens - H query heads - K kv heads - D, E head dims of keys, values -
L visible tokens - V tokens of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor, nn

from ..protocol import EngineError
from . import attention_backend
from .llama import Decoder, LlamaLikeDecoder
from .llama_config import DecoderConfig, LlamaConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS: Final = 12
NUM_PAST: Final = 4
"""Number of first tokens that never run as separate sequences, so that each sequence has a past."""
NUM_UNRELATED: Final = 3
"""Unrelated tokens in the same batch."""

_NAN: Final = "its logits are NaN; the weights may be damaged"
_TOLERANCES: Final = {torch.float64: 1e-3, torch.float32: 1e-3}
"""Difference of logits, in units of their spread, that rounding explains for every token."""
_ROUGH: Final = 0.25
"""The same for 16-bit weights. Half of the tokens must match: in the others, rounding may have
selected other experts of a mixture."""


@dataclass(frozen=True, slots=True)
class LayerKVSpec:
    """Keys and values that one layer stores per token."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    source: int
    """Index of the layer whose keys and values it reads: its own, or an earlier one."""


class _AttentionVariant(NamedTuple):
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


def probe(model: Decoder, name: str) -> list[LayerKVSpec]:
    """Return the layers of a model in order; a model of transformers runs a few tokens for it.

    Raises:
        EngineError: `model.unsupported` if the model fails, or a layer does not attend
            exclusively through the hook.
    """
    if isinstance(model, LlamaLikeDecoder):
        return _layers_of(model.config)
    run = _ProbeRun(model)
    try:
        with torch.inference_mode():
            reason = run.find_fault()
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise EngineError(
            "model.unsupported", f"cannot run {name}: running a few tokens failed: {error}"
        ) from error
    if reason:
        raise EngineError("model.unsupported", f"cannot run {name}: {reason}")
    return [run.layers[index] for index in sorted(run.layers)]


def check_logits(logits: Tensor, name: str) -> None:
    """Raise EngineError `model.unsupported` if logits are NaN."""
    if logits.isnan().any():
        raise EngineError("model.unsupported", f"cannot run {name}: {_NAN}")


def _layers_of(config: LlamaConfig) -> list[LayerKVSpec]:
    heads, size, window = config.num_key_value_heads, config.head_dim, config.sliding_window
    return [
        LayerKVSpec(heads, size, size, window, source=index)
        for index in range(config.num_hidden_layers)
    ]


class _ProbeRun:
    """Runs a few tokens through a model three times, as the backend of the hook."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.layers: dict[int, LayerKVSpec] = {}
        self._model = model
        self._fault = ""
        self._visited: list[int] = []
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}
        self._is_paged = False

    def find_fault(self) -> str:
        """Return why the model cannot run, or an empty string."""
        vocabulary: int = self._model.config.vocab_size
        ids = torch.arange(3, 3 + TOKENS + NUM_UNRELATED) * 37 % vocabulary
        ids, unrelated = ids[:TOKENS], ids[TOKENS:]
        positions = torch.arange(TOKENS)
        alone = self._forward(ids, positions)
        reason = self._fault or _config_mismatch(self.layers, self._model.config)
        if reason:
            return reason
        if alone.isnan().any():
            return _NAN
        if not self._match(self._forward_eagerly(ids, positions), alone):
            return "its logits differ between the hook and its own attention"
        # Now every token is a sequence that continues stored keys and values. In reversed order, no
        # token follows its predecessor in the batch.
        order = torch.arange(NUM_PAST, TOKENS).flip(0)
        self._is_paged = True
        packed = self._forward(
            torch.cat((unrelated, ids[order])), torch.cat((positions[:NUM_UNRELATED], order))
        )
        if not self._match(packed[NUM_UNRELATED:], alone[order]):
            return "its layers store more than keys and values, or mix sequences"
        return self._fault

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
        index = getattr(module, "layer_idx", None)
        length = query.shape[2]
        if not isinstance(index, int) or index in self._visited:
            self._fault = "its attention layers cannot be distinguished"
        elif mask is not None:
            self._fault = "it builds its own attention mask"
        elif not getattr(module, "is_causal", True):
            self._fault = "it attends to later tokens too"
        elif length != key.shape[2] or length != value.shape[2]:
            self._fault = "its attention does not have one key per token"
        if self._fault or index is None:
            return query.new_zeros(1, length, query.shape[1], value.shape[3])
        self._visited.append(index)
        if index not in self.layers:
            self._record_layer(index, key, value, window)
        variant = _AttentionVariant(scale, window, softcap, sinks)
        if not self._is_paged:
            return _attend(query, key, value, variant)
        stored_key, stored_value = self._stored[index]
        others = slice(NUM_UNRELATED)
        parts = [_attend(query[:, :, others], key[:, :, others], value[:, :, others], variant)]
        for packed, position in enumerate(range(TOKENS - 1, NUM_PAST - 1, -1), NUM_UNRELATED):
            own = slice(packed, packed + 1)
            keys = torch.cat((stored_key[:, :, :position], key[:, :, own]), dim=2)
            values = torch.cat((stored_value[:, :, :position], value[:, :, own]), dim=2)
            parts.append(_attend(query[:, :, own], keys, values, variant))
        return torch.cat(parts, dim=1)

    def _record_layer(self, index: int, key: Tensor, value: Tensor, window: int | None) -> None:
        """Record the keys and values of a layer, and the layer that stores them first."""
        same = (each for each, (stored, _) in self._stored.items() if stored is key)
        source = next(same, index)
        self._stored[index] = key, value
        self.layers[index] = LayerKVSpec(key.shape[1], key.shape[3], value.shape[3], window, source)

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return the logits [T, V] of packed tokens."""
        self._visited.clear()
        device = self._model.device
        token = attention_backend.CURRENT.set(self)
        try:
            logits: Tensor = self._model(
                input_ids=ids[None].to(device),
                position_ids=positions[None].to(device),
                use_cache=False,
            ).logits[0]
        finally:
            attention_backend.CURRENT.reset(token)
        return logits

    def _forward_eagerly(self, ids: Tensor, positions: Tensor) -> Tensor:
        self._model.set_attn_implementation("eager")
        try:
            return self._forward(ids, positions)
        finally:
            self._model.set_attn_implementation(attention_backend.ATTENTION)

    def _match(self, logits: Tensor, expected: Tensor) -> bool:
        """Compare logits [T, V] token by token."""
        logits, expected = logits.float(), expected.float()
        spread = expected.std(dim=-1).square().mean().sqrt()
        errors = (logits - expected).square().mean(dim=-1).sqrt()
        tolerance = _TOLERANCES.get(self._model.dtype)
        if tolerance is not None:
            return bool((errors <= tolerance * spread).all())
        return bool(errors.median() <= _ROUGH * spread)


def _attend(query: Tensor, key: Tensor, value: Tensor, variant: _AttentionVariant) -> Tensor:
    """Attend the last tokens of one sequence to the whole sequence, in plain torch.

    Args:
        query: [1, H, T, D].
        key: [1, K, L, D].
        value: [1, K, L, E].
        variant: As in `conure.kernels.ops.Operations.attention`.
    """
    scale, window, softcap, sinks = variant
    num, length = query.shape[2], key.shape[2]
    group = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(group, dim=1) for each in (key, value))
    scores = query.float() @ key.float().transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    positions = torch.arange(length, device=query.device)
    last = positions[length - num :, None]
    visible = positions <= last
    if window is not None:
        visible &= positions > last - window
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        sink = sinks.float()[None, :, None, None].expand(1, -1, num, 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :length]
    # Contiguous because some models view it in another shape.
    return (weights @ value.float()).to(query.dtype).transpose(1, 2).contiguous()


def _config_mismatch(layers: dict[int, LayerKVSpec], config: DecoderConfig) -> str:
    """Return what the config declares and the hook did not see, or an empty string."""
    expected = range(config.num_hidden_layers)
    if not expected:
        return f"its config declares {config.num_hidden_layers} layers"
    if sorted(layers) != list(expected):
        return f"{len(layers)} of its {len(expected)} layers attend through the hook"
    types = getattr(config, "layer_types", None)
    if getattr(config, "sliding_window", None) is None and types is None:
        return ""
    default = "full_attention" if types is not None else "sliding_attention"
    for index, layer in layers.items():
        layer_type = types[index] if types is not None else default
        if layer_type == "sliding_attention" and layer.window is None:
            return "its sliding window exists in the attention mask only"
    return ""
