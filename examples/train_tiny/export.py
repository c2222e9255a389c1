"""Export a checkpoint of `train.py` as a model folder that any engine can load.

    python examples/train_tiny/export.py CHECKPOINT_FOLDER MODEL_FOLDER

The folder holds the config, the generation config, the tokenizer with its chat template, the
weights, and digests of all files. The weights are stored in bfloat16, the compute type of training.
The config requests float32, in which a CPU is exact.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from conure.engine.models.builtin import DIGESTS
from conure.engine.text.byte_tokenizer import CHAT_TEMPLATE, END_OF_TEXT, TURN_END
from train import CONTEXT_LEN, Training


def export(source: Path, folder: Path) -> None:
    """Write the model folder, replacing existing files."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    ends = {
        "eos_token_id": [tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)],
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
    }
    training = Training(seed=0)
    training.restore(source / "checkpoint.pt")
    names = [name for name, _ in training.model.named_parameters()]
    weights = {
        name: master.to(torch.bfloat16).contiguous()
        for name, master in zip(names, training.masters, strict=True)
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config: dict[str, Any] = training.model.config.to_diff_dict()
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": "float32", "bos_token_id": None}
    config.pop("transformers_version", None)
    files = {
        "config.json": config | ends,
        "generation_config.json": ends,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": CHAT_TEMPLATE,
            "model_max_length": CONTEXT_LEN,
            "eos_token": TURN_END,
            "pad_token": END_OF_TEXT,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    shutil.copy(source / "tokenizer.json", folder / "tokenizer.json")
    (folder / "model.safetensors").chmod(0o644)
    digests = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((folder / "model.safetensors", *(folder / name for name in files)))
    }
    path = folder / "tokenizer.json"
    digests[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    (folder / DIGESTS).write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Parse the arguments and export."""
    parser = argparse.ArgumentParser(description="write the model folder of a checkpoint")
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    export(options.source, options.folder)


if __name__ == "__main__":
    main()
