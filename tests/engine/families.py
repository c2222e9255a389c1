"""The decoder families that the local engine is tested with, each shrunk to two small layers.

A family is a model type of transformers, or one of its variants that computes differently
(a rotary embedding, a window). `RUNNING` must give transformers' tokens, `REFUSED` must be
refused with a reason before any call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

WINDOW: Final = 9
"""Shorter than every context of the tests, and no multiple of a block."""


class Family(NamedTuple):
    """One row of the table."""

    changes: dict[str, Any]
    """Over `shrunk.SMALL`."""
    remark: str = ""
    has_experts: bool = False
    """Whether rounding may change the experts that a token is sent to."""

    @property
    def description(self) -> str:
        """The remark of the page."""
        return "; ".join(filter(None, (self.remark, "experts" if self.has_experts else "")))


class Refusal(NamedTuple):
    """A family that cannot run, and why."""

    reason: str
    """Part of the error message."""
    changes: dict[str, Any]
    is_known: bool = True
    """Whether the config alone is refused, before weights are read; else the trial refuses."""
    trial: str = ""
    """Part of the error of a trial without the check of the config; empty if no small model can be
    built."""


_MOE: Final[dict[str, Any]] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_GROUPS: Final[dict[str, Any]] = {
    **_MOE,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
_MLA: Final[dict[str, Any]] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    # Some configs have the size of the rotated part here.
    "head_dim": 8,
}
_TWO_KINDS: Final[dict[str, Any]] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
# Some configs require it.
_BOS: Final[dict[str, Any]] = {"bos_token_id": 256}
_SLIDING: Final[dict[str, Any]] = {"sliding_window": WINDOW}
_MLA_REMARK: Final = "latent attention in expanded form: keys of 24, values of 12"


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **parameters}}


RUNNING: Final[dict[str, Family]] = {
    "afmoe": Family({**_MOE, **_TWO_KINDS, "num_dense_layers": 1}, has_experts=True),
    "apertus": Family({}),
    "arcee": Family({}),
    "bert (decoder)": Family({"is_decoder": True}, "learned positions"),
    "biogpt": Family({}, "learned positions"),
    "bitnet": Family({}),
    "cohere": Family({}),
    "cohere2": Family(_TWO_KINDS, "no rotary embedding in full layers"),
    "cwm": Family({**_TWO_KINDS, **_BOS}),
    "deepseek_v2": Family({**_MLA, **_GROUPS}, _MLA_REMARK, has_experts=True),
    "deepseek_v3": Family({**_MLA, **_GROUPS}, _MLA_REMARK, has_experts=True),
    "dots1": Family(_GROUPS, has_experts=True),
    "ernie4_5": Family({}),
    "ernie4_5_moe": Family({**_MOE, "moe_num_experts": 4, "moe_k": 2}, has_experts=True),
    "exaone4": Family(_TWO_KINDS),
    "gemma": Family({}),
    "gemma2": Family(
        {**_SLIDING, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 20.0}, "soft cap"
    ),
    "gemma3_text": Family(_TWO_KINDS),
    "gemma3n_text": Family(
        {
            **_SLIDING,
            "num_hidden_layers": 4,
            "intermediate_size": 96,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 259,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        },
        "last layers read the keys and values of earlier ones",
    ),
    "gemma4_text": Family(
        {
            **_SLIDING,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 259,
        },
        "head sizes and kv heads differ between layers; last layers read earlier ones",
    ),
    "glm": Family({}),
    "glm4": Family({}),
    "glm4_moe": Family(_GROUPS, has_experts=True),
    "glm4_moe_lite": Family({**_MLA, **_GROUPS}, _MLA_REMARK, has_experts=True),
    "gpt2": Family({}, "learned positions"),
    "gpt_bigcode": Family({}, "learned positions; one kv head"),
    "gpt_neox": Family({}),
    "gpt_oss": Family({**_MOE, **_TWO_KINDS}, "sinks", has_experts=True),
    "granite": Family({"attention_multiplier": 0.2}),
    "granite_swa": Family(_TWO_KINDS, "sinks"),
    "granitemoe": Family(_MOE, has_experts=True),
    "helium": Family({}),
    "hunyuan_v1_dense": Family({}),
    "hunyuan_v1_moe": Family({**_MOE, "moe_topk": 2}, has_experts=True),
    "jais2": Family({}),
    "jetmoe": Family({**_MOE, "kv_channels": 16, "head_dim": 16}, has_experts=True),
    "llama": Family({}),
    "llama (dynamic)": Family(_rope("dynamic", factor=2.0), "up to the change"),
    "llama (llama3)": Family(
        _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "llama (yarn)": Family(_rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "longcat_flash": Family(
        {
            **_MLA,
            **_GROUPS,
            "num_layers": 2,
            "ffn_hidden_size": 96,
            "expert_ffn_hidden_size": 32,
            "zero_expert_num": 2,
            "moe_topk": 2,
        },
        _MLA_REMARK,
        has_experts=True,
    ),
    "mimo_v2_flash": Family(
        {
            **_MOE,
            **_TWO_KINDS,
            "v_head_dim": 12,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "swa_head_dim": 16,
            "swa_v_head_dim": 12,
        },
        "kv heads differ between layers, values of another size than keys; sinks",
        has_experts=True,
    ),
    "minicpm3": Family(_MLA, _MLA_REMARK),
    "minimax_m2": Family(_MOE, has_experts=True),
    "ministral3": Family({**_SLIDING, "layer_types": None}),
    "mistral": Family(_SLIDING),
    "mixtral": Family({**_MOE, **_SLIDING}, has_experts=True),
    "modernbert-decoder": Family({"local_attention": 2 * WINDOW, **_BOS}),
    "nanochat": Family({}),
    "nemotron": Family({}),
    "olmo": Family({}),
    "olmo2": Family({}),
    "olmo3": Family(_TWO_KINDS),
    "olmoe": Family(_MOE, has_experts=True),
    "opt": Family({"word_embed_proj_dim": 64, "ffn_dim": 96}, "learned positions"),
    "persimmon": Family({}),
    "phi": Family({}),
    "phi3": Family(_SLIDING),
    "phi3 (longrope)": Family(
        {
            "original_max_position_embeddings": 128,
            **_rope(
                "longrope", short_factor=[1.0 + i / 8 for i in range(8)], long_factor=[4.0] * 8
            ),
        },
        "up to the change",
    ),
    "phimoe": Family({**_MOE, "sliding_window": None}, has_experts=True),
    "qwen2": Family({"use_sliding_window": False}),
    "qwen2 (sliding)": Family({**_SLIDING, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen2_moe": Family({**_MOE, "shared_expert_intermediate_size": 32}, has_experts=True),
    "qwen3": Family({}),
    "qwen3_moe": Family(_MOE, has_experts=True),
    "seed_oss": Family({}),
    "smollm3": Family({"no_rope_layers": [1, 0]}, "no rotary embedding in some layers"),
    "stablelm": Family({}),
    "starcoder2": Family(_SLIDING),
    "vaultgemma": Family(
        {**_TWO_KINDS, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 20.0}, "soft cap"
    ),
    "youtu": Family(_MLA, _MLA_REMARK),
}

_SSM: Final[dict[str, Any]] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_d_ssm": 128,
}
_LINEAR: Final[dict[str, Any]] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
_GPT: Final[dict[str, Any]] = {"n_embd": 64, "n_head": 4, "n_layer": 2, "rotary_dim": 8}
_STATE: Final = "has a recurrent state"
_OWN: Final = "does not attend through transformers' AttentionInterface"
_SOME: Final = "of its 2 layers attend through the hook"

REFUSED: Final[dict[str, Refusal]] = {
    "bamba": Refusal(_STATE, {**_SSM, "attn_layer_indices": [1]}, trial=_SOME),
    "bart": Refusal("text-only", {}),
    "bert": Refusal("later tokens", {}, is_known=False),
    "bloom": Refusal(_OWN, {}, trial=_SOME),
    "codegen": Refusal(_OWN, _GPT, trial=_SOME),
    "deepseek_v32": Refusal("indexed_attention", {**_MLA, **_GROUPS}, trial="running a few tokens"),
    "diffllama": Refusal("cannot be distinguished", {}, is_known=False),
    "doge": Refusal("its own attention mask", {}, is_known=False),
    "falcon": Refusal(_OWN, {"head_dim": ...}),
    "falcon_h1": Refusal(_STATE, _SSM, trial="more than keys and values"),
    "falcon_mamba": Refusal(_STATE, {"state_size": 8}, trial=_SOME),
    "gemma3": Refusal("text-only", {}),
    "gpt_neo": Refusal(_OWN, {"num_layers": 2, "attention_types": [[["global", "local"], 1]]}),
    "gptj": Refusal(_OWN, _GPT),
    "granitemoehybrid": Refusal(
        _STATE,
        {**_MOE, **_SSM, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 32},
        trial=_SOME,
    ),
    "hrm_text": Refusal("cannot be distinguished", {}, is_known=False),
    "jamba": Refusal(
        _STATE,
        {
            **_MOE,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "use_mamba_kernels": False,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
        },
        trial=_SOME,
    ),
    "lfm2": Refusal("type conv", {"layer_types": ["conv", "full_attention"]}, trial=_SOME),
    "llama (quantised)": Refusal("quantised", {"quantization_config": {"quant_method": "awq"}}),
    "llama4_text": Refusal(
        "chunked attention",
        {
            **_MOE,
            "attention_chunk_size": 8,
            "intermediate_size_mlp": 96,
            "layer_types": ["chunked_attention", "full_attention"],
        },
        trial="differ between the hook and its own attention",
    ),
    "mamba": Refusal(_STATE, {"state_size": 8}, trial=_SOME),
    "minimax": Refusal("linear_attention", {**_MOE, **_LINEAR}, trial=_SOME),
    "moshi": Refusal("mask only", {"sliding_window": WINDOW, "ffn_dim": 96}, is_known=False),
    "mpt": Refusal(
        _OWN, {"d_model": 64, "n_heads": 4, "n_layers": 2}, trial="running a few tokens"
    ),
    "phimoe (sliding)": Refusal("mask only", {**_MOE, **_SLIDING}, is_known=False),
    "qwen3_5_text": Refusal(_STATE, _LINEAR, trial=_SOME),
    "qwen3_next": Refusal(
        _STATE, {**_MOE, **_LINEAR, "shared_expert_intermediate_size": 32}, trial=_SOME
    ),
    "recurrent_gemma": Refusal(_STATE, {"num_hidden_layers": 3}),
    "rwkv": Refusal(_STATE, {}, trial=_SOME),
    "t5": Refusal("no decoder", {}),
    "xglm": Refusal(_OWN, {"num_layers": 2, "attention_heads": 4}, trial=_SOME),
}


def model_type(name: str) -> str:
    """Return the model type of a family: its name without the part in brackets."""
    return name.partition(" (")[0]


def changes(name: str) -> dict[str, Any]:
    """Return the settings of a family, running or refused, over `shrunk.SMALL`."""
    table: Mapping[str, Family | Refusal] = RUNNING if name in RUNNING else REFUSED
    return {"num_hidden_layers": 2, **table[name].changes}
