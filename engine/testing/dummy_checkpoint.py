"""Write a model with random weights to a folder.

Usage: `python -m conure.engine.testing.dummy_checkpoint CONFIG FOLDER`.

The weights equal those of `--dummy-weights CONFIG` on a CPU with the same dtype and seed, so that
other programs that read Hugging Face folders can be measured on the same model. If the config has
no tokenizer, the folder gets the byte tokenizer.

Exit codes: 0 on success, 1 with one line on stderr if the folder cannot be written, 2 for wrong
arguments.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any, Final

from transformers import GenerationConfig

from ..models import checkpoint, weights
from ..protocol import EngineError
from ..text import byte_tokenizer

_TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def write(config: str, folder: Path, *, dtype: str = "auto", seed: int = weights.SEED) -> Path:
    """Write a model of random weights; return `folder`.

    Args:
        config: A folder with a config.json, or such a file under any name.
        folder: Created; must not exist.
        dtype: `float32`, `bfloat16`, or `auto`: bfloat16 if the config requests it.
        seed: Seed of the weights.

    Raises:
        EngineError: `engine.bad_option` if the folder exists; otherwise as `weights.make` and
            `checkpoint.read_dummy`.
    """
    if folder.exists():
        raise EngineError("engine.bad_option", f"{folder} already exists")
    found = checkpoint.read_dummy(config)
    # Any, because transformers types the methods of models as modules.
    model: Any = weights.make(found, weights.read_config(found), dtype, seed=seed)
    source = found.path if found.path.is_dir() else found.path.parent
    if not (source / "tokenizer.json").is_file():
        ends = list(found.eos_ids)
        model.config.eos_token_id = ends
        model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]  # theirs
            eos_token_id=ends, pad_token_id=ends[-1]
        )
    model.save_pretrained(folder)
    if not (source / "tokenizer.json").is_file():
        _write_tokenizer(folder, found)
        return folder
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    return folder


def _write_tokenizer(folder: Path, found: checkpoint.Checkpoint) -> None:
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": byte_tokenizer.CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        **byte_tokenizer.SPECIAL_TOKENS,
    }
    (folder / "tokenizer.json").write_text(found.tokenizer_json, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Write one folder; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m conure.engine.testing.dummy_checkpoint", description=__doc__
    )
    parser.add_argument("config", metavar="CONFIG", help="config.json or its folder")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder to create")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--seed", type=int, default=weights.SEED)
    options = parser.parse_args(arguments)
    try:
        write(options.config, options.folder, dtype=options.dtype, seed=options.seed)
    except (EngineError, OSError) as error:
        sys.stderr.write(f"conure-dummy: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
