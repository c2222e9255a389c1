"""Configs of the Llama-like decoders that the engine builds without transformers.

Importing transformers' model classes takes half of the time in which an engine starts. Most models
that people serve have one structure, which `llama` builds from a config of this module.

`read` accepts a config.json only if it has every setting that matters, with a value of this
structure, and no setting that this module does not know. transformers reads all others, and says
what is wrong with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

import msgspec

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Names of the model classes, by model type."""
Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
PositiveFloat: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]


class DefaultRope(
    msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag_field="rope_type", tag="default"
):
    """Settings of the rotary embedding."""

    rope_theta: PositiveFloat


class LinearRope(DefaultRope, frozen=True, tag="linear"):
    """A rotary embedding whose positions are divided."""

    factor: PositiveFloat


class Llama3Rope(DefaultRope, frozen=True, tag="llama3"):
    """A rotary embedding whose slow frequencies are divided."""

    factor: PositiveFloat
    low_freq_factor: PositiveFloat
    high_freq_factor: PositiveFloat
    original_max_position_embeddings: Positive


Rope: TypeAlias = DefaultRope | LinearRope | Llama3Rope


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The structure of a Llama-like decoder. Attributes have the names of transformers' configs."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    sliding_window: int | None
    """Tokens that a query attends to in every layer; None for all."""
    rope: Rope
    has_qkv_bias: bool
    has_head_norms: bool
    """Query and key heads are normalised before they are rotated."""
    hidden_act: str = "silu"
    layer_types: None = None

    @property
    def rope_parameters(self) -> dict[str, Any]:
        """The form of `rope` that readers of transformers' configs expect."""
        found: dict[str, Any] = msgspec.to_builtins(self.rope)
        return found

    @property
    def architecture(self) -> str:
        """The name of the model class in transformers."""
        return ARCHITECTURES[self.model_type]


DecoderConfig: TypeAlias = "LlamaConfig | PretrainedConfig"
"""A config of this module or of transformers."""


class _File(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The content of a config.json. A setting without a default must be there.

    Defaults are those of all four families; where the families differ, there is none.
    """

    model_type: Literal["llama", "mistral", "qwen2", "qwen3"]
    vocab_size: Positive
    hidden_size: Positive
    intermediate_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
    max_position_embeddings: Positive
    rms_norm_eps: PositiveFloat
    tie_word_embeddings: bool
    hidden_act: Literal["silu"]
    head_dim: Positive | None = None
    rope_parameters: Rope
    rope_interleaved: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    pretraining_tp: Literal[1] = 1
    sliding_window: Positive | msgspec.UnsetType | None = msgspec.UNSET
    use_sliding_window: bool = False
    max_window_layers: int | None = None
    layer_types: list[Literal["full_attention"]] | None = None

    # Settings that do not change the logits.
    architectures: Any = None
    attention_dropout: Any = None
    auto_map: Any = None
    bos_token_id: Any = None
    dtype: Any = None
    eos_token_id: Any = None
    initializer_range: Any = None
    is_llama_config: Any = None
    pad_token_id: Any = None
    torch_dtype: Any = None
    transformers_version: Any = None
    unsloth_fixed: Any = None
    unsloth_version: Any = None
    use_cache: Any = None
    js_config: Any = msgspec.field(default=None, name="transformers.js_config")
    saved_from: Any = msgspec.field(default=None, name="_name_or_path")


def read(config: dict[str, Any]) -> LlamaConfig | None:
    """Return the structure that a config.json describes; None if transformers has to read it."""
    try:
        found = msgspec.convert(_with_rope_parameters(config), _File)
    except msgspec.ValidationError:
        return None
    head_dim = found.head_dim or found.hidden_size // found.num_attention_heads
    is_plain = not (
        found.attention_bias or found.mlp_bias or found.rope_interleaved or found.use_sliding_window
    )
    is_even = (
        found.num_attention_heads % found.num_key_value_heads == 0
        and head_dim % 2 == 0
        and (found.head_dim is not None or found.hidden_size % found.num_attention_heads == 0)
    )
    if not is_plain or not is_even or _lacks_own_setting(found):
        return None
    window = found.sliding_window if found.model_type == "mistral" else None
    return LlamaConfig(
        model_type=found.model_type,
        vocab_size=found.vocab_size,
        hidden_size=found.hidden_size,
        intermediate_size=found.intermediate_size,
        num_hidden_layers=found.num_hidden_layers,
        num_attention_heads=found.num_attention_heads,
        num_key_value_heads=found.num_key_value_heads,
        head_dim=head_dim,
        max_position_embeddings=found.max_position_embeddings,
        rms_norm_eps=found.rms_norm_eps,
        tie_word_embeddings=found.tie_word_embeddings,
        sliding_window=None if window is msgspec.UNSET else window,
        rope=found.rope_parameters,
        has_qkv_bias=found.model_type == "qwen2",
        has_head_norms=found.model_type == "qwen3",
    )


def _lacks_own_setting(found: _File) -> bool:
    """Return whether a setting is missing for which a family has a default of its own."""
    if found.model_type == "mistral":
        return found.sliding_window is msgspec.UNSET
    return found.model_type == "qwen3" and found.head_dim is None


def _with_rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config whose rotary embedding has the form of transformers 5.

    Configs of older versions have `rope_theta` beside `rope_scaling`, and `rope_scaling` is null or
    missing where the embedding is the default one.
    """
    rope = config.get("rope_parameters")
    theta, scaling = config.get("rope_theta"), config.get("rope_scaling")
    if rope is None:
        rope = {"rope_type": "default"} if scaling is None else scaling
        if isinstance(rope, dict):
            rope = {"rope_theta": theta, **rope}
    elif theta is not None or scaling is not None:
        return config  # `_File` has no place for both forms
    old = ("rope_theta", "rope_scaling")
    rest = {name: value for name, value in config.items() if name not in old}
    return {**rest, "rope_parameters": rope}
