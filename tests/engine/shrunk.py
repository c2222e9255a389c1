"""Shrunk random models as folders, and the judgement of greedy tokens against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from conure.engine.config import EngineConfig
from conure.engine.runner.backend import Backend
from conure.engine.runner.torch_runner import TorchModelRunner
from conure.engine.text import byte_tokenizer
from conure.kernels.planning.prefix_tree import MIN_SAVED_TOKENS

TIE = 1e-4
"""Where the reference's two best logits lie this close, either token is right."""

SMALL: dict[str, Any] = {
    "vocab_size": byte_tokenizer.VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": byte_tokenizer.EOS_IDS[0],
    "pad_token_id": byte_tokenizer.EOS_IDS[1],
}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""Settings of Llama 3's rotary embedding that change within a short context."""
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {},
    "mistral": {"sliding_window": 9},
    "gemma2": {"sliding_window": 9, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 20.0},
}


def config_of(family: str, **changes: Any) -> PretrainedConfig:
    """Return a family's config, shrunk; a change to `...` leaves the library's default."""
    settings = {**SMALL, **FAMILIES.get(family, {}), **changes}
    given = {name: value for name, value in settings.items() if value is not ...}
    config: PretrainedConfig = AutoConfig.for_model(family, **given)
    return config


def write(folder: Path, family: str, *, seed: int = 0, **changes: Any) -> Path:
    """Write a random model whose logits are wide, with the byte tokenizer; return `folder`."""
    config = config_of(family, **changes)
    model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]  # theirs
        config, dtype=torch.float32
    )
    widen(model, seed)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(3)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(byte_tokenizer.tokenizer_json())
    settings = {"chat_template": byte_tokenizer.CHAT_TEMPLATE, **byte_tokenizer.SPECIAL_TOKENS}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def widen(model: PreTrainedModel, seed: int = 0) -> None:
    """Give a model random weights so large that every token depends on its context."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:
                deviation = 1.5 * weight.shape[-1] ** -0.5
                weight.copy_(torch.randn(weight.shape, generator=generator) * deviation)
            else:
                weight.add_(0.1 * torch.randn(weight.shape, generator=generator))


def runner_on(
    folder: Path,
    device: str | Backend = "cpu",
    *,
    min_saved: int = MIN_SAVED_TOKENS,
    optimize: bool = True,
    **options: Any,
) -> TorchModelRunner:
    """Load a folder into a runner; float32 and one thread unless `options` differ."""
    backend = None if isinstance(device, str) else device
    if isinstance(device, str):
        options["device"] = device
    return TorchModelRunner(
        EngineConfig(model=str(folder), **{"dtype": "float32", "threads": 1, **options}),
        backend=backend,
        min_saved=min_saved,
        optimize=optimize,
    )


def load(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load a folder with transformers and eager attention."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=dtype, attn_implementation="eager"
    )
    loaded: PreTrainedModel = model.eval()
    return loaded


def count_ties(reference: PreTrainedModel, ids: list[int], num_prompt: int) -> int:
    """Assert that `ids[num_prompt:]` are the reference's greedy tokens; return its ties.

    The reference is forced along `ids` alone, in one forward pass.
    """
    with torch.inference_mode():
        logits = reference(torch.tensor([ids])).logits[0, num_prompt - 1 : -1]
    ties = 0
    for offset, (scores, token) in enumerate(zip(logits, ids[num_prompt:], strict=True)):
        if int(scores.argmax()) != token:
            gap = float(scores.max() - scores[token])
            assert gap <= TIE, f"token {offset}: {token} lies {gap} below the reference's best"
            ties += 1
    return ties


def with_bos(text: str) -> str:
    """Return a tokenizer.json that puts the end-of-text token before every text."""
    tokenizer = Tokenizer.from_str(text)
    marker = byte_tokenizer.END_OF_TEXT
    tokenizer.post_processor = TemplateProcessing(
        single=f"{marker} $A", special_tokens=[(marker, byte_tokenizer.SPECIAL_IDS[marker])]
    )
    return str(tokenizer.to_str())
