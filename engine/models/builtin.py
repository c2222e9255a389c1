"""The built-in model: a small Llama that ships with the engine, so that it works offline.

It answers short questions about short reports. Its card (`small/README.md`) lists them, with the
accuracy and the training. It is an ordinary model folder; only its location and the digests of its
files are special, so that damaged files are rejected.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Final

from ..protocol import EngineError

FOLDER: Final = Path(__file__).parents[1] / "small"
DIGESTS: Final = "digests.json"
"""Maps the model's file names to SHA-256 digests."""
UNCHECKED: Final = {DIGESTS, "README.md"}
"""Files in the folder that are not part of the model."""
DESCRIPTION: Final = "small Llama trained on short reports: facts, lists, yes or no, copies"


def verified_folder(folder: Path = FOLDER) -> Path:
    """Return the folder of the built-in model after checking its files.

    Raises:
        EngineError: `model.invalid` if a file is missing, changed or unexpected.
    """
    try:
        digests: dict[str, str] = json.loads((folder / DIGESTS).read_text(encoding="utf-8"))
        found = {path.name for path in folder.iterdir() if path.name[0] != "."} - UNCHECKED
        for name in sorted(found ^ set(digests)):
            problem = "unexpected file" if name in found else "missing"
            raise EngineError("model.invalid", _damaged(folder / name, problem))
        for name, digest in digests.items():
            if hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest:
                raise EngineError("model.invalid", _damaged(folder / name, "changed"))
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise EngineError("model.invalid", _damaged(folder, type(error).__name__)) from error
    return folder


def _damaged(path: Path, problem: str) -> str:
    return f"the built-in model is damaged ({path}: {problem}); reinstall conure"
