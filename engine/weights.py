"""A transformers decoder with its weights in place: read from a folder, or made up.

`load` reads safetensors. `make` draws every weight from a seed instead, on the device and
without writing a file: for benchmarks of a model's shape, whose text means nothing.

Knows transformers, folders and devices; refuses to know caches, steps and tokens. Kept true:
what comes back attends through the hook of `architecture`, is in evaluation mode and needs
no gradient; nothing in a folder is executed.

Errors, all `EngineError`: `model.invalid` for weights that are damaged or not all there,
`model.unsupported` for what cannot be computed rightly.
"""

from __future__ import annotations

import copy
import re
from itertools import chain
from typing import Any, Final

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from . import architecture
from .api import EngineError
from .checkpoint import Checkpoint

SEED: Final = 0
_LOCAL: Final[dict[str, Any]] = {"local_files_only": True, "trust_remote_code": False}
_FAILURES: Final = (
    *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError),
    *(OSError, RuntimeError, SafetensorError),
)
"""How model classes and their loaders say that a config or a file is wrong."""
_MAX_REASON: Final = 300


def load(
    found: Checkpoint, config: PretrainedConfig, dtype: str, device: str = "cpu"
) -> PreTrainedModel:
    """Return the model of a folder.

    Args:
        found: The folder.
        config: What `read_config` returned for it; it stays as it is.
        dtype: A name of torch's, or `auto`: bfloat16 where the folder says so, else float32.
        device: Where the weights go.

    Raises:
        EngineError: see the module's header.
    """
    # Bars on stderr have no reader here; problems come back as the report.
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # theirs
    try:
        # Annotated as a model, it is a pair when the loading info is asked for.
        pair: Any = AutoModelForCausalLM.from_pretrained(
            str(found.folder),
            # The library writes the attention's name into the config it is given.
            config=copy.deepcopy(config),
            dtype=_dtype(found, dtype),
            attn_implementation=architecture.ATTENTION,
            use_safetensors=True,
            output_loading_info=True,
            # What does not fit is told below; theirs is a table on stderr.
            ignore_mismatched_sizes=True,
            **_LOCAL,
        )
    except _FAILURES as error:
        raise EngineError("model.invalid", f"cannot load {found.folder}: {_line(error)}") from error
    model, report = pair
    if report["missing_keys"]:
        some = ", ".join(sorted(report["missing_keys"])[:3])
        raise EngineError("model.invalid", f"the weights in {found.folder} lack {some}")
    if report["mismatched_keys"]:
        name, there, wanted = min(report["mismatched_keys"])
        raise EngineError(
            "model.invalid",
            f"the weights in {found.folder} are not those of its config.json: {name} is "
            f"{list(there)}, the config asks for {list(wanted)}",
        )
    return _ready(model.to(device))


def make(
    found: Checkpoint,
    config: PretrainedConfig,
    dtype: str,
    device: str = "cpu",
    seed: int = SEED,
) -> PreTrainedModel:
    """Return a model of a folder's shape with random weights.

    The weights are what transformers initialises a fresh model with, so vectors of norms are
    ones and biases zeros. One seed gives the same weights on one kind of device.

    Args:
        found: The folder; it needs no weights.
        config: As in `load`.
        dtype: As in `load`.
        device: Where the weights are made.
        seed: Decides them.

    Raises:
        EngineError: see the module's header.
    """
    devices = [] if device == "cpu" else [device]
    try:
        with torch.random.fork_rng(devices=devices), torch.device(device):
            torch.manual_seed(seed)
            model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]  # theirs
                copy.deepcopy(config),
                dtype=_dtype(found, dtype),
                attn_implementation=architecture.ATTENTION,
            )
    except _FAILURES as error:
        raise EngineError(
            "model.invalid", f"cannot make a model of {found.folder}: {_line(error)}"
        ) from error
    _widen(model)
    return _ready(model)


def _widen(model: PreTrainedModel) -> None:
    """Keep in float32 what the model's class wants so, as loading does."""
    wide = model._keep_in_fp32_modules_strict or ()
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_floating_point() and any(re.search(one, name) for one in wide):
            tensor.data = tensor.data.float()


def _ready(model: PreTrainedModel) -> PreTrainedModel:
    model.eval()  # type: ignore[no-untyped-call]  # theirs
    model.requires_grad_(False)
    return model


def read_config(found: Checkpoint) -> PretrainedConfig:
    """Return the config of a folder whose model can be run."""
    folder = str(found.folder)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, **_LOCAL)
    # Configs check themselves with error classes of their own, which share no base but this.
    except Exception as error:
        kind = found.config.get("model_type")
        raise EngineError(
            "model.unsupported",
            f"transformers cannot read {folder} (model type {kind!r}): {_line(error)}",
        ) from error
    architecture.model_class(config, folder)
    architecture.register()
    return config


def _dtype(found: Checkpoint, dtype: str) -> torch.dtype:
    if dtype == "auto":
        said = found.config.get("dtype", found.config.get("torch_dtype"))
        dtype = "bfloat16" if said == "bfloat16" else "float32"
    chosen: torch.dtype = getattr(torch, dtype)
    return chosen


def _line(error: Exception) -> str:
    """Return what an error says as one line; of a mere name or number also what it is."""
    line = " ".join(str(error).split())
    if not line or isinstance(error, LookupError | ArithmeticError | AssertionError):
        line = f"{type(error).__name__} {line}".strip()
    return line if len(line) <= _MAX_REASON else line[:_MAX_REASON] + " ..."
