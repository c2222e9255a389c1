"""The local runner: a decoder over paged keys and values.

All rows of a step run as one packed sequence `[1, T]` with explicit positions and without a cache
of the model. Each attention layer uses this runner's caches, one pair per layer, and the step's
plan, shared by all layers: new keys and values are stored first, then every query attends to the
blocks of its context. Models of transformers find both through `attention_backend.CURRENT`, the
fused decoder gets them as arguments. Only rows that sample reach the output layer, if the model
can leave out the others.

On an accelerator, one copy carries the step's inputs to the device (`staging`), small steps are
padded and replayed from CUDA graphs (`cuda_graphs`, `warmup`), the next tokens are sampled on the
device (`sampler`), and one copy brings them back.

Responsibility: the model, its blocks and sampling.
Out of scope: which contexts exist, their rank and their text.
Invariants: after a step, the state of a context is in its blocks; on an accelerator, the ids that
the last step sampled stay on the device, too, for the next step.

Shapes: T packed tokens - H query heads - K kv heads - D, E head dims of keys, values -
B tokens of a block - N blocks - V tokens of the vocabulary.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from conure.kernels.checks import UnsupportedShapeError
from conure.kernels.planning.plan import Plan
from conure.kernels.planning.prefix_tree import MIN_SAVED_TOKENS

from ..config import EngineConfig
from ..kv import capacity
from ..models import (
    attention_backend,
    batch_invariance,
    fused_decoder,
    probe,
    registry,
)
from ..models.llama_config import DecoderConfig
from ..models.projection import PackedModules
from ..protocol import EngineError
from ..sampling import batch
from ..sampling.sampler import LogitOpsBatch, sample_tokens
from . import backend as backends
from . import device as devices
from . import pooling
from .base import CompletedStep, DeviceLostError, Handle, Runner, ScheduledSequence
from .cuda_graphs import MAX_RECORDINGS, RECORDING_BYTES, CudaGraphCache
from .staging import Staging
from .step_inputs import (
    Attention,
    AttentionLayerGroup,
    Integers,
    LayerCaches,
    PackedInputs,
    pack,
)
from .warmup import recorded_size, warmup_steps

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


class _RecordingKey(NamedTuple):
    """What the recording of a step depends on."""

    num_tokens: int
    """Tokens of the step, padded."""
    launches: tuple[Hashable, ...]
    """One per group of layers."""


class TorchModelRunner(Runner):
    """A model over paged KV memory."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        backend: backends.Backend | None = None,
        min_saved: int = MIN_SAVED_TOKENS,
        optimize: bool = True,
    ) -> None:
        """Load a model and allocate its caches.

        Args:
            config: The engine's options.
            backend: The device and its operations; None creates both from the options.
            min_saved: Tokens of reading that a shared KV range must save.
            optimize: Run supported decoders by `fused_decoder`, and others with packed weights.

        Raises:
            EngineError: `model.not_found`, `model.invalid` or `model.unsupported` for the model,
                `engine.bad_option` for an option that is wrong or does not fit.
        """
        if backend is None:
            needs_cpu = config.batch_invariant
            device = devices.pick(config.device, needs_cpu=needs_cpu)
            _log.info("%s", devices.describe(config.device, device, needs_cpu=needs_cpu))
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
        self._set_threads(config)
        recorded_bytes = 0 if backend.record is None else MAX_RECORDINGS * RECORDING_BYTES
        self.limits = capacity.limits(
            model_config,
            requested,
            token_bytes=sum(self._token_bytes()),
            free_bytes=devices.free_bytes(backend.device),
            recorded_bytes=recorded_bytes,
            kind=backend.device.type,
            num_engines=config.num_engines,
        )
        self._allocate_caches()
        if self._is_invariant:
            min_saved = NO_SHARING
        self._planner = backend.make_planner(block_size=self.limits.block_size, min_saved=min_saved)
        shares_memory = backend.device.type == "cpu" and backend.record is None
        self._staging = Staging(backend.device, 0 if shares_memory else STAGED_BYTES)
        self._graphs = None if backend.record is None else CudaGraphCache(backend.record)
        # The ids that the last step sampled, on a device that runs ahead of the host.
        self._previous_ids = torch.zeros(0, dtype=torch.int64)
        self._calibrate(optimize=optimize)
        if self._is_invariant:
            batch_invariance.check(self._logits, self.limits, self._model.config.vocab_size)

    def _load(self, config: EngineConfig, requested: capacity.RequestedLimits) -> DecoderConfig:
        """Load and probe the model; return its config."""
        is_dummy = config.dummy_weights is not None
        name = config.dummy_weights or config.model or registry.BUILTIN
        checkpoint = registry.find(name, is_dummy=is_dummy)
        model_config = registry.read_config(checkpoint, is_dummy=is_dummy)
        capacity.check(model_config, requested)
        device = str(self._backend.device)
        loaded = registry.load(
            name, checkpoint, model_config, config.dtype, device, is_dummy=is_dummy
        )
        self._model = loaded.model
        parameters = inspect.signature(loaded.model.forward).parameters
        self._has_logits_to_keep = "logits_to_keep" in parameters
        self.layers = probe.probe(loaded.model, str(checkpoint.path))
        self.model, self.description = loaded.name, loaded.description
        self.purpose = loaded.purpose
        self.aliases = loaded.aliases
        self.tokenizer_json = checkpoint.tokenizer_json
        self.chat_template = checkpoint.chat_template
        self.special_tokens = checkpoint.special_tokens
        self.bos_id = checkpoint.bos_id
        self.eos_ids = checkpoint.eos_ids
        self.num_ids: int = loaded.model.config.vocab_size
        embeddings = ("embeddings",) if config.embeddings else ()
        self.capabilities: tuple[str, ...] = ("tokens", "logprobs", *embeddings)
        return loaded.model.config

    def _set_threads(self, config: EngineConfig) -> None:
        threads = config.threads
        if threads is None:
            num_bytes = sum(parameter.nbytes for parameter in self._model.parameters())
            num_cores = devices.num_cores(num_engines=config.num_engines)
            threads = capacity.threads(num_bytes, num_cores)
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
            _, _, sums = self._run_rows(rows, pairs, (), pooled=pooled)
            return self._with_sums(CompletedStep([]), sums, pooled)
        if any(row.is_deferred for row in sampling_rows):
            assert not pooled, "lookahead leaves out contexts whose hidden states are summed"
            logits, _, _ = self._run_rows(rows, pairs, ())
            return _DeferredStep(lambda: self._sample_later(logits, sampling_rows))
        sampling = batch.make_batch(sampling_rows, self.eos_ids, self._num_logits)
        extra = () if sampling is None else sampling.ops
        logits, ops, sums = self._run_rows(rows, pairs, extra, pooled=pooled)
        return self._with_sums(self._sample(logits, sampling_rows, sampling, ops), sums, pooled)

    @torch.inference_mode()
    def _sample_later(self, logits: Tensor, rows: Sequence[ScheduledSequence]) -> Handle:
        """Start sampling a deferred step. No later step may have been started."""
        sampling = batch.make_batch(rows, self.eos_ids, self._num_logits)
        ops = [] if sampling is None else self._staging.put(sampling.ops)
        return self._sample(logits, rows, sampling, ops)

    def _sample(
        self,
        logits: Tensor,
        rows: Sequence[ScheduledSequence],
        sampling: batch.SamplingBatch | None,
        ops: Sequence[Tensor],
    ) -> Handle:
        """Start sampling.

        Args:
            logits: [S, V].
            rows: The rows that sample.
            sampling: Their operations; None takes the largest logits.
            ops: `sampling.ops` on the device.
        """
        if sampling is None:
            sampled = sample_tokens(logits, None)
        else:
            sampled = sample_tokens(
                logits, LogitOpsBatch(*ops), sampling.num_top, self._backend.sampling
            )
        copy_to_host = self._backend.copy_to_host
        if copy_to_host is None:
            return CompletedStep(batch.unpack(sampled.tolist(), rows, sampling))
        # The next step starts before a `NO_TOKEN` is read, and needs ids that have an embedding.
        self._previous_ids = sampled[: len(rows)].long().clamp(min=0)
        return _PendingStep(copy_to_host(sampled), rows, sampling)

    def _with_sums(
        self, step: Handle, sums: Tensor | None, pooled: Sequence[pooling.PooledTokens]
    ) -> Handle:
        """Return a handle whose `read` sets the rows' sums, too.

        Sums that are in main memory already are set now.
        """
        if sums is None:
            return step
        if self._backend.copy_to_host is not None:
            return _PendingSums(self._backend.copy_to_host(sums), pooled, step)
        pooling.set_hidden_sums(sums, pooled)
        return step

    @torch.inference_mode()
    def warm(self) -> None:
        """Record steps of all padded sizes, so that a call waits for no recording of them."""
        if self._graphs is None:
            return
        began_s = time.monotonic()
        steps = warmup_steps(self.limits, self._scratch_block, self._layer_groups)
        # A recording becomes useless when a buffer that it reads is replaced by a larger one.
        plans = (pack(step.rows, self._planner).plan for step in steps)
        variants = [tuple(self._prepare_plan(plan) or ()) for plan in plans]
        were_run: set[tuple[Hashable, ...]] = set()
        for step, variant in zip(steps, variants, strict=True):
            # Without recordings, one step of a variant compiles its kernels.
            if self._graphs.can_record or variant not in were_run:
                self._run_rows(step.rows, (), (), warmup_size=step.size)
            were_run.add(variant)
        _log.info(
            "recorded %d variants of steps in %.1f s",
            len(self._graphs),
            time.monotonic() - began_s,
        )
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
        *,
        warmup_size: int | None = None,
        pooled: Sequence[pooling.PooledTokens] = (),
    ) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """Copy the arrays of a step in one transfer, then run the step.

        Args:
            rows: At least one.
            pairs: Sources and destinations of block copies that precede the step, or nothing.
            extra: Other arrays to copy to the device.
            warmup_size: Set to record a step that is padded to this number of tokens.
            pooled: Tokens whose hidden states are summed.

        Returns:
            Logits [S, V] of the rows that sample, `extra` on the device, and the sums [P, H].
        """
        packed = pack(rows, self._planner)
        key = None if pooled else self._recording(packed.plan, warmup_size)
        size = None if key is None else key.num_tokens
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
        if key is None or self._graphs is None:
            return forward()[: len(packed.last)], staged[end:], None
        # All recordings write to one buffer: otherwise each would keep its own output.
        logits = self._graphs.run(
            key, lambda: self._recorded_logits[: len(staged[3])].copy_(forward())
        )
        return logits[: len(packed.last)], staged[end:], None

    def _recording(self, plan: Plan, warmup_size: int | None) -> _RecordingKey | None:
        """Return the key of a step's recording, with the padded number of tokens.

        None for a step that runs eagerly: one that is too large or cannot be recorded, or one with
        a prompt that no recording fits. Only `warm` records steps with prompts. A decode step that
        `warm` has not recorded is recorded when it is first needed.
        """
        graphs = self._graphs
        if graphs is None or not (graphs.can_record or len(graphs)):
            return None
        size = warmup_size or recorded_size(plan.num_queries, self.limits)
        if size is None:
            return None
        is_decode_step = plan.num_queries == plan.num_rows
        is_recordable = graphs.can_record and (warmup_size is not None or is_decode_step)
        found = self._prepare_plan(plan, may_grow=is_recordable)
        if found is None:
            return None
        key = _RecordingKey(size, tuple(found))
        if graphs.has(key) or (is_recordable and graphs.may_record(key)):
            return key
        return None

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
            return size, min(size, self.limits.max_sequences)
        if not self._is_invariant:
            return None
        pad = batch_invariance.padded_size
        return pad(packed.plan.num_queries), pad(len(packed.last))

    def _prepare_plan(self, plan: Plan, *, may_grow: bool = True) -> list[Hashable] | None:
        """Copy the plan to the device; return what a recording depends on besides its size.

        Without `may_grow`, return None if the memory of recorded steps is too small for it.
        """
        keys: list[Hashable] = []
        for group, (query, caches) in self._layer_groups.items():
            key = self._operations.prepare(
                query, *caches, plan, window=group.window, may_grow=may_grow
            )
            if key is None and not may_grow:
                return None
            keys.append(key)
        return keys

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
        token = attention_backend.CURRENT.set(attention)
        try:
            logits: Tensor = self._model(
                input_ids=ids[None], position_ids=positions[None], use_cache=False, **keep
            ).logits[0]
        finally:
            attention_backend.CURRENT.reset(token)
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
    def _calibrate(self, *, optimize: bool) -> None:
        """Run a few tokens to find the logits' width and the layer groups, and choose a decoder.

        Raises:
            EngineError: `model.unsupported` if the kernels do not support the shape of its heads.
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
        try:
            expected = self._forward(token_ids, positions, last, attention)
        except UnsupportedShapeError as error:
            reason = f"{self.model} does not run on {self._backend.device}: {error}; use device=cpu"
            raise EngineError("model.unsupported", reason) from error
        probe.check_logits(expected, self.model)
        self._num_logits = expected.shape[1]
        num_recorded = 0 if self._backend.record is None else self.limits.max_sequences
        self._recorded_logits = expected.new_empty(num_recorded, self._num_logits)
        # Plans are prepared for the most queries that a step may have, whatever their values are.
        most = max(self.limits.max_sequences, self.limits.step_tokens)
        self._layer_groups = {
            group: (query[:1].expand(most, -1, -1), caches)
            for group, (query, caches) in groups.items()
        }
        if optimize:
            attention = replace(attention, groups=None)
            self._optimize(partial(self._forward, token_ids, positions, last, attention), expected)

    def _optimize(self, compute: Callable[[], Tensor], expected: Tensor) -> None:
        """Use the fused decoder if it supports the model, otherwise modules with packed weights.

        Args:
            compute: Computes the logits of the calibration tokens.
            expected: The logits that the modules computed. [T, V]. A way that computes other
                logits is not used.
        """
        if fused_decoder.is_supported(self._model, self.layers):
            decoder = self._fused_decoder = self._make_fused_decoder()
            if fused_decoder.logits_match(compute(), expected):
                return
            _log.warning("model=%s: the fused decoder's logits differ; not using it", self.model)
            decoder.restore()
            self._fused_decoder = None
        if self._backend.pack is not None:
            modules = PackedModules(self._model, self._backend.pack)
            try:
                reason = (
                    "" if fused_decoder.logits_match(compute(), expected) else "the logits differ"
                )
            except (RuntimeError, LookupError, ValueError, AttributeError) as error:
                # A module may read a weight itself, which is empty now.
                reason = f"{type(error).__name__}: {error}"
            if reason:
                _log.warning("model=%s: no packed weights: %s", self.model, reason)
                modules.restore()

    def _make_fused_decoder(self) -> fused_decoder.FusedDecoder:
        """Return the fused decoder of the model, which takes over its weights."""
        decoder = fused_decoder.FusedDecoder(
            self._model,
            self.limits.context_len,
            self._backend.fused,
            self._backend.pack,
            multiply=self._backend.multiply,
            is_recorded=self._backend.record is not None,
        )
        if self._backend.make_decoder is not None:
            windows = [layer.window for layer in self.layers]
            decoder.compile(self._backend.make_decoder, self._caches, windows)
        return decoder

    @property
    def _cached_layers(self) -> list[probe.LayerKVSpec]:
        """The layers that have their own caches."""
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
        """Return False: the state of the device is not queried."""
        return False

    def sample(self) -> None:
        """Do nothing: sampling was started."""

    def read(self) -> list[int]:
        """Wait for the copy; return the ids."""
        return batch.unpack(self.wait().tolist(), self.rows, self.sampling)


@dataclass(slots=True)
class _DeferredStep:
    """A step whose forward pass was started; see `base.Handle`."""

    start_sampling: Callable[[], Handle]
    handle: Handle | None = None

    @property
    def is_ready(self) -> bool:
        """Return False: the step is not sampled yet, or the state of the device is not queried."""
        return False

    def sample(self) -> None:
        """Start sampling."""
        self.handle = self.start_sampling()

    def read(self) -> list[int]:
        """Wait for the ids."""
        assert self.handle is not None, "a deferred step is sampled before it is read"
        return self.handle.read()


@dataclass(frozen=True, slots=True)
class _PendingSums:
    """A step whose sums of hidden states are being copied to the host; see `base.Handle`."""

    wait: Callable[[], Tensor]
    pooled: Sequence[pooling.PooledTokens]
    step: Handle
    """The ids of the step."""

    @property
    def is_ready(self) -> bool:
        """Return False: the state of the device is not queried."""
        return False

    def sample(self) -> None:
        """Do nothing: such a step is not deferred."""

    def read(self) -> list[int]:
        """Wait for the copies; set the sums of the rows, and return the ids."""
        ids = self.step.read()
        pooling.set_hidden_sums(self.wait(), self.pooled)
        return ids
