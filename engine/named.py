"""The model that a name means: which folder, with which weights, and how it is called then.

`builtin` and `seeded` are names of our own; anything else is a folder, a name on the hub or,
where weights are made up, a config.

Knows names and where models come from; refuses to know what runs them. Kept true: `load` returns
a model that is complete, or raises one sentence; `find` raises what can be known without weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

import torch
from transformers import PretrainedConfig, PreTrainedModel

from . import builtin, checkpoint, seeded, weights
from .checkpoint import Checkpoint

BUILTIN: Final = "builtin"
"""The name of the model that ships with the engine."""
SEEDED: Final = "seeded"
"""The name of the random one, whose text means nothing."""
_OURS: Final = {BUILTIN: builtin.DESCRIPTION, SEEDED: seeded.DESCRIPTION}


class Named(NamedTuple):
    """A model that is loaded."""

    name: str
    """What programs call it."""
    description: str
    found: Checkpoint
    """What its folder says besides."""
    model: PreTrainedModel


def find(name: str, *, is_dummy: bool) -> Checkpoint:
    """Return what there is under a name, before any weight is read.

    Args:
        name: A model folder, `owner/name` on the hub, `builtin` or `seeded`; with `is_dummy` a
            folder with a config, or such a file.
        is_dummy: Nobody will read its weights.

    Raises:
        EngineError: `model.not_found`, `model.invalid` or `model.unsupported`.
    """
    return checkpoint.read_dummy(name) if is_dummy else checkpoint.read(_locate(name))


def load(
    name: str,
    found: Checkpoint,
    config: PretrainedConfig,
    dtype: str,
    where: torch.device,
    *,
    is_dummy: bool,
) -> Named:
    """Load the model that was found, or make one of random weights.

    Args:
        name: As in `find`.
        found: What that returned.
        config: As in `weights.load`.
        dtype: As in `weights.load`.
        where: The device.
        is_dummy: As in `find`.

    Raises:
        EngineError: `model.invalid` or `model.unsupported`.
    """
    load_or_make = weights.make if is_dummy else weights.load
    model = load_or_make(found, config, dtype, str(where))
    if name in _OURS and not is_dummy:
        return Named(name, _OURS[name], found, model)
    description = _describe(model, is_dummy=is_dummy)
    return Named(_called(name, found.folder), description, found, model)


def _locate(name: str) -> Path:
    """Return the folder of a model that is read."""
    if name == BUILTIN:
        return builtin.intact()
    return seeded.cached() if name == SEEDED else checkpoint.locate(name)


def _called(name: str, folder: Path) -> str:
    """Return the name that programs use: the last part of the path or hub name."""
    if folder.is_file():  # a config of a dummy model
        return folder.parent.name if folder.name == "config.json" else folder.stem
    return Path(name).name if not Path(name).expanduser().is_dir() else folder.name


def _describe(model: PreTrainedModel, *, is_dummy: bool) -> str:
    millions = model.num_parameters() / 1e6
    what = f"{type(model).__name__}, {millions:,.1f} M parameters, {str(model.dtype)[6:]}"
    return f"{what}, dummy random weights: its text means nothing" if is_dummy else what
