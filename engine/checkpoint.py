"""A model folder: what an engine tells the server about it, read without its weights.

The tokenizer's text, the chat template, special tokens, the ids that end a text and the one
that begins it. `locate` finds the folder of a name, on disk or on the model hub. `read_dummy`
makes do with a config, for weights that are made up. Only data is read: nothing in a folder
is executed, and a folder that asks for it is refused.

Knows files and JSON, no torch. Kept true: a `Checkpoint` has everything a Hello needs, or
reading it raised one sentence that says what is missing.

Errors, all `EngineError`: `model.not_found` (no such folder or hub name), `model.invalid`
(files missing or damaged), `model.unsupported` (needs code or file formats we do not load).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from . import bytelevel
from .api import EngineError


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a model folder says besides its weights."""

    folder: Path
    """A folder, or from `read_dummy` a config file, as transformers takes either."""
    config: dict[str, Any]
    """config.json as it stands."""
    tokenizer_json: str
    chat_template: str
    """Jinja source; empty where the folder has none."""
    special_tokens: dict[str, str]
    """Names that templates use (`bos_token`, ...) to their text."""
    bos_id: int | None
    """What the tokenizer puts before every text, None where it puts nothing."""
    eos_ids: tuple[int, ...]


def locate(model: str) -> Path:
    """Return the folder of a model: a path, or `owner/name` on the model hub.

    Raises:
        EngineError: `model.not_found` if there is no such folder, or no way to fetch it.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder.resolve()
    is_hub_name = model.count("/") == 1 and not model.startswith(("/", ".", "~"))
    if folder.is_file() or not is_hub_name:
        raise EngineError("model.not_found", f"no model folder at {model!r}")
    # Loaded on demand: a local folder needs no network client.
    from huggingface_hub import snapshot_download

    try:
        fetched = snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.jinja"])
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise EngineError(
            "model.not_found",
            f"{model!r} is no folder here and could not be fetched from the hub:"
            f" {reason[0] if reason else type(error).__name__}",
        ) from error
    return Path(fetched)


def read(folder: Path) -> Checkpoint:
    """Read a model folder.

    Raises:
        EngineError: `model.invalid` if a needed file is missing or damaged;
            `model.unsupported` if the folder needs code of its own, or has no safetensors.
    """
    config = _config(folder / "config.json")
    if not any(folder.glob("*.safetensors")):
        raise EngineError(
            "model.unsupported", f"{folder} has no .safetensors weights, other formats are not read"
        )
    if not (folder / "tokenizer.json").is_file():
        raise EngineError("model.invalid", f"{folder} has no tokenizer.json")
    return _with_tokenizer(folder, folder, config)


def read_dummy(path: str) -> Checkpoint:
    """Read what a model of random weights needs: a config, and a tokenizer where there is one.

    Without a tokenizer beside the config text is bytes, and ids behind those of `bytelevel`
    are written as numbers.

    Args:
        path: A folder with a config.json, or such a file under any name.

    Raises:
        EngineError: `model.not_found` or `model.invalid` if there is no config;
            `model.unsupported` if it needs code, or has no room for bytes.
    """
    found = Path(path).expanduser().resolve()
    if not found.exists():
        raise EngineError("model.not_found", f"no config at {path!r}")
    file = found / "config.json" if found.is_dir() else found
    config = _config(file)
    if (file.parent / "tokenizer.json").is_file():
        return _with_tokenizer(found, file.parent, config)
    size = config.get("vocab_size")
    if not isinstance(size, int) or size < bytelevel.VOCAB_SIZE:
        raise EngineError(
            "model.unsupported",
            f"{found} comes without a tokenizer.json, and its vocab_size ({size}) has no room for"
            f" the {bytelevel.VOCAB_SIZE} ids of bytes",
        )
    return Checkpoint(
        folder=found,
        config=config,
        tokenizer_json=bytelevel.tokenizer_json(size),
        chat_template=bytelevel.CHAT_TEMPLATE,
        special_tokens=dict(bytelevel.SPECIAL_TOKENS),
        bos_id=None,
        eos_ids=bytelevel.EOS_IDS,
    )


def _config(path: Path) -> dict[str, Any]:
    config = _json_object(path)
    if config is None:
        raise EngineError("model.invalid", f"{path.parent} has no {path.name}: not a model folder")
    if "auto_map" in config:
        raise EngineError(
            "model.unsupported",
            f"{path} needs code of its own (auto_map), which is never run",
        )
    return config


def _with_tokenizer(found: Path, folder: Path, config: dict[str, Any]) -> Checkpoint:
    """Return a checkpoint at `found` with what the files in `folder` say about text."""
    tokenizer_path = folder / "tokenizer.json"
    tokenizer_json = tokenizer_path.read_text(encoding="utf-8")
    tokenizer_config = _json_object(folder / "tokenizer_config.json") or {}
    return Checkpoint(
        folder=found,
        config=config,
        tokenizer_json=tokenizer_json,
        chat_template=_chat_template(folder, tokenizer_config),
        special_tokens=_special_tokens(folder, tokenizer_config),
        bos_id=_bos_id(tokenizer_json, tokenizer_path),
        eos_ids=_eos_ids(_json_object(folder / "generation_config.json") or {}, config),
    )


def _json_object(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file, None where there is no such file."""
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError, RecursionError) as error:
        raise EngineError("model.invalid", f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise EngineError("model.invalid", f"{path} must hold a JSON object")
    return content


def _chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template") or ""
    if isinstance(template, list):
        named = {one["name"]: one["template"] for one in template}
        template = named.get("default", "")
    return str(template)


def _special_tokens(folder: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    merged = {**(_json_object(folder / "special_tokens_map.json") or {}), **tokenizer_config}
    found = {}
    for name, token in merged.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _bos_id(tokenizer_json: str, path: Path) -> int | None:
    """Return the one id that the tokenizer's own post-processing puts before a text."""
    try:
        tokenizer = Tokenizer.from_str(tokenizer_json)
    # The library raises bare Exception for any damage.
    except Exception as error:
        raise EngineError("model.invalid", f"{path} is no tokenizer: {error}") from error
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a", add_special_tokens=True).ids
    if len(whole) > len(plain) and whole[1 : 1 + len(plain)] == plain:
        return int(whole[0])
    return None


def _eos_ids(generation_config: dict[str, Any], config: dict[str, Any]) -> tuple[int, ...]:
    """Return the ids that end a text, as generation would use them."""
    found = generation_config.get("eos_token_id")
    if found is None:
        found = config.get("eos_token_id")
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (int(found),)
