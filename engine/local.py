"""The runner that computes: a transformers decoder over paged keys and values.

All rows of a step go through the model as one packed sequence `[1, T]` with positions of
their own and no cache of transformers'. At each attention layer the model calls the hook
of `architecture`; behind it stand this runner's caches, one pair per layer, and the step's
plan, made once for all layers: new keys and values go to their slots first, then every
query attends to its own context's blocks. Only rows that sample reach the output layer.

Memory: the caches are allocated whole at the start. By default they hold `DEFAULT_CONTEXTS`
full contexts, but take at most `MEMORY_SHARE` of the memory free after loading; a context
is at most what the model was made for, `DEFAULT_CONTEXT_LEN`, and what the caches hold.

Knows the model, blocks and sampling; refuses to know which contexts there are, who waits
and what their text is. Kept true: nothing about a context survives a step except keys and
values in its blocks.

Shapes: T packed tokens - H query heads - K kv heads - D, E head dims of keys, values -
B tokens of a block - N blocks - V tokens of the vocabulary.
"""

from __future__ import annotations

import ctypes
import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from conure.kernels import ops
from conure.kernels.plan import Plan, build

from . import architecture, builtin, checkpoint, lean, trial, weights
from .api import EngineError, Limits
from .runner import Row
from .sampling import sample

BUILTIN: Final = "builtin"
DEFAULT_CONTEXT_LEN: Final = 32_768
DEFAULT_CONTEXTS: Final = 8
MEMORY_SHARE: Final = 0.4
KEPT_BYTES: Final = 2**25
"""Blocks up to this size are kept when freed; the largest that the C library allows."""
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
TRIAL_TOKENS: Final = 12
"""Tokens by which the lean forward pass is compared with the model."""
SAVED_BYTES: Final = 2**21
"""Keys of a layer that sharing must save to be worth another work item. Measured: an item
costs about 0.1 ms on two cores, in which they read a few MiB."""

_log = logging.getLogger(__name__)


class LocalRunner:
    """A model behind paged KV memory; see `runner.Runner`."""

    def __init__(
        self,
        *,
        model: str,
        dummy: bool = False,
        dtype: str = "auto",
        device: str = "cpu",
        context_len: int | None = None,
        num_blocks: int | None = None,
        block_size: int = 16,
        step_tokens: int = 512,
        max_sequences: int = 16,
        threads: int | None = None,
        min_saved: int | None = None,
        is_lean: bool = True,
    ) -> None:
        """Load a model and allocate its caches.

        Args:
            model: A model folder, `owner/name` on the hub, or `builtin`.
            dummy: Make random weights for the config at `model`, a folder or a file, instead
                of reading any.
            dtype: `float32`, `bfloat16`, or `auto`: bfloat16 where the folder says so, else
                float32.
            device: `cpu`.
            context_len: Tokens of a context at most; None takes what fits.
            num_blocks: Blocks of KV memory; None sizes them from free memory.
            block_size: Tokens of a block.
            step_tokens: Tokens of a step at most.
            max_sequences: Contexts that decode in one step at most.
            threads: Threads of torch in this process; None leaves them.
            min_saved: Tokens of reading that a shared stretch must save; None follows
                `SAVED_BYTES`.
            is_lean: Run plain decoders by `lean` instead of by their modules.

        Raises:
            EngineError: `model.not_found`, `model.invalid` or `model.unsupported` for the
                model, `engine.bad_option` for anything else that cannot be.
        """
        if device != "cpu":
            raise EngineError("engine.bad_option", f"device must be 'cpu' for now, got {device!r}")
        if dtype not in ("float32", "bfloat16", "auto"):
            raise EngineError(
                "engine.bad_option", f"dtype must be float32, bfloat16 or auto, got {dtype!r}"
            )
        if threads is not None:
            torch.set_num_threads(threads)
        _keep_freed_memory()
        is_builtin = model == BUILTIN and not dummy
        if dummy:
            found = checkpoint.read_dummy(model)
            self._model, self._config = weights.make(found, dtype, device)
        else:
            found = checkpoint.read(builtin.cached() if is_builtin else checkpoint.locate(model))
            self._model, self._config = weights.load(found, dtype, device)
        layers = trial.probe(self._model, str(found.folder))
        owners = [layer for index, layer in enumerate(layers) if layer.source == index]
        sizes = [layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in owners]
        element = self._model.dtype.itemsize
        self.limits = _limits(
            self._config,
            token_bytes=sum(sizes) * element,
            context_len=context_len,
            num_blocks=num_blocks,
            block_size=block_size,
            step_tokens=step_tokens,
            max_sequences=max_sequences,
        )
        self._operations = operations = ops.implementation("cpu")
        own = {
            layer.source: _new_caches(
                operations, layer, self.limits.num_blocks, block_size, self._model.dtype
            )
            for layer in owners
        }
        # Layers that share keys and values stand here with one pair of caches.
        self._caches = [own[layer.source] for layer in layers]
        self._own_caches = list(chain.from_iterable(own.values()))
        saved = SAVED_BYTES // max(1, max(sizes) * element // 2)
        self._min_saved = saved if min_saved is None else min_saved
        parameters = inspect.signature(self._model.forward).parameters
        self._keeps_logits = "logits_to_keep" in parameters

        self.model = BUILTIN if is_builtin else _name(model, found.folder)
        self.tokenizer_json = found.tokenizer_json
        self.chat_template = found.chat_template
        self.special_tokens = found.special_tokens
        self.bos_id = found.bos_id
        self.eos_ids = found.eos_ids
        self.capabilities: tuple[str, ...] = ("tokens", "logprobs")
        if is_builtin:
            self.description = builtin.DESCRIPTION
        else:
            self.description = _describe(self._model, is_dummy=dummy)
        self.layers = layers
        self._lean: lean.LeanModel | None = None
        if is_lean:
            self._lean = self._make_lean()

    @torch.inference_mode()
    def run(self, rows: Sequence[Row], copies: Sequence[tuple[int, int]]) -> list[int]:
        """Copy blocks, run the rows, return one id per sampling row; see `runner.Runner`."""
        if copies:
            source, destination = torch.tensor(copies, dtype=torch.int64).unbind(1)
            self._operations.copy_blocks(self._own_caches, source, destination)
        if not rows:
            return []
        plan = build(
            [row.num_new for row in rows],
            [row.start + row.num_new for row in rows],
            [row.blocks for row in rows],
            block_size=self.limits.block_size,
            min_saved=self._min_saved,
        )
        ids = [row.ids[row.start : row.start + row.num_new] for row in rows]
        sampling = [index for index, row in enumerate(rows) if row.sampling is not None]
        last = torch.from_numpy(plan.query_start[1:][sampling] - 1)
        logits = self._forward(torch.tensor([*chain.from_iterable(ids)]), plan, last)
        return sample(logits, [rows[index] for index in sampling], self.eos_ids) if sampling else []

    @torch.inference_mode()
    def _make_lean(self) -> lean.LeanModel | None:
        """Return the lean forward pass, where there is one and it gives the same logits."""
        if not lean.is_plain(self._model, self.layers):
            return None
        num = min(TRIAL_TOKENS, self.limits.context_len)
        size = self.limits.block_size
        plan = build([num], [num], [range(-(-num // size))], block_size=size)
        ids, every = torch.arange(3, 3 + num) * 37 % self._config.vocab_size, torch.arange(num)
        wanted = self._forward(ids, plan, every)
        made = self._lean = lean.LeanModel(self._model, self.limits.context_len)
        if lean.agrees(self._forward(ids, plan, every), wanted):
            return made
        _log.warning("model=%s: the lean forward pass differs and is not used", self.model)
        made.restore()
        return None

    def _forward(self, ids: Tensor, plan: Plan, last: Tensor) -> Tensor:
        """Return the logits [len(last), V] at the packed tokens `last`."""
        positions = torch.from_numpy(plan.positions)
        step = _Step(
            plan, torch.from_numpy(plan.slots), self._caches, self._operations, self.layers
        )
        if self._lean is not None:
            return self._lean(ids, positions, last, step.run)
        keep = {"logits_to_keep": last} if self._keeps_logits else {}
        token = architecture.CURRENT.set(step)
        try:
            logits: Tensor = self._model(
                input_ids=ids[None], position_ids=positions[None], use_cache=False, **keep
            ).logits[0]
        finally:
            architecture.CURRENT.reset(token)
        return logits if self._keeps_logits else logits[last]


@dataclass(frozen=True, slots=True)
class _Step:
    """What stands behind the hook while a step runs; see `architecture.Attending`."""

    plan: Plan
    slots: Tensor
    caches: Sequence[tuple[Tensor, Tensor]]
    operations: ops.Operations
    layers: Sequence[trial.Layer]

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        assert mask is None, "the probe saw no mask"
        layer = module.layer_idx
        assert isinstance(layer, int), "the probe saw numbered layers"
        key_cache, value_cache = self.caches[layer]
        self.operations.store_kv(
            key[0].transpose(0, 1), value[0].transpose(0, 1), key_cache, value_cache, self.slots
        )
        out = self.operations.attention(
            query[0].transpose(0, 1),
            key_cache,
            value_cache,
            self.plan,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
        return out[None]

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Do the same for `lean.LeanModel`; see `lean.Attend`."""
        caches = self.caches[layer]
        self.operations.store_kv(key, value, *caches, self.slots)
        return self.operations.attention(
            query, *caches, self.plan, scale=scale, window=self.layers[layer].window
        )


def _limits(
    config: PretrainedConfig,
    *,
    token_bytes: int,
    context_len: int | None,
    num_blocks: int | None,
    block_size: int,
    step_tokens: int,
    max_sequences: int,
) -> Limits:
    """Return limits that fit the model and the memory; see the module's header."""
    numbers = {
        "context_len": context_len,
        "num_blocks": num_blocks,
        "block_size": block_size,
        "step_tokens": step_tokens,
        "max_sequences": max_sequences,
    }
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise EngineError("engine.bad_option", f"{name} must be at least 1, got {number}")
    longest, reason = architecture.longest(config)
    if context_len is not None and longest is not None and context_len > longest:
        raise EngineError("engine.bad_option", f"context_len is {context_len}, but {reason}")
    wanted = context_len or min(longest or DEFAULT_CONTEXT_LEN, DEFAULT_CONTEXT_LEN)
    if num_blocks is None:
        affordable = int(MEMORY_SHARE * _free_bytes()) // (token_bytes * block_size)
        num_blocks = max(1, min(DEFAULT_CONTEXTS * -(-wanted // block_size), affordable))
    if context_len is not None and num_blocks * block_size < context_len:
        raise EngineError(
            "engine.bad_option",
            f"context_len {context_len} does not fit into {num_blocks} blocks of {block_size}",
        )
    return Limits(
        context_len=min(wanted, num_blocks * block_size),
        block_size=block_size,
        num_blocks=num_blocks,
        step_tokens=step_tokens,
        max_sequences=max_sequences,
    )


def _free_bytes() -> int:
    """Return the memory this process may still take, by the machine and by its control group."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    found = {name: number for name, _, number in (line.partition(":") for line in lines)}
    free = int(found["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    limit, used = group / "memory.max", group / "memory.current"
    if limit.is_file() and used.is_file():
        ceiling = limit.read_text(encoding="ascii").strip()
        if ceiling != "max":
            free = min(free, int(ceiling) - int(used.read_text(encoding="ascii")))
    return max(0, free)


def _new_caches(
    operations: ops.Operations,
    layer: trial.Layer,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    shape = (num_blocks, block_size, layer.kv_heads)
    return (
        operations.new_cache(*shape, layer.key_dim, dtype),
        operations.new_cache(*shape, layer.value_dim, dtype),
    )


def _keep_freed_memory() -> None:
    """Tell the C library to keep what a step frees for the next one.

    By default it gives large blocks back, and each step pays for fresh pages: 13 % of a
    prefill. Elsewhere than under glibc nothing happens.
    """
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    set_option(_M_MMAP_THRESHOLD, KEPT_BYTES)
    set_option(_M_TRIM_THRESHOLD, 16 * KEPT_BYTES)


def _name(model: str, folder: Path) -> str:
    """Return the name that programs use: the last part of the path or hub name."""
    if folder.is_file():  # a config of a dummy model
        return folder.parent.name if folder.name == "config.json" else folder.stem
    return Path(model).name if not Path(model).expanduser().is_dir() else folder.name


def _describe(model: PreTrainedModel, *, is_dummy: bool) -> str:
    millions = model.num_parameters() / 1e6
    what = f"{type(model).__name__}, {millions:,.1f} M parameters, {str(model.dtype)[6:]}"
    return f"{what}, dummy random weights: its text means nothing" if is_dummy else what
