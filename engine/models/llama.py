"""Llama-like decoders without transformers: the modules, and their weights from safetensors.

The modules have transformers' names, because weights are found by them. They compute what
transformers' modules compute, in the same order, so that logits are equal; attention goes to the
backend of the pass. `fused_decoder` takes their weights and replaces most of their work.

Invariants: `load` returns a complete model, or None. It raises nothing for a folder: transformers
reads what is refused here, and its error is the user's.

Shapes: T tokens - H query heads - K kv heads - D head dim - V tokens of the vocabulary.
"""

from __future__ import annotations

import math
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..protocol import EngineError
from . import attention_backend, checkpoint, inspection
from .checkpoint import Checkpoint
from .llama_config import LinearRope, Llama3Rope, LlamaConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FAILURES: Final = (EngineError, SafetensorError, OSError, RuntimeError)


class LastHiddenState(NamedTuple):
    """The result of the layers."""

    last_hidden_state: Tensor
    """[1, T, hidden size]."""


class Logits(NamedTuple):
    """The result of a decoder."""

    logits: Tensor
    """[1, T, V]."""


def load(
    source: Checkpoint, config: LlamaConfig, dtype: str, device: str
) -> LlamaLikeDecoder | None:
    """Load the model of a folder; None if its weights are not exactly those of the structure.

    Args:
        source: The folder.
        config: Its structure.
        dtype: As in `checkpoint.dtype_name`.
        device: The device of the weights.
    """
    chosen: torch.dtype = getattr(torch, checkpoint.dtype_name(source.config, dtype, device))
    try:
        paths = inspection.weight_files(source.path)
        with torch.device("meta"):
            model = LlamaLikeDecoder(config)
        needed = {name: [*weight.shape] for name, weight in model.named_parameters()}
        # Files are read only if all weights fit: transformers reads them again otherwise.
        if dict(chain.from_iterable(map(_shapes, paths))) != needed:
            return None
        tensors = chain.from_iterable(_tensors(path, chosen, device) for path in paths)
        model.load_state_dict(dict(tensors), strict=False, assign=True)
        model.tie()
    except _FAILURES:
        return None
    return model.to(device).eval().requires_grad_(False)


def _shapes(path: Path) -> list[tuple[str, list[int]]]:
    with safe_open(path, framework="pt") as file:
        names: list[str] = file.keys()
        return [(name, file.get_slice(name).get_shape()) for name in names]


def _tensors(path: Path, dtype: torch.dtype, device: str) -> list[tuple[str, Tensor]]:
    # Copied, because the tensors of the file are mapped to it, and files may be replaced.
    with safe_open(path, framework="pt") as file:
        names: list[str] = file.keys()
        return [(name, file.get_tensor(name).to(device, dtype, copy=True)) for name in names]


class LlamaLikeDecoder(nn.Module):
    """A decoder with its output layer."""

    def __init__(self, config: LlamaConfig) -> None:
        """Create the modules. Weights are not initialised."""
        super().__init__()
        self.config = config
        self.model = _Layers(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie()

    @property
    def base_model(self) -> nn.Module:
        """The module that returns the hidden states."""
        return self.model

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all weights."""
        return self.lm_head.weight.dtype

    @property
    def device(self) -> torch.device:
        """The device of all weights."""
        return self.lm_head.weight.device

    def tie(self) -> None:
        """Let the output layer have the weights of the embedding, if the config says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        *,
        use_cache: bool = False,
        logits_to_keep: Tensor | None = None,
    ) -> Logits:
        """Return the logits of tokens [1, T], or of some of them."""
        assert not use_cache, "keys and values belong to the backend"
        hidden = self.model(input_ids, position_ids).last_hidden_state
        return Logits(self.lm_head(hidden if logits_to_keep is None else hidden[:, logits_to_keep]))


Decoder: TypeAlias = "LlamaLikeDecoder | PreTrainedModel"
"""A model of this module or of transformers."""


class _Layers(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        # Not initialised: drawing normal numbers imports torch's compiler, which takes 2 s.
        empty = torch.empty(config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding.from_pretrained(empty)  # type: ignore[no-untyped-call]  # theirs
        self.layers = nn.ModuleList(
            _DecoderLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = _RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = _RotaryEmbedding(config)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> LastHiddenState:
        hidden = self.embed_tokens(input_ids)
        angles = self.rotary_emb(hidden, position_ids)
        for layer in self.layers:
            hidden = layer(hidden, angles)
        return LastHiddenState(self.norm(hidden))


class _DecoderLayer(nn.Module):
    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__()
        self.self_attn = _Attention(config, index)
        self.mlp = _GatedMLP(config)
        self.input_layernorm = _RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = _RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), angles)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class _GatedMLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        outer, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(outer, inner, bias=False)
        self.up_proj = nn.Linear(outer, inner, bias=False)
        self.down_proj = nn.Linear(inner, outer, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out


class _RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self._eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        out: Tensor = self.weight * normed.to(hidden.dtype)
        return out


class _RotaryEmbedding(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.frequencies = nn.Buffer(rope_frequencies(config), persistent=False)

    def forward(self, like: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [1, T, D] in the dtype of a tensor."""
        angles = position_ids[..., None].float() * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rope_frequencies(config: LlamaConfig) -> Tensor:
    """Return the radians per position of each pair of dimensions: [D / 2], float32, on the CPU.

    `llama3` divides frequencies whose period exceeds the length of the first training, and blends
    in between (The Llama 3 Herd of Models, section 3.4, and its published code).
    """
    rope = config.rope
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float, device="cpu")
    frequencies = 1.0 / (rope.rope_theta ** (exponents / config.head_dim))
    if isinstance(rope, LinearRope):
        return frequencies / rope.factor
    if not isinstance(rope, Llama3Rope):
        return frequencies
    low, high = rope.low_freq_factor, rope.high_freq_factor
    length = rope.original_max_position_embeddings
    periods = 2 * math.pi / frequencies
    divided = torch.where(periods > length / low, frequencies / rope.factor, frequencies)
    share = (length / periods - low) / (high - low)
    blended = (1 - share) * divided / rope.factor + share * divided
    is_between = (periods >= length / high) & (periods <= length / low)
    return torch.where(is_between, blended, divided)


class _Attention(nn.Module):
    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__()
        size, bias = config.hidden_size, config.has_qkv_bias
        query = config.num_attention_heads * config.head_dim
        kv = config.num_key_value_heads * config.head_dim
        self.layer_idx = index
        self.head_dim = config.head_dim
        self.scaling = config.head_dim**-0.5
        self._window = config.sliding_window
        self.q_proj = nn.Linear(size, query, bias=bias)
        self.k_proj = nn.Linear(size, kv, bias=bias)
        self.v_proj = nn.Linear(size, kv, bias=bias)
        self.o_proj = nn.Linear(query, size, bias=False)
        self._has_head_norms = config.has_head_norms
        if config.has_head_norms:
            self.q_norm = _RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = _RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, hidden: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        heads = (1, hidden.shape[1], -1, self.head_dim)
        query, key, value = (
            project(hidden).view(heads) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self._has_head_norms:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        query, key = (_rotate(each, *angles) for each in (query, key))
        out: Tensor = self.o_proj(self._attend(query, key, value).flatten(2))
        return out

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return [1, T, H, D] from [1, H, T, D] and [1, K, T, D]."""
        return attention_backend.CURRENT.get().attend(
            self,
            query,
            key,
            value,
            mask=None,
            scale=self.scaling,
            window=self._window,
            softcap=None,
            sinks=None,
        )


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [1, heads, T, D] by angles [1, T, D]."""
    half = heads.shape[-1] // 2
    turned = torch.cat((-heads[..., half:], heads[..., :half]), dim=-1)
    return heads * cos[:, None] + turned * sin[:, None]
