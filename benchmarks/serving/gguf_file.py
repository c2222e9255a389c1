"""Write the bfloat16 weights of a Qwen2 folder as GGUF, for llama.cpp: `gguf_file.py MODEL`.

Runs under a Python that has `gguf`. The file has no vocabulary; prompts are ids.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    **{
        f"self_attn.{name}_proj.{part}": f"attn_{name}.{part}"
        for name in "qkv"
        for part in ("weight", "bias")
    },
}
_OTHERS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write(model: Path) -> Path:
    """Write MODEL/model.gguf if there is none; return its path."""
    path = model / "model.gguf"
    if path.exists():
        return path
    import gguf  # type: ignore[import-not-found,unused-ignore]

    config = json.loads((model / "config.json").read_text())
    if config["model_type"] != "qwen2":
        raise ValueError(f"only qwen2 can be written as GGUF, got {config['model_type']!r}")
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    for name, bits in _tensors(model / "model.safetensors"):
        if bits.ndim == 1:  # llama.cpp adds norms and biases in float32
            writer.add_tensor(_gguf_name(name), (bits.astype(np.uint32) << 16).view(np.float32))
        else:
            dtype = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(_gguf_name(name), bits.view(np.uint8), raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(path: Path) -> list[tuple[str, np.ndarray[Any, np.dtype[np.uint16]]]]:
    """Return the names and the bits of all tensors of a safetensors file."""
    data = np.memmap(path, np.uint8, "r")
    begin = 8 + int(data[:8].view(np.uint64)[0])
    header = json.loads(bytes(data[8:begin]))
    header.pop("__metadata__", None)
    found = []
    for name, entry in header.items():
        if entry["dtype"] != "BF16":
            raise ValueError(f"{name} must be BF16, got {entry['dtype']}")
        first, end = entry["data_offsets"]
        bits = np.frombuffer(data[begin + first : begin + end].tobytes(), np.uint16)
        found.append((name, bits.reshape(entry["shape"])))
    return found


def _gguf_name(name: str) -> str:
    if name in _OTHERS:
        return _OTHERS[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_LAYER[rest]}"


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
