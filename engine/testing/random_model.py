"""The model `seeded`: a small random Llama over bytes, for exactness tests and benchmarks.

Its text means nothing, but it is a real model: an ordinary transformers folder, whose answers
depend on every byte of the prompt. The weights derive from integers, so every machine creates the
same file.

The scales are chosen so that greedy text neither repeats one byte nor depends on rounding.
Attention and MLP weigh more than the residual of the last byte, and the logits are wide
(`LOGIT_SCALE`), so that the two best differ by more than float32 noise. The output rows of
letters, digits and spaces are larger than the others, so that the output looks like words and is
valid UTF-8.

transformers is not needed to write the folder.
Invariants: a folder under its final name is complete.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from conure.cache_folder import cache_folder

from ..sampling.batch import uniforms
from ..text import byte_tokenizer

VERSION: Final = "2"
"""Part of the folder's name in the cache. Increase it when the files change."""
DESCRIPTION: Final = "small seeded random Llama over bytes: its text means nothing"

HIDDEN: Final = 256
LAYERS: Final = 4
HEADS: Final = 4
KV_HEADS: Final = 2
HEAD_DIM: Final = 64
INTERMEDIATE: Final = 512
CONTEXT_LEN: Final = 8192

LOGIT_SCALE: Final = 6.0
"""Standard deviation of the logits of frequent bytes."""
_RARE: Final = 0.1
"""Scale of the output rows of unprintable bytes, relative to letters."""


def create(folder: Path, seed: int = 0) -> Path:
    """Write the model as a folder of config, tokenizer and safetensors; return `folder`.

    An existing folder is not changed, whatever its seed. Several processes may create the same
    folder at once.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _write(scratch, seed)
        scratch.chmod(0o755)
        os.rename(scratch, folder)
    except OSError:
        # Renaming onto a non-empty folder fails: another process was faster.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def create_cached() -> Path:
    """Return the model's folder in the user's cache, and create it if necessary.

    If the cache is not writable, return a new temporary folder.
    """
    name = f"seeded-{VERSION}"
    try:
        return create(cache_folder() / name)
    except OSError:
        return create(Path(tempfile.mkdtemp(prefix="conure-")) / name)


def _write(folder: Path, seed: int) -> None:
    end_of_text = byte_tokenizer.SPECIAL_IDS[byte_tokenizer.END_OF_TEXT]
    files: dict[str, str | dict[str, object]] = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "float32",
            "vocab_size": byte_tokenizer.VOCAB_SIZE,
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "max_position_embeddings": CONTEXT_LEN,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": list(byte_tokenizer.EOS_IDS),
            "pad_token_id": end_of_text,
        },
        "generation_config.json": {
            "eos_token_id": list(byte_tokenizer.EOS_IDS),
            "pad_token_id": end_of_text,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": byte_tokenizer.CHAT_TEMPLATE,
            "model_max_length": CONTEXT_LEN,
            **byte_tokenizer.SPECIAL_TOKENS,
        },
        "tokenizer.json": byte_tokenizer.tokenizer_json(),
    }
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content, indent=1)
        (folder / name).write_text(text, encoding="utf-8")
    save_file(
        {name: torch.from_numpy(weight) for name, weight in _weights(seed)},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def _weights(seed: int) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield every tensor of the model by its name in transformers."""
    shapes = _shapes()
    for stream, (name, (shape, deviation)) in enumerate(shapes.items()):
        if len(shape) == 1:
            yield name, np.ones(shape, dtype=np.float32)
            continue
        flat = uniforms(seed, stream, shape[0] * shape[1])
        # Uniform on an interval with this standard deviation.
        weight = ((2 * flat - 1) * (3**0.5 * deviation)).astype(np.float32).reshape(shape)
        if name == "lm_head.weight":
            weight *= _output_scale()[:, None]
        yield name, weight


def _shapes() -> dict[str, tuple[tuple[int, ...], float]]:
    """Return shape and standard deviation of every tensor. Vectors are norms, all ones."""
    query, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    unit = HIDDEN**-0.5
    layer = {
        "input_layernorm": ((HIDDEN,), 0.0),
        "self_attn.q_proj": ((query, HIDDEN), 1.6 * unit),
        "self_attn.k_proj": ((kv, HIDDEN), 1.6 * unit),
        "self_attn.v_proj": ((kv, HIDDEN), 2.0 * unit),
        "self_attn.o_proj": ((HIDDEN, query), 2.0 * query**-0.5),
        "post_attention_layernorm": ((HIDDEN,), 0.0),
        "mlp.gate_proj": ((INTERMEDIATE, HIDDEN), 1.5 * unit),
        "mlp.up_proj": ((INTERMEDIATE, HIDDEN), 1.5 * unit),
        "mlp.down_proj": ((HIDDEN, INTERMEDIATE), 1.5 * INTERMEDIATE**-0.5),
    }
    shapes: dict[str, tuple[tuple[int, ...], float]] = {
        "model.embed_tokens.weight": ((byte_tokenizer.VOCAB_SIZE, HIDDEN), 1.0)
    }
    for index in range(LAYERS):
        for name, shape in layer.items():
            shapes[f"model.layers.{index}.{name}.weight"] = shape
    shapes["model.norm.weight"] = ((HIDDEN,), 0.0)
    shapes["lm_head.weight"] = ((byte_tokenizer.VOCAB_SIZE, HIDDEN), LOGIT_SCALE * unit)
    return shapes


def _output_scale() -> NDArray[np.float32]:
    """Return the factor of each token's output row: printable bytes become frequent."""
    scale = np.full(byte_tokenizer.VOCAB_SIZE, _RARE, dtype=np.float32)
    scale[list(b"abcdefghijklmnopqrstuvwxyz ")] = 1.0
    scale[list(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,;:!?-'")] = 0.7
    return scale
