"""The built-in model: a small Llama that ships with the engine, so that answers need no network.

It answers short questions about short reports, and its card (`small/README.md`) says which,
how often it is right, and how it was trained. It is an ordinary model folder, loaded as any
other; what is particular to it is only where it lies and that its files are known, so that
a damaged one is refused instead of answering nonsense.

Knows files and their digests; refuses to know tensors.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Final

from .api import EngineError

FOLDER: Final = Path(__file__).parent / "small"
DIGESTS: Final = "digests.json"
"""File name to SHA-256 of what the model is made of."""
UNREAD: Final = {DIGESTS, "README.md"}
"""Files of the folder that no model is made of."""
DESCRIPTION: Final = "small Llama trained on short reports: facts, lists, yes or no, copies"


def intact(folder: Path = FOLDER) -> Path:
    """Return the folder of the built-in model, if its files are what was shipped.

    Raises:
        EngineError: `model.invalid` if a file is missing, has other content, or is one too many.
    """
    try:
        digests: dict[str, str] = json.loads((folder / DIGESTS).read_text(encoding="utf-8"))
        found = {path.name for path in folder.iterdir() if path.name[0] != "."} - UNREAD
        for name in sorted(found ^ set(digests)):
            what = "not shipped" if name in found else "missing"
            raise EngineError("model.invalid", _damaged(folder / name, what))
        for name, digest in digests.items():
            if hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest:
                raise EngineError("model.invalid", _damaged(folder / name, "other content"))
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise EngineError("model.invalid", _damaged(folder, type(error).__name__)) from error
    return folder


def _damaged(path: Path, what: str) -> str:
    return f"the built-in model is damaged ({path}: {what}); install conure again"
