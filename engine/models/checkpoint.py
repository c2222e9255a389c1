"""Model folders: tokenizer, chat template, special tokens and config, without the weights.

`locate` finds the folder of a name, on disk or on the Hugging Face Hub. `read_dummy` needs a config
only, for random weights. Only data is read: nothing in a folder is executed.

Invariants: a `Checkpoint` has everything that an engine reports when it starts (`Hello`).
Otherwise reading it raises one sentence with the missing part.

Errors, all `EngineError`: `model.not_found` (no such folder or hub name), `model.invalid` (files
missing or damaged), `model.unsupported` (another file format, or too small a vocabulary).
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from ..protocol import EngineError
from ..text import byte_tokenizer

_log: Final = logging.getLogger(__name__)
_READ_FILES: Final = ("*.json", "*.safetensors", "*.jinja")
_UNREAD_FILES: Final = ("*/*", "consolidated*")
"""Files in subfolders, and a second copy of the weights, in the format of their authors."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The contents of a model folder, without its weights."""

    path: Path
    """A folder, or a config file if `read_dummy` read one; transformers accepts both."""
    config: dict[str, Any]
    """The content of config.json."""
    tokenizer_json: str
    """The content of tokenizer.json, without padding and truncation."""
    chat_template: str
    """Jinja source; empty if the folder has none."""
    special_tokens: dict[str, str]
    """Text of special tokens by their names in templates (`bos_token`, ...)."""
    bos_id: int | None
    """The id that the tokenizer adds before every text, if it adds one."""
    eos_ids: tuple[int, ...]


def locate(model: str) -> Path:
    """Return the folder of a model: a path, or `owner/name` on the model hub.

    Raises:
        EngineError: `model.not_found` if the folder does not exist and cannot be fetched.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder.resolve()
    is_hub_name = model.count("/") == 1 and not model.startswith(("/", ".", "~"))
    if folder.is_file() or not is_hub_name:
        hint = "" if "/" in model else "; a model of the Hugging Face Hub has the form owner/name"
        raise EngineError("model.not_found", f"model folder {model!r} does not exist{hint}")
    try:
        return download(model)
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise EngineError(
            "model.not_found",
            f"{model!r} is not a local folder, and fetching it from the hub failed:"
            f" {reason[0] if reason else type(error).__name__}",
        ) from error


def download(name: str, *, is_offline: bool = False) -> Path:
    """Return the folder of `owner/name` of the model hub, with the files that an engine reads.

    Args:
        name: The model.
        is_offline: Fetch nothing.

    Raises:
        Exception: those of `huggingface_hub.snapshot_download`.
    """
    # Imported on demand: a local folder needs no network client.
    from huggingface_hub import snapshot_download

    fetched = snapshot_download(
        name,
        allow_patterns=[*_READ_FILES],
        ignore_patterns=[*_UNREAD_FILES],
        local_files_only=is_offline,
    )
    return Path(fetched)


def read(folder: Path) -> Checkpoint:
    """Read a model folder.

    Raises:
        EngineError: `model.invalid` if a needed file is missing or damaged;
            `model.unsupported` if the folder has no safetensors.
    """
    config = config_content(folder / "config.json")
    if not any(folder.glob("*.safetensors")):
        raise EngineError(
            "model.unsupported",
            f"{folder} has no .safetensors weights; other formats are not supported",
        )
    if not (folder / "tokenizer.json").is_file():
        raise EngineError("model.invalid", f"{folder} has no tokenizer.json")
    return _with_tokenizer(folder, folder, config)


def read_dummy(path: str) -> Checkpoint:
    """Read the config, and the tokenizer if the folder has one, for a model of random weights.

    Without a tokenizer, text is bytes, and ids above those of `byte_tokenizer` are rendered as
    numbers.

    Args:
        path: A folder with a config.json, or such a file under any name.

    Raises:
        EngineError: `model.not_found` or `model.invalid` if the config is missing or
            damaged; `model.unsupported` if its vocabulary is too small.
    """
    # Not resolved: a file in the cache of the Hub is a link, and its tokenizer is next to the link.
    found = Path(os.path.abspath(Path(path).expanduser()))
    if not found.exists():
        raise EngineError("model.not_found", f"config {path!r} does not exist")
    file = found / "config.json" if found.is_dir() else found
    config = config_content(file)
    if (file.parent / "tokenizer.json").is_file():
        return _with_tokenizer(found, file.parent, config)
    size = config.get("vocab_size")
    if not isinstance(size, int) or size < byte_tokenizer.VOCAB_SIZE:
        raise EngineError(
            "model.unsupported",
            f"{found} has no tokenizer.json, and its vocab_size ({size}) is too small for the"
            f" {byte_tokenizer.VOCAB_SIZE} ids of the byte tokenizer",
        )
    return Checkpoint(
        path=found,
        config=config,
        tokenizer_json=byte_tokenizer.tokenizer_json(size),
        chat_template=byte_tokenizer.CHAT_TEMPLATE,
        special_tokens=dict(byte_tokenizer.SPECIAL_TOKENS),
        bos_id=None,
        eos_ids=byte_tokenizer.EOS_IDS,
    )


def config_content(path: Path) -> dict[str, Any]:
    """Return the content of a config.json.

    Raises:
        EngineError: `model.invalid` if it is missing or damaged.
    """
    config = _json_object(path)
    if config is None:
        raise EngineError(
            "model.invalid", f"{path.parent} has no {path.name}; it is not a model folder"
        )
    return config


def dtype_name(config: dict[str, Any], dtype: str, device: str) -> str:
    """Return the torch dtype of the weights, by name.

    Args:
        config: The content of config.json.
        dtype: The dtype, or `auto`: the folder's own if it has 16 bits and the device computes in
            it, else float32. A CPU does not compute in float16.
        device: The device of the weights.
    """
    if dtype != "auto":
        return dtype
    configured = config.get("dtype", config.get("torch_dtype"))
    kept = ("bfloat16",) if device == "cpu" else ("bfloat16", "float16")
    return str(configured) if configured in kept else "float32"


def _with_tokenizer(found: Path, folder: Path, config: dict[str, Any]) -> Checkpoint:
    """Return the checkpoint at `found` with the tokenizer files in `folder`."""
    tokenizer_json, tokenizer = _tokenizer(folder / "tokenizer.json")
    tokenizer_config = _json_object(folder / "tokenizer_config.json") or {}
    special_tokens = _special_tokens(folder, tokenizer_config)
    configured = _eos_ids(_json_object(folder / "generation_config.json") or {}, config)
    named = _special_id(tokenizer, special_tokens.get("eos_token"))
    return Checkpoint(
        path=found,
        config=config,
        tokenizer_json=tokenizer_json,
        chat_template=_chat_template(folder, tokenizer_config),
        special_tokens=special_tokens,
        bos_id=_bos_id(tokenizer),
        eos_ids=configured if named is None or named in configured else (*configured, named),
    )


def _json_object(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file, None if the file does not exist."""
    if not path.is_file():
        return None
    text = _text(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EngineError("model.invalid", f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise EngineError("model.invalid", f"{path} must contain a JSON object")
    return content


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EngineError("model.invalid", f"{path} cannot be read: {error}") from error


def _chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return _text(path)
    template = tokenizer_config.get("chat_template") or ""
    if isinstance(template, list):
        try:
            named = {each["name"]: each["template"] for each in template}
        except (KeyError, TypeError) as error:
            path = folder / "tokenizer_config.json"
            message = f"{path} has a list of chat templates without names or texts"
            raise EngineError("model.invalid", message) from error
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


def _tokenizer(path: Path) -> tuple[str, Tokenizer]:
    """Return a tokenizer.json and its tokenizer, both without padding and truncation.

    Some folders keep the padding of their training. It would apply to every single text, too.
    """
    tokenizer_json = _text(path)
    try:
        tokenizer = Tokenizer.from_str(tokenizer_json)
    # The library raises bare Exception.
    except Exception as error:
        raise EngineError("model.invalid", f"{path} is not a tokenizer: {error}") from error
    if tokenizer.padding is not None or tokenizer.truncation is not None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        content = {**json.loads(tokenizer_json), "padding": None, "truncation": None}
        tokenizer_json = json.dumps(content, ensure_ascii=False)
    return tokenizer_json, tokenizer


def _bos_id(tokenizer: Tokenizer) -> int | None:
    """Return the id that the tokenizer's post-processing adds before a text, if it is one id.

    Of several ids, none is added: the model was not trained on one of them alone. Which ids precede
    a text is unknown if the tokenizer has no ids for the text itself: the first one counts then.
    """
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    processed = tokenizer.encode("a", add_special_tokens=True).ids
    if not plain:
        return int(processed[0]) if processed else None
    starts = range(len(processed) - len(plain) + 1)
    num_added = next((at for at in starts if processed[at : at + len(plain)] == plain), 0)
    if num_added > 1:
        _log.warning(
            "the tokenizer adds %d tokens before a text, %s, and only one is supported: prompts "
            "begin without them, which may lower the quality of outputs; begin a prompt with "
            '{"text": ..., "special": true}',
            num_added,
            [tokenizer.id_to_token(token_id) for token_id in processed[:num_added]],
        )
    return int(processed[0]) if num_added == 1 else None


def _eos_ids(generation_config: dict[str, Any], config: dict[str, Any]) -> tuple[int, ...]:
    """Return the configured ids that end a text, as transformers' generation does."""
    found = generation_config.get("eos_token_id")
    if found is None:
        found = config.get("eos_token_id")
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (int(found),)


def _special_id(tokenizer: Tokenizer, text: str | None) -> int | None:
    """Return the id of a special token, None if the tokenizer has no such token.

    A token that is not special may be part of a text.
    """
    added = tokenizer.get_added_tokens_decoder().items()
    return next((id_ for id_, token in added if token.special and token.content == text), None)
