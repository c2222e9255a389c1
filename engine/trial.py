"""A trial of a loaded model: a few tokens that show how its layers look and what they keep.

A transformers model passes as a decoder over paged keys and values if it behaves as one.
It runs three times over a handful of tokens: through the hook, by its own eager attention,
and once more through the hook where every token stands alone behind stored keys and values,
beside strangers. The logits must agree. That finds recurrent states, convolutions,
positions that are counted instead of taken, masks and biases that the hook never sees; what
shows on long sequences only, a sliding window, is compared with the config.

Knows the hook and a model's logits, no blocks and no contexts. Kept true: whatever passes
attends to nothing but what the hook shows it, and its layers keep what `Layer` says.

Shapes: T packed tokens - H query heads - K kv heads - D, E head dims of keys, values -
L tokens that are seen - V tokens of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from . import architecture
from .api import EngineError

TOKENS: Final = 12
PAST: Final = 4
"""Tokens of the trial that are never continued alone, so that there is always a past."""
STRANGERS: Final = 3

_TOLERANCES: Final = {torch.float64: 1e-3, torch.float32: 1e-3}
"""Difference of logits, in units of their spread, that rounding explains in every token."""
_ROUGH: Final = 0.25
"""With 16-bit weights, in half of the tokens: in others it may choose another expert."""


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer keeps per token, and whether it keeps it itself."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    source: int
    """The layer whose keys and values it reads: its own number, or an earlier layer's."""


class _Variant(NamedTuple):
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


def probe(model: PreTrainedModel, name: str) -> list[Layer]:
    """Run the model on a few tokens and return its layers in order.

    Raises:
        EngineError: `model.unsupported` if a layer does not attend through the hook, or not
            by the hook alone, or if the model fails.
    """
    trial = _Trial(model)
    try:
        with torch.inference_mode():
            reason = trial.run()
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise EngineError(
            "model.unsupported", f"cannot run {name}: a trial of a few tokens failed: {error}"
        ) from error
    if reason:
        raise EngineError("model.unsupported", f"cannot run {name}: {reason}")
    return [trial.layers[index] for index in sorted(trial.layers)]


class _Trial:
    """A few tokens through a model three times; stands behind the hook meanwhile."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.layers: dict[int, Layer] = {}
        self._model = model
        self._complaint = ""
        self._seen: list[int] = []
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._continues = False

    def run(self) -> str:
        """Return why the model cannot run, empty where nothing speaks against it."""
        vocabulary: int = self._model.config.vocab_size
        ids = torch.arange(3, 3 + TOKENS + STRANGERS) * 37 % vocabulary
        ids, strangers = ids[:TOKENS], ids[TOKENS:]
        positions = torch.arange(TOKENS)
        alone = self._forward(ids, positions)
        reason = self._complaint or _missing(self.layers, self._model.config)
        if reason:
            return reason
        if alone.isnan().any():
            return "its weights give numbers that are none (NaN); the file may be damaged"
        if not self._agree(self._forward_eagerly(ids, positions), alone):
            return "through the hook it computes something else than by itself"
        # Every token is a sequence of its own now, which continues what is kept, and none
        # stands beside the one before it.
        order = torch.arange(PAST, TOKENS).flip(0)
        self._continues = True
        packed = self._forward(
            torch.cat((strangers, ids[order])), torch.cat((positions[:STRANGERS], order))
        )
        if not self._agree(packed[STRANGERS:], alone[order]):
            return "its layers keep more than keys and values, or mix sequences"
        return self._complaint

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
        if not isinstance(index, int) or index in self._seen:
            self._complaint = "its attention layers cannot be told apart"
        elif mask is not None:
            self._complaint = "it builds an attention mask of its own"
        elif not getattr(module, "is_causal", True):
            self._complaint = "it attends to later tokens too"
        elif length != key.shape[2] or length != value.shape[2]:
            self._complaint = "its attention does not see one key per token"
        if self._complaint or index is None:
            return query.new_zeros(1, length, query.shape[1], value.shape[3])
        self._seen.append(index)
        if index not in self.layers:
            self._note(index, key, value, window)
        variant = _Variant(scale, window, softcap, sinks)
        if not self._continues:
            return _attend(query, key, value, variant)
        kept_key, kept_value = self._kept[index]
        theirs = slice(STRANGERS)
        parts = [_attend(query[:, :, theirs], key[:, :, theirs], value[:, :, theirs], variant)]
        for packed, position in enumerate(range(TOKENS - 1, PAST - 1, -1), STRANGERS):
            mine = slice(packed, packed + 1)
            keys = torch.cat((kept_key[:, :, :position], key[:, :, mine]), dim=2)
            values = torch.cat((kept_value[:, :, :position], value[:, :, mine]), dim=2)
            parts.append(_attend(query[:, :, mine], keys, values, variant))
        return torch.cat(parts, dim=1)

    def _note(self, index: int, key: Tensor, value: Tensor, window: int | None) -> None:
        """Keep what a layer stores, and whether an earlier one stores it already."""
        same = (one for one, (kept, _) in self._kept.items() if kept is key)
        source = next(same, index)
        self._kept[index] = key, value
        self.layers[index] = Layer(key.shape[1], key.shape[3], value.shape[3], window, source)

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return the logits [T, V] of packed tokens."""
        self._seen.clear()
        device = self._model.device
        token = architecture.CURRENT.set(self)
        try:
            logits: Tensor = self._model(
                input_ids=ids[None].to(device),
                position_ids=positions[None].to(device),
                use_cache=False,
            ).logits[0]
        finally:
            architecture.CURRENT.reset(token)
        return logits

    def _forward_eagerly(self, ids: Tensor, positions: Tensor) -> Tensor:
        self._model.set_attn_implementation("eager")
        try:
            return self._forward(ids, positions)
        finally:
            self._model.set_attn_implementation(architecture.ATTENTION)

    def _agree(self, logits: Tensor, wanted: Tensor) -> bool:
        """Compare logits [T, V] token by token."""
        logits, wanted = logits.float(), wanted.float()
        spread = wanted.std(dim=-1).square().mean().sqrt()
        errors = (logits - wanted).square().mean(dim=-1).sqrt()
        tolerance = _TOLERANCES.get(self._model.dtype)
        if tolerance is not None:
            return bool((errors <= tolerance * spread).all())
        return bool(errors.median() <= _ROUGH * spread)


def _attend(query: Tensor, key: Tensor, value: Tensor, variant: _Variant) -> Tensor:
    """Attend the last tokens of one sequence to all of it, in plain torch.

    Args:
        query: [1, H, T, D].
        key: [1, K, L, D].
        value: [1, K, L, E].
        variant: As in `conure.kernels.ops`.
    """
    scale, window, softcap, sinks = variant
    num, length = query.shape[2], key.shape[2]
    group = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(group, dim=1) for one in (key, value))
    scores = query.float() @ key.float().transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seen = torch.arange(length, device=query.device)
    own = seen[length - num :, None]
    visible = seen <= own
    if window is not None:
        visible &= seen > own - window
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        sink = sinks.float()[None, :, None, None].expand(1, -1, num, 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :length]
    # Contiguous, for some models take a view of it.
    return (weights @ value.float()).to(query.dtype).transpose(1, 2).contiguous()


def _missing(layers: dict[int, Layer], config: PretrainedConfig) -> str:
    """Say what the config promises and the hook did not see; empty where nothing is amiss."""
    wanted = range(config.num_hidden_layers)
    if not wanted:
        return f"its config asks for {config.num_hidden_layers} layers"
    if sorted(layers) != list(wanted):
        return f"{len(layers)} of its {len(wanted)} layers attend through the hook"
    types = getattr(config, "layer_types", None)
    if getattr(config, "sliding_window", None) is None and types is None:
        return ""
    default = "full_attention" if types is not None else "sliding_attention"
    for index, layer in layers.items():
        layer_type = types[index] if types is not None else default
        if layer_type == "sliding_attention" and layer.window is None:
            return "its sliding window exists in the attention mask only"
    return ""
