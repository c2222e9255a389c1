"""Why a model folder cannot be served, found out without loading its weights.

Only files are read, and of weights only their headers. Neither torch nor transformers is imported.

Invariants: a folder that is refused here is refused by an engine. An engine may refuse more:
unknown architectures, and weights that do not match the config.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from safetensors import SafetensorError, safe_open

from ..protocol import EngineError
from . import checkpoint

_SINGLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
"""Maps the names of tensors to files, if the weights are in several."""


def problem_of(folder: Path) -> str | None:
    """Return why an engine cannot load a model folder, None if nothing is wrong."""
    try:
        checkpoint.read(folder)
        for path in weight_files(folder):
            _check_weights(path)
    except EngineError as error:
        return error.message
    except OSError as error:
        return f"{folder} cannot be read: {error}"
    return None


def downloaded_folder(name: str) -> Path | None:
    """Return the folder of `owner/name` of the model hub; None if it was not downloaded, or not all
    of it.
    """
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return checkpoint.download(name, is_offline=True)
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def has_chat_template(folder: Path) -> bool:
    """Return whether a model folder that can be served contains a chat template."""
    return checkpoint.read(folder).chat_template != ""


def weight_files(folder: Path) -> list[Path]:
    """Return the files that are loaded: a single one, or those in an index.

    A config may name either; otherwise they have their usual names.

    Raises:
        EngineError: `model.invalid` if there is neither.
    """
    named = checkpoint.config_content(folder / "config.json").get("transformers_weights")
    usual = _SINGLE if (folder / _SINGLE).is_file() else _INDEX
    chosen = folder / str(named or usual)
    if chosen.suffix != ".json":
        return [chosen]
    try:
        files = sorted(set(json.loads(chosen.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = "" if named else f"{folder} has no {_SINGLE}, and "
        message = f"{reason}{chosen} cannot be read: {error}"
        raise EngineError("model.invalid", message) from error
    return [folder / str(name) for name in files]


def size_on_disk(folder: Path) -> int:
    """Return the bytes of the files that are loaded.

    Raises:
        EngineError: as `weight_files`.
        OSError: if a file cannot be found.
    """
    return sum(path.stat().st_size for path in weight_files(folder))


def size_in_memory(folder: Path, device: str) -> int:
    """Return the bytes that the weights take on a device, if their dtype is `auto`.

    Raises:
        EngineError: as `weight_files`.
        OSError: if a file cannot be found.
    """
    config = checkpoint.config_content(folder / "config.json")
    kept, chosen = (checkpoint.dtype_name(config, "auto", each) for each in ("cuda", device))
    is_widened = (kept, chosen) == ("float16", "float32")
    return size_on_disk(folder) * (2 if is_widened else 1)


def _check_weights(path: Path) -> None:
    """Open a file of weights, which compares its header with its size.

    Raises:
        EngineError: `model.invalid` if the file is missing or damaged.
    """
    try:
        with safe_open(path, framework="numpy"):
            pass
    except (OSError, SafetensorError) as error:
        message = f"cannot load {path}: {error}; is the download complete?"
        raise EngineError("model.invalid", message) from error
