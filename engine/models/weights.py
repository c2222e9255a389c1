"""Loading transformers models: `load` reads safetensors, `make` creates random weights.

`make` draws every weight from a seed, directly on the device, for benchmarks of a model's shape.

Invariants: a returned model attends through the hook of `attention_hook`, is in evaluation mode and
needs no gradient. Nothing in a folder is executed: where a config offers code (`auto_map`),
transformers uses its own classes.

Errors, all `EngineError`: `model.invalid` for weights that are damaged or incomplete,
`model.unsupported` for models that cannot be computed correctly.
"""

from __future__ import annotations

import copy
import re
from itertools import chain
from typing import Any, Final

import torch
from safetensors import SafetensorError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from ..protocol import EngineError
from . import attention_hook
from .attention_backend import ATTENTION
from .checkpoint import Checkpoint, dtype_name

SEED: Final = 0
_LOCAL: Final[dict[str, Any]] = {"local_files_only": True, "trust_remote_code": False}
_FAILURES: Final = (
    *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError),
    *(OSError, RuntimeError, SafetensorError),
)
"""Exceptions of model classes and loaders for a wrong config or file."""
_MAX_REASON: Final = 300


def load(
    checkpoint: Checkpoint, config: PretrainedConfig, dtype: str, device: str = "cpu"
) -> PreTrainedModel:
    """Load the model of a folder.

    Args:
        checkpoint: The folder.
        config: The result of `read_config` for it. Not modified.
        dtype: As in `checkpoint.dtype_name`.
        device: The device of the weights.

    Raises:
        EngineError: see the module docstring.
    """
    # No user sees progress bars on stderr. Problems are in the loading info.
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # theirs
    try:
        # Annotated as a model, but a pair because of `output_loading_info`.
        pair: Any = AutoModelForCausalLM.from_pretrained(
            str(checkpoint.path),
            # The library writes the name of the attention into its config.
            config=copy.deepcopy(config),
            dtype=getattr(torch, dtype_name(checkpoint.config, dtype, device)),
            attn_implementation=ATTENTION,
            use_safetensors=True,
            output_loading_info=True,
            # Mismatches are reported below instead of as a table on stderr.
            ignore_mismatched_sizes=True,
            **_LOCAL,
        )
    except _FAILURES as error:
        raise EngineError(
            "model.invalid", f"cannot load {checkpoint.path}: {_line(error)}"
        ) from error
    model, report = pair
    if report["missing_keys"]:
        some = ", ".join(sorted(report["missing_keys"])[:3])
        raise EngineError(
            "model.invalid", f"the weights in {checkpoint.path} are incomplete; missing: {some}"
        )
    if report["mismatched_keys"]:
        name, actual, expected = min(report["mismatched_keys"])
        raise EngineError(
            "model.invalid",
            f"the weights in {checkpoint.path} do not match its config.json: {name} has shape "
            f"{list(actual)}, the config needs {list(expected)}",
        )
    return _ready(model.to(device))


def make(
    checkpoint: Checkpoint,
    config: PretrainedConfig,
    dtype: str,
    device: str = "cpu",
    seed: int = SEED,
) -> PreTrainedModel:
    """Create a model of a folder's config with random weights.

    The weights are transformers' initial values, so norms are ones and biases zeros. A seed gives
    the same weights on the same kind of device.

    Args:
        checkpoint: The folder or config; it needs no weights.
        config: As in `load`.
        dtype: As in `load`.
        device: The device to create the weights on.
        seed: Seed of the weights.

    Raises:
        EngineError: see the module docstring.
    """
    devices = [] if device == "cpu" else [device]
    try:
        with torch.random.fork_rng(devices=devices), torch.device(device):
            torch.manual_seed(seed)
            model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]  # theirs
                copy.deepcopy(config),
                dtype=getattr(torch, dtype_name(checkpoint.config, dtype, device)),
                attn_implementation=ATTENTION,
                trust_remote_code=False,
            )
    except _FAILURES as error:
        raise EngineError(
            "model.invalid", f"cannot create a model from {checkpoint.path}: {_line(error)}"
        ) from error
    _keep_in_float32(model)
    return _ready(model)


def _keep_in_float32(model: PreTrainedModel) -> None:
    """Convert the tensors that the model's class keeps in float32, as loading does."""
    wide = model._keep_in_fp32_modules_strict or ()
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_floating_point() and any(re.search(one, name) for one in wide):
            tensor.data = tensor.data.float()


def _ready(model: PreTrainedModel) -> PreTrainedModel:
    model.eval()  # type: ignore[no-untyped-call]  # theirs
    model.requires_grad_(False)
    return model


def read_config(checkpoint: Checkpoint) -> PretrainedConfig:
    """Read the config of a folder and check that its model can run."""
    path = str(checkpoint.path)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(path, **_LOCAL)
    # Configs raise their own error classes, whose only common base is Exception.
    except Exception as error:
        kind = checkpoint.config.get("model_type")
        reason = f"transformers cannot read {path} (model type {kind!r}): {_line(error)}"
        if "auto_map" in checkpoint.config and str(kind) not in CONFIG_MAPPING:
            reason = (
                f"transformers has no model type {kind!r}, and the code that {path} offers for it "
                "(auto_map) is never run"
            )
        raise EngineError("model.unsupported", reason) from error
    attention_hook.model_class(config, path)
    attention_hook.register()
    return config


def _line(error: Exception) -> str:
    """Return an error as one line, with its class where the message alone is unclear."""
    line = " ".join(str(error).split())
    if not line or isinstance(error, LookupError | ArithmeticError | AssertionError):
        line = f"{type(error).__name__} {line}".strip()
    return line if len(line) <= _MAX_REASON else line[:_MAX_REASON] + " ..."
