"""Finding and loading models by name.

`builtin` and `seeded` are Conure's own models. Any other name is a folder, a model on the Hugging
Face Hub, or a config for random weights.

Invariants: `find` raises every error that can be detected without weights. `load` returns a
complete model or raises one sentence.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

from ..protocol import ModelPurpose
from ..testing import random_model
from . import builtin, checkpoint, llama, llama_config
from .checkpoint import Checkpoint
from .llama import Decoder, LlamaLikeDecoder
from .llama_config import DecoderConfig, LlamaConfig

BUILTIN: Final = "builtin"
"""The name of the model that ships with the engine."""
SEEDED: Final = "seeded"
"""The name of the small random model."""


class _OwnModel(NamedTuple):
    """A model of the package."""

    description: str
    purpose: ModelPurpose


_OWN_MODELS: Final = {
    BUILTIN: _OwnModel(builtin.DESCRIPTION, "demonstration"),
    SEEDED: _OwnModel(random_model.DESCRIPTION, "test"),
}


class LoadedModel(NamedTuple):
    """A loaded model."""

    name: str
    """The name that programs use."""
    description: str
    checkpoint: Checkpoint
    model: Decoder
    purpose: ModelPurpose
    aliases: tuple[str, ...] = ()
    """Other names that programs may use: `owner/name` of a model of the hub."""


def find(name: str, *, is_dummy: bool) -> Checkpoint:
    """Read the checkpoint of a name, without weights.

    Args:
        name: A model folder, `owner/name` on the hub, `builtin` or `seeded`. With `is_dummy`, a
            config file or its folder.
        is_dummy: The weights will be random.

    Raises:
        EngineError: `model.not_found`, `model.invalid` or `model.unsupported`.
    """
    return checkpoint.read_dummy(name) if is_dummy else checkpoint.read(_locate(name))


def read_config(source: Checkpoint, *, is_dummy: bool) -> DecoderConfig:
    """Return the structure of a checkpoint's model.

    Raises:
        EngineError: `model.unsupported` if the model cannot run.
    """
    # Only transformers initializes random weights.
    config = None if is_dummy else llama_config.read(source.config)
    if config is not None:
        return config
    # `weights` imports transformers, which takes half of an engine's start.
    from . import weights

    return weights.read_config(source)


def load(
    name: str,
    source: Checkpoint,
    config: DecoderConfig,
    dtype: str,
    device: str,
    *,
    is_dummy: bool,
) -> LoadedModel:
    """Load the weights of a checkpoint, or create random ones.

    Args:
        name: The name that `source` was found by.
        source: The result of `find`.
        config: The result of `read_config` for it.
        dtype: As in `checkpoint.dtype_name`.
        device: The device of the weights.
        is_dummy: As in `find`.

    Raises:
        EngineError: `model.invalid` or `model.unsupported`.
    """
    model = _load(source, config, dtype, device, is_dummy=is_dummy)
    if name in _OWN_MODELS and not is_dummy:
        own = _OWN_MODELS[name]
        return LoadedModel(name, own.description, source, model, own.purpose)
    description = _describe(model, is_dummy=is_dummy)
    purpose: ModelPurpose = "test" if is_dummy else "general"
    public = _public_name(name, source.path)
    is_path = is_dummy or Path(name).expanduser().exists()
    aliases = () if is_path or public == name else (name,)
    return LoadedModel(public, description, source, model, purpose, aliases)


def _load(
    source: Checkpoint, config: DecoderConfig, dtype: str, device: str, *, is_dummy: bool
) -> Decoder:
    """Load with `llama` if config and weights are Llama-like, otherwise with transformers."""
    if isinstance(config, LlamaConfig):
        assert not is_dummy, "`read_config` has no LlamaConfig for random weights"
        model = llama.load(source, config, dtype, device)
        if model is not None:
            return model
    from . import weights  # see `read_config`

    transformers_config = weights.read_config(source) if isinstance(config, LlamaConfig) else config
    load_or_make = weights.make if is_dummy else weights.load
    return load_or_make(source, transformers_config, dtype, device)


def _locate(name: str) -> Path:
    """Return the folder of a model."""
    if name == BUILTIN:
        return builtin.verified_folder()
    return random_model.create_cached() if name == SEEDED else checkpoint.locate(name)


def _public_name(name: str, path: Path) -> str:
    """Return the name that programs use: the last part of the given path or hub name.

    Links are not followed, so that a link gives a model another name.
    """
    given = Path(os.path.abspath(Path(name).expanduser()))
    if path.is_file():  # the config of a dummy model
        return given.parent.name if given.name == "config.json" else given.stem
    return given.name


def _describe(model: Decoder, *, is_dummy: bool) -> str:
    is_llama_like = isinstance(model, LlamaLikeDecoder)
    name = model.config.architecture if is_llama_like else type(model).__name__
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    description = f"{name}, {millions:,.1f} M parameters, {str(model.dtype).removeprefix('torch.')}"
    return f"{description}, random weights: its text means nothing" if is_dummy else description
