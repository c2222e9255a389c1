"""The local runner: a transformers decoder over paged keys and values.

All rows of a step run as one packed sequence `[1, T]` with explicit positions and without
transformers' cache. At each attention layer the model calls the hook of `attention_hook`, which
leads to this runner's caches, one pair per layer, and to the step's plan, shared by all layers:
new keys and values are stored first, then every query attends to the blocks of its own context.
Only rows that sample reach the output layer.

On an accelerator, one copy carries the step's inputs to the device (`staging`), steps of decode
rows only are padded and replayed from CUDA graphs (`cuda_graphs`), the next tokens are sampled on
the device (`sampler`), and one copy brings them back.

Responsibility: the model, its blocks and sampling.
Out of scope: which contexts exist, their rank and their text.
Invariants: a context leaves no state after a step, except keys and values in its blocks.

Shapes: T packed tokens - H query heads - K kv heads - D, E head dims of keys, values -
B tokens of a block - N blocks - V tokens of the vocabulary.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PretrainedConfig

from conure.kernels.planning.plan import Plan
from conure.kernels.planning.planner import Planner
from conure.kernels.planning.prefix_tree import MIN_SAVED_TOKENS

from ..config import EngineConfig
from ..kv import capacity
from ..models import (
    attention_hook,
    batch_invariance,
    fused_decoder,
    probe,
    registry,
    weights,
)
from ..sampling import batch
from ..sampling.sampler import LogitOpsBatch, sample_tokens
from . import backend as backends
from . import device as devices
from . import pooling
from .base import CompletedStep, DeviceLostError, Handle, Runner, ScheduledSequence
from .cuda_graphs import CudaGraphCache, bucket_size, bucket_sizes
from .staging import Staging
from .step_inputs import (
    Attention,
    AttentionLayerGroup,
    Integers,
    LayerCaches,
    PackedInputs,
    decode_warmup_batches,
    pack,
)

CALIBRATION_TOKENS: Final = 12
"""Tokens for which the fused decoder's logits are compared with the model's."""
NO_SHARING: Final = 2**62
"""A saving that no shared KV range reaches."""
STAGED_BYTES: Final = 2**24
"""Staging buffer on an accelerator. Arrays that do not fit are copied one by one."""

_log = logging.getLogger(__name__)


def create_runner(config: EngineConfig) -> TorchModelRunner:
    """Return a runner whose decode steps are recorded already.

    Raises:
        EngineError: as `TorchModelRunner`.
    """
    runner = TorchModelRunner(config)
    runner.warm()
    return runner


class TorchModelRunner(Runner):
    """A model over paged KV memory."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        backend: backends.Backend | None = None,
        min_saved: int = MIN_SAVED_TOKENS,
        use_fused_decoder: bool = True,
    ) -> None:
        """Load a model and allocate its caches.

        Args:
            config: The engine's options.
            backend: The device and its operations; None creates what the options ask for.
            min_saved: Tokens of reading that a shared KV range must save.
            use_fused_decoder: Run supported decoders by `fused_decoder`, not by their modules.

        Raises:
            EngineError: `model.not_found`, `model.invalid` or `model.unsupported` for the model,
                `engine.bad_option` for an option that is wrong or does not fit.
        """
        if backend is None:
            device = devices.pick(config.device, needs_cpu=config.batch_invariant)
            _log.info("%s", devices.describe(config.device, device))
            backend = backends.create_backend(
                device,
                batch_invariant=config.batch_invariant,
                instructions=config.cpu_instructions,
            )
        self._backend = backend
        self._operations = backend.operations
        self._is_invariant = config.batch_invariant
        devices.check_dtype(config.dtype, backend.device)
        devices.keep_freed_memory()
        requested = capacity.RequestedLimits(
            context_len=config.context_len,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            step_tokens=config.step_tokens,
            max_sequences=config.max_sequences,
        )
        model_config = self._load(config, requested)
        self._set_threads(config.threads)
        self.limits = capacity.limits(
            model_config,
            requested,
            token_bytes=sum(self._token_bytes()),
            free_bytes=devices.free_bytes(backend.device),
            kind=backend.device.type,
        )
        self._allocate_caches()
        if self._is_invariant:
            min_saved = NO_SHARING
        self._planner = Planner(block_size=self.limits.block_size, min_saved=min_saved)
        shares_memory = backend.device.type == "cpu" and backend.record is None
        self._staging = Staging(backend.device, 0 if shares_memory else STAGED_BYTES)
        self._graphs = None if backend.record is None else CudaGraphCache(backend.record)
        # The ids that the last step sampled, on a device that runs ahead of the host.
        self._previous_ids = torch.zeros(0, dtype=torch.int64)
        self._calibrate(use_fused_decoder=use_fused_decoder)
        if self._is_invariant:
            batch_invariance.check(self._logits, self.limits, self._model.config.vocab_size)

    def _load(self, config: EngineConfig, requested: capacity.RequestedLimits) -> PretrainedConfig:
        """Load and probe the model; return its config."""
        is_dummy = config.dummy_weights is not None
        name = config.dummy_weights or config.model or registry.BUILTIN
        checkpoint = registry.find(name, is_dummy=is_dummy)
        model_config = weights.read_config(checkpoint)
        capacity.check(model_config, requested)
        loaded = registry.load(
            name, checkpoint, model_config, config.dtype, self._backend.device, is_dummy=is_dummy
        )
        self._model = loaded.model
        parameters = inspect.signature(loaded.model.forward).parameters
        self._has_logits_to_keep = "logits_to_keep" in parameters
        self.layers = probe.probe(loaded.model, str(checkpoint.folder))
        self.model, self.description = loaded.name, loaded.description
        self.tokenizer_json = checkpoint.tokenizer_json
        self.chat_template = checkpoint.chat_template
        self.special_tokens = checkpoint.special_tokens
        self.bos_id = checkpoint.bos_id
        self.eos_ids = checkpoint.eos_ids
        embeddings = ("embeddings",) if config.embeddings else ()
        self.capabilities: tuple[str, ...] = ("tokens", "logprobs", *embeddings)
        return model_config

    def _set_threads(self, threads: int | None) -> None:
        if threads is None:
            num_bytes = sum(parameter.nbytes for parameter in self._model.parameters())
            threads = capacity.threads(num_bytes, devices.num_cores())
        torch.set_num_threads(threads)

    @torch.inference_mode()
    def start(self, rows: Sequence[ScheduledSequence], copies: Sequence[tuple[int, int]]) -> Handle:
        """Copy blocks and run the rows; see `base.Runner`."""
        pairs = [*np.array(copies, np.int64).T] if copies else []
        if not rows:
            if pairs:
                self._operations.copy_blocks(self._own_caches, *self._staging.put(pairs))
            return CompletedStep([])
        sampling_rows = [row for row in rows if row.sampling is not None]
        pooled = pooling.pooled_tokens(rows)
        if not sampling_rows:
            _, _, sums = self._run_rows(rows, pairs, (), pooled)
            return self._step_of_sums(sums, pooled)
        sampling = batch.make_batch(sampling_rows, self.eos_ids, self._num_logits)
        extra = () if sampling is None else sampling.ops
        logits, ops, sums = self._run_rows(rows, pairs, extra, pooled)
        if sampling is None:
            sampled = sample_tokens(logits, None)
        else:
            sampled = sample_tokens(
                logits, LogitOpsBatch(*ops), sampling.num_top, self._backend.sampling
            )
        copy_to_host = self._backend.copy_to_host
        if copy_to_host is None:
            self._step_of_sums(sums, pooled)
            return CompletedStep(batch.unpack(sampled.tolist(), sampling_rows, sampling))
        self._previous_ids = sampled[: len(sampling_rows)].long()
        step = _PendingStep(copy_to_host(sampled), sampling_rows, sampling)
        return step if sums is None else _PendingSums(copy_to_host(sums), pooled, step)

    def _step_of_sums(self, sums: Tensor | None, pooled: Sequence[pooling.PooledTokens]) -> Handle:
        """Return a step that samples nothing; sums in main memory are unpacked at once."""
        if sums is not None and self._backend.copy_to_host is not None:
            return _PendingSums(self._backend.copy_to_host(sums), pooled, CompletedStep([]))
        if sums is not None:
            pooling.unpack(sums, pooled)
        return CompletedStep([])

    @torch.inference_mode()
    def warm(self) -> None:
        """Record decode steps of all padded sizes, so that no call waits for a recording."""
        if self._graphs is None:
            return
        steps = [
            rows
            for size in reversed(bucket_sizes(self.limits.max_sequences))
            for rows in decode_warmup_batches(
                size, self.limits, self._scratch_block, self._layer_groups
            )
        ]
        # A recording becomes useless when a buffer that it reads is replaced by a larger one.
        for rows in steps:
            self._prepare_plan(pack(rows, self._planner).plan)
        for rows in steps:
            self._run_rows(rows, (), ())
        # Copies are not recorded, but compiled.
        scratch = [np.array([self._scratch_block], np.int64)] * 2
        self._operations.copy_blocks(self._own_caches, *self._staging.put(scratch))

    def check_device(self) -> None:
        """See `base.Runner`."""
        if self._backend.synchronize is None:
            return
        try:
            self._backend.synchronize()
        except RuntimeError as error:
            raise DeviceLostError(f"{self._backend.device} is lost: {error}") from error

    def _run_rows(
        self,
        rows: Sequence[ScheduledSequence],
        pairs: Sequence[Integers],
        extra: Sequence[NDArray[Any]],
        pooled: Sequence[pooling.PooledTokens] = (),
    ) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """Copy a step to the device at once and run it.

        Args:
            rows: At least one.
            pairs: Sources and destinations of block copies that precede the step, or nothing.
            extra: Other arrays to copy to the device.
            pooled: Tokens whose hidden states are summed.

        Returns:
            Logits [S, V] of the rows that sample, `extra` on the device, and the sums [P, H].
        """
        packed = pack(rows, self._planner)
        size = None
        if self._graphs is not None and packed.plan.num_queries == len(rows) and not pooled:
            size = bucket_size(len(rows), self.limits.max_sequences)
        inputs = packed.arrays(self._padded_sizes(packed, size), self._scratch_block)
        pending = () if packed.pending is None else packed.pending
        staged = self._staging.put([*inputs, *pairs, *pending, *extra])
        end = len(inputs) + len(pairs)
        if pairs:
            self._operations.copy_blocks(self._own_caches, *staged[len(inputs) : end])
        if packed.pending is not None:
            targets, sources = staged[end : end + 2]
            staged[0].index_copy_(0, targets, self._previous_ids.index_select(0, sources))
            end += 2
        if pooled:
            ids, positions, slots, last = staged[: len(inputs)]
            attention = Attention(packed.plan, slots, self._caches, self._operations, self.layers)
            logits, hidden = self._forward_hidden(ids, positions, last, attention)
            return logits[: len(packed.last)], staged[end:], pooling.sums(hidden, pooled)
        forward = self._bind_forward(packed.plan, staged[: len(inputs)])
        if size is None or self._graphs is None:
            return forward()[: len(packed.last)], staged[end:], None
        logits = self._graphs.run((size, *self._prepare_plan(packed.plan)), forward)
        return logits[: len(packed.last)], staged[end:], None

    @torch.inference_mode()
    def _logits(self, rows: Sequence[ScheduledSequence]) -> Tensor:
        """Run a step; return the logits [T, V] at all of its tokens."""
        packed = pack(rows, self._planner)
        packed = packed._replace(last=np.arange(packed.plan.num_queries))
        arrays = packed.arrays(self._padded_sizes(packed, None), self._scratch_block)
        return self._bind_forward(packed.plan, self._staging.put(arrays))()[: len(packed.last)]

    def _padded_sizes(self, packed: PackedInputs, size: int | None) -> tuple[int, int] | None:
        """Return the padded numbers of tokens and of logits rows; None for no padding."""
        if size is not None:
            return size, size
        if not self._is_invariant:
            return None
        pad = batch_invariance.padded_size
        return pad(packed.plan.num_queries), pad(len(packed.last))

    def _prepare_plan(self, plan: Plan) -> list[Hashable]:
        """Copy the plan to the device; return what a recording depends on besides its size."""
        return [
            self._operations.prepare(query, *caches, plan, window=group.window)
            for group, (query, caches) in self._layer_groups.items()
        ]

    def _bind_forward(self, plan: Plan, staged: Sequence[Tensor]) -> Callable[[], Tensor]:
        """Return the forward pass over a step that is on the device."""
        ids, positions, slots, last = staged
        attention = Attention(plan, slots, self._caches, self._operations, self.layers)
        return lambda: self._forward(ids, positions, last, attention)

    def _forward(
        self, ids: Tensor, positions: Tensor, last: Tensor, attention: Attention
    ) -> Tensor:
        """Return the logits [len(last), V] at the packed tokens `last`."""
        if self._fused_decoder is not None:
            return self._fused_decoder(ids, positions, last, attention)
        keep = {"logits_to_keep": last} if self._has_logits_to_keep else {}
        token = attention_hook.CURRENT.set(attention)
        try:
            logits: Tensor = self._model(
                input_ids=ids[None], position_ids=positions[None], use_cache=False, **keep
            ).logits[0]
        finally:
            attention_hook.CURRENT.reset(token)
        return logits if self._has_logits_to_keep else logits.index_select(0, last)

    def _forward_hidden(
        self, ids: Tensor, positions: Tensor, last: Tensor, attention: Attention
    ) -> tuple[Tensor, Tensor]:
        """Return the logits as `_forward`, and the states [T, H] that they are computed from."""
        decoder = self._fused_decoder
        if decoder is not None:
            hidden = decoder.hidden(ids, positions, attention)
            return decoder.logits(hidden, last), hidden
        with pooling.last_hidden_states(self._model) as states:
            logits = self._forward(ids, positions, last, attention)
        return logits, states[0]

    @torch.inference_mode()
    def _calibrate(self, *, use_fused_decoder: bool) -> None:
        """Run a few tokens to find the logits' width and the layer groups, and choose a decoder.

        The fused decoder is used if it supports the model and computes the same logits.
        """
        self._fused_decoder: fused_decoder.FusedDecoder | None = None
        num = min(CALIBRATION_TOKENS, self.limits.context_len)
        ids = [token * 37 % self._model.config.vocab_size for token in range(3, 3 + num)]
        blocks = [*range(-(-num // self.limits.block_size))]
        packed = pack([ScheduledSequence(0, ids, 0, num, blocks)], self._planner)
        packed = packed._replace(last=np.arange(num))
        staged = self._staging.put(packed.arrays(None, self._scratch_block))
        token_ids, positions, slots, last = staged
        groups: dict[AttentionLayerGroup, tuple[Tensor, LayerCaches]] = {}
        attention = Attention(
            packed.plan, slots, self._caches, self._operations, self.layers, groups
        )
        expected = self._forward(token_ids, positions, last, attention)
        self._num_logits = expected.shape[1]
        # Plans are prepared for the most queries that a step may have. Their values are not read.
        most = max(self.limits.max_sequences, self.limits.step_tokens)
        self._layer_groups = {
            group: (query[:1].expand(most, -1, -1), caches)
            for group, (query, caches) in groups.items()
        }
        if not (use_fused_decoder and fused_decoder.is_supported(self._model, self.layers)):
            return
        decoder = fused_decoder.FusedDecoder(
            self._model,
            self.limits.context_len,
            self._backend.fused,
            self._backend.pack,
            is_recorded=self._backend.record is not None,
        )
        self._fused_decoder = decoder
        attention = replace(attention, groups=None)
        logits = self._forward(token_ids, positions, last, attention)
        if not fused_decoder.logits_match(logits, expected):
            _log.warning("model=%s: the fused decoder's logits differ; not using it", self.model)
            decoder.restore()
            self._fused_decoder = None

    @property
    def _cached_layers(self) -> list[probe.LayerKVSpec]:
        """The layers that have caches of their own."""
        return [layer for index, layer in enumerate(self.layers) if layer.source == index]

    def _token_bytes(self) -> list[int]:
        """Return the bytes of one token in each layer's own caches."""
        sizes = [
            layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in self._cached_layers
        ]
        return [self._model.dtype.itemsize * size for size in sizes]

    def _allocate_caches(self) -> None:
        """Allocate the caches, listed by layer. Layers that share keys and values share a pair."""
        # One block beyond the limits, for padding rows.
        self._scratch_block = self.limits.num_blocks
        own = {layer.source: self._new_caches(layer) for layer in self._cached_layers}
        self._caches = [own[layer.source] for layer in self.layers]
        self._own_caches = list(chain.from_iterable(own.values()))

    def _new_caches(self, layer: probe.LayerKVSpec) -> LayerCaches:
        is_padded = self._backend.record is not None or self._is_invariant
        num_blocks = self.limits.num_blocks + is_padded
        shape = (num_blocks, self.limits.block_size, layer.kv_heads)
        dtype, device = self._model.dtype, self._backend.device
        return (
            self._operations.new_cache(*shape, layer.key_dim, dtype).to(device),
            self._operations.new_cache(*shape, layer.value_dim, dtype).to(device),
        )


@dataclass(frozen=True, slots=True)
class _PendingStep:
    """A step whose results are being copied to the host; see `base.Handle`."""

    wait: Callable[[], Tensor]
    rows: Sequence[ScheduledSequence]
    """The rows that sample."""
    sampling: batch.SamplingBatch | None

    @property
    def is_ready(self) -> bool:
        """False: the device is not asked."""
        return False

    def read(self) -> list[int]:
        """Wait for the copy; return the ids."""
        return batch.unpack(self.wait().tolist(), self.rows, self.sampling)


@dataclass(frozen=True, slots=True)
class _PendingSums:
    """A step whose sums of hidden states are being copied to the host; see `base.Handle`."""

    wait: Callable[[], Tensor]
    pooled: Sequence[pooling.PooledTokens]
    step: Handle
    """The ids of the step."""

    @property
    def is_ready(self) -> bool:
        """False: the device is not asked."""
        return False

    def read(self) -> list[int]:
        """Wait for the copies; set the sums of the rows, and return the ids."""
        ids = self.step.read()
        pooling.unpack(self.wait(), self.pooled)
        return ids
