"""The runner that computes: a transformers decoder over paged keys and values.

All rows of a step go through the model as one packed sequence `[1, T]` with positions of
their own and no cache of transformers'. At each attention layer the model calls the hook
of `architecture`; behind it stand this runner's caches, one pair per layer, and the step's
plan, made once for all layers: new keys and values go to their slots first, then every
query attends to its own context's blocks. Only rows that sample reach the output layer.

On an accelerator everything that a step needs there travels in one copy (`staging`), steps
of decode rows alone are padded and replayed from recordings (`graphs`), the next tokens are
chosen where the logits are (`choosing`), and one copy brings them home.

Knows the model, blocks and sampling; refuses to know which contexts there are, who waits
and what their text is. Kept true: nothing about a context survives a step except keys and
values in its blocks.

Shapes: T packed tokens - H query heads - K kv heads - D, E head dims of keys, values -
B tokens of a block - N blocks - V tokens of the vocabulary.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from conure.kernels.plan import Plan
from conure.kernels.planner import Planner
from conure.kernels.tree import ITEM_TOKENS

from . import architecture, backend, capacity, invariance, lean, named, sampling, trial, weights
from . import (
    device as devices,
)
from .choosing import Edits, choose
from .fused import FusedModel
from .graphs import Graphs, padded, sizes
from .runner import Done, Handle, Row, Runner
from .staging import Staging
from .step import Attention, Caches, Integers, Kind, Packed, filling, pack, warming

TRIAL_TOKENS: Final = 12
"""Tokens by which the lean forward pass is compared with the model."""
SAVED_BYTES: Final = 2**21
"""Keys of a layer that sharing must save to be worth another work item. Measured on a CPU: an
item costs about 0.1 ms on two cores, in which they read a few MiB."""
NEVER: Final = 2**62
"""As much reading as no sharing saves."""
STAGED_BYTES: Final = 2**24
"""Room for what a step needs on an accelerator; what does not fit is copied for itself."""

Lean: TypeAlias = lean.LeanModel | FusedModel

_log = logging.getLogger(__name__)


class LocalRunner(Runner):
    """A model behind paged KV memory."""

    def __init__(
        self,
        *,
        model: str,
        dummy: bool = False,
        dtype: str = "auto",
        device: str | backend.Backend = "cpu",
        context_len: int | None = None,
        num_blocks: int | None = None,
        block_size: int | None = None,
        step_tokens: int | None = None,
        max_sequences: int | None = None,
        threads: int | None = None,
        min_saved: int | None = None,
        is_lean: bool = True,
        batch_invariant: bool = False,
    ) -> None:
        """Load a model and allocate its caches.

        Args:
            model: A model folder, `owner/name` on the hub, `builtin` or `seeded`.
            dummy: Make random weights for the config at `model`, a folder or a file, instead
                of reading any.
            dtype: `float32`, `bfloat16`, on an accelerator `float16`, or `auto`: bfloat16
                where the folder says so, else float32.
            device: See `device.pick`; or what computes there.
            context_len: Tokens of a context at most; None takes what fits.
            num_blocks: Blocks of KV memory; None sizes them from free memory.
            block_size: Tokens of a block; None takes what `capacity` says, as below.
            step_tokens: Tokens of a step at most.
            max_sequences: Contexts that decode in one step at most.
            threads: Threads of torch in this process; None takes what `capacity` says.
            min_saved: Tokens of reading that a shared stretch must save; None follows
                `SAVED_BYTES`.
            is_lean: Run plain decoders by `lean` or `fused` instead of by their modules.
            batch_invariant: Give each context the same bits whatever else is in its steps;
                slower, and refused where a trial shows that it does not hold.

        Raises:
            EngineError: `model.not_found`, `model.invalid` or `model.unsupported` for the
                model, `engine.bad_option` for anything else that cannot be.
        """
        where = devices.pick(device) if isinstance(device, str) else device.device
        devices.check_dtype(dtype, where)
        devices.keep_freed_memory()
        wanted = capacity.Wanted(context_len, num_blocks, block_size, step_tokens, max_sequences)
        found = named.find(model, is_dummy=dummy)
        config = weights.read_config(found)
        capacity.check(config, wanted)
        loaded = named.load(model, found, config, dtype, where, is_dummy=dummy)
        self._model = loaded.model
        if threads is None:
            num_bytes = sum(each.nbytes for each in loaded.model.parameters())
            threads = capacity.threads(num_bytes, devices.num_cores())
        torch.set_num_threads(threads)
        if isinstance(device, str):
            device = backend.of(where, batch_invariant=batch_invariant)
        self._backend = device
        self._operations = device.operations
        self.layers = trial.probe(self._model, str(found.folder))
        self.limits = capacity.limits(
            config,
            wanted,
            token_bytes=sum(self._token_bytes()),
            free_bytes=devices.free_bytes(where),
            kind=where.type,
        )
        self._is_invariant = batch_invariant
        self._allocate()
        if min_saved is None or batch_invariant:
            min_saved = self._min_saved()
        self._planner = Planner(block_size=self.limits.block_size, min_saved=min_saved)
        self._kinds: dict[Kind, tuple[Tensor, Caches]] = {}
        is_near = where.type == "cpu" and device.record is None
        self._staging = Staging(where, 0 if is_near else STAGED_BYTES)
        self._graphs = None if device.record is None else Graphs(device.record)
        parameters = inspect.signature(self._model.forward).parameters
        self._keeps_logits = "logits_to_keep" in parameters
        self._introduce(loaded)
        self._lean: Lean | None = None
        # What the last step chose, on a device that is ahead of the host.
        self._sampled = torch.zeros(0, dtype=torch.int64)
        self._scratch = self.limits.num_blocks
        self._settle(is_lean=is_lean)
        if batch_invariant:
            invariance.check(self._logits, self.limits, self._model.config.vocab_size)

    @torch.inference_mode()
    def start(self, rows: Sequence[Row], copies: Sequence[tuple[int, int]]) -> Handle:
        """Copy blocks and run the rows; see `runner.Runner`."""
        pairs = [*np.array(copies, np.int64).T] if copies else []
        if not rows:
            if pairs:
                self._operations.copy_blocks(self._own_caches, *self._staging.put(pairs))
            return Done([])
        asking = [row for row in rows if row.sampling is not None]
        wishes = sampling.plan(asking, self.eos_ids, self._width) if asking else None
        logits, edits = self._run_rows(rows, pairs, () if wishes is None else wishes.edits)
        if not asking:
            return Done([])
        if wishes is None:
            chosen = choose(logits, None)
        else:
            chosen = choose(logits, Edits(*edits), wishes.num_top)
        bring = self._backend.bring
        if bring is None:
            return Done(sampling.read(chosen.tolist(), asking, wishes))
        self._sampled = chosen[: len(asking)].long()
        return _Coming(bring(chosen), asking, wishes)

    @torch.inference_mode()
    def warm(self) -> None:
        """Record decode steps of all sizes, so that none has to be while somebody waits."""
        if self._graphs is None:
            return
        steps = [
            rows
            for size in reversed(sizes(self.limits.max_sequences))
            for rows in warming(size, self.limits, self._scratch)
        ]
        # A recording is of no use once memory that it reads is replaced by larger one.
        for rows in [*filling(self.limits, self._scratch), *steps]:
            self._prepare(pack(rows, self._planner).plan)
        for rows in steps:
            self._run_rows(rows, (), ())

    def _run_rows(
        self, rows: Sequence[Row], pairs: Sequence[Integers], edits: Sequence[NDArray[Any]]
    ) -> tuple[Tensor, list[Tensor]]:
        """Bring a step to the device in one copy and run it.

        Args:
            rows: At least one.
            pairs: Blocks to copy before, sources and destinations; or nothing.
            edits: What is needed there besides.

        Returns:
            Logits [S, V] of the rows that sample, and `edits` on the device.
        """
        packed = pack(rows, self._planner)
        size = None
        if self._graphs is not None and packed.plan.num_queries == len(rows):
            size = padded(len(rows), self.limits.max_sequences)
        fixed = packed.arrays(self._sizes(packed, size), self._scratch)
        unread = () if packed.unread is None else packed.unread
        staged = self._staging.put([*fixed, *pairs, *unread, *edits])
        end = len(fixed) + len(pairs)
        if pairs:
            self._operations.copy_blocks(self._own_caches, *staged[len(fixed) : end])
        if packed.unread is not None:
            places, sources = staged[end : end + 2]
            staged[0].index_copy_(0, places, self._sampled.index_select(0, sources))
            end += 2
        forward = self._start(packed.plan, staged[: len(fixed)])
        if size is None or self._graphs is None:
            return forward()[: len(packed.last)], staged[end:]
        logits = self._graphs.run((size, *self._prepare(packed.plan)), forward)
        return logits[: len(packed.last)], staged[end:]

    @torch.inference_mode()
    def _logits(self, rows: Sequence[Row]) -> Tensor:
        """Run a step; return the logits [T, V] at all of its tokens."""
        packed = pack(rows, self._planner)
        packed = packed._replace(last=np.arange(packed.plan.num_queries))
        arrays = packed.arrays(self._sizes(packed, None), self._scratch)
        return self._start(packed.plan, self._staging.put(arrays))()[: len(packed.last)]

    def _sizes(self, packed: Packed, size: int | None) -> tuple[int, int] | None:
        """Return what a step is filled up to, of tokens and wanted ones."""
        if size is not None:
            return size, size
        if not self._is_invariant:
            return None
        return invariance.rounded(packed.plan.num_queries), invariance.rounded(len(packed.last))

    def _prepare(self, plan: Plan) -> list[Hashable]:
        """Bring the plan to the device; return what a recording depends on besides its size."""
        return [
            self._operations.prepare(query, *caches, plan, window=kind.window)
            for kind, (query, caches) in self._kinds.items()
        ]

    def _start(self, plan: Plan, staged: Sequence[Tensor]) -> Callable[[], Tensor]:
        """Return the forward pass that reads a step from the device."""
        ids, positions, slots, last = staged
        attention = Attention(plan, slots, self._caches, self._operations, self.layers)
        return lambda: self._forward(ids, positions, last, attention)

    def _forward(
        self, ids: Tensor, positions: Tensor, last: Tensor, attention: Attention
    ) -> Tensor:
        """Return the logits [len(last), V] at the packed tokens `last`."""
        if isinstance(self._lean, lean.LeanModel):
            return self._lean(ids, positions, last, attention.run)
        if self._lean is not None:
            return self._lean(ids, positions, last, attention)
        keep = {"logits_to_keep": last} if self._keeps_logits else {}
        token = architecture.CURRENT.set(attention)
        try:
            logits: Tensor = self._model(
                input_ids=ids[None], position_ids=positions[None], use_cache=False, **keep
            ).logits[0]
        finally:
            architecture.CURRENT.reset(token)
        return logits if self._keeps_logits else logits.index_select(0, last)

    @torch.inference_mode()
    def _settle(self, *, is_lean: bool) -> None:
        """Learn from a few tokens how wide logits are, and whether the lean pass may be used.

        There has to be one for the model, and it has to give the same logits.
        """
        num, size = min(TRIAL_TOKENS, self.limits.context_len), self.limits.block_size
        ids = [token * 37 % self._model.config.vocab_size for token in range(3, 3 + num)]
        row = Row(0, ids, 0, num, [*range(-(-num // size))])
        packed = pack([row], self._planner)._replace(last=np.arange(num))
        staged = self._staging.put(packed.arrays(None, self._scratch))
        ids_there, positions, slots, last = staged
        attention = Attention(
            packed.plan, slots, self._caches, self._operations, self.layers, self._kinds
        )
        wanted = self._forward(ids_there, positions, last, attention)
        self._width = wanted.shape[1]
        # What is prepared has as many queries as a step may have; nobody reads them.
        most = max(self.limits.max_sequences, self.limits.step_tokens)
        for kind, (query, caches) in self._kinds.items():
            self._kinds[kind] = query[:1].expand(most, -1, -1), caches
        attention = replace(attention, seen=None)
        if not (is_lean and lean.is_plain(self._model, self.layers)):
            return
        between = self._backend.fused
        if between is None:
            made: Lean = lean.LeanModel(self._model, self.limits.context_len)
        else:
            made = FusedModel(self._model, self.limits.context_len, between)
        self._lean = made
        found = self._forward(ids_there, positions, last, attention)
        if not lean.agrees(found, wanted):
            _log.warning("model=%s: the lean forward pass differs and is not used", self.model)
            made.restore()
            self._lean = None

    def _introduce(self, loaded: named.Named) -> None:
        """Set what the server is told of the model."""
        found = loaded.found
        self.model, self.description = loaded.name, loaded.description
        self.tokenizer_json = found.tokenizer_json
        self.chat_template = found.chat_template
        self.special_tokens = found.special_tokens
        self.bos_id = found.bos_id
        self.eos_ids = found.eos_ids
        self.capabilities: tuple[str, ...] = ("tokens", "logprobs")

    @property
    def _owners(self) -> list[trial.Layer]:
        """The layers that have keys and values of their own."""
        return [layer for index, layer in enumerate(self.layers) if layer.source == index]

    def _token_bytes(self) -> list[int]:
        """Return what a token takes in the caches of each owner."""
        sizes = [layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in self._owners]
        return [self._model.dtype.itemsize * size for size in sizes]

    def _min_saved(self) -> int:
        """Return how many tokens of reading a shared stretch must save; see `SAVED_BYTES`."""
        if self._is_invariant:
            return NEVER
        if self._backend.device.type != "cpu":
            return ITEM_TOKENS
        return SAVED_BYTES // max(1, max(self._token_bytes()) // 2)

    def _allocate(self) -> None:
        """Make the caches. Layers that share keys and values stand there with one pair."""
        own = {layer.source: self._new_caches(layer) for layer in self._owners}
        self._caches = [own[layer.source] for layer in self.layers]
        self._own_caches = list(chain.from_iterable(own.values()))

    def _new_caches(self, layer: trial.Layer) -> Caches:
        # One block more than anybody is told of, for what pads a step.
        is_padded = self._backend.record is not None or self._is_invariant
        num_blocks = self.limits.num_blocks + is_padded
        shape = (num_blocks, self.limits.block_size, layer.kv_heads)
        dtype, device = self._model.dtype, self._backend.device
        return (
            self._backend.operations.new_cache(*shape, layer.key_dim, dtype).to(device),
            self._backend.operations.new_cache(*shape, layer.value_dim, dtype).to(device),
        )


@dataclass(frozen=True, slots=True)
class _Coming:
    """A step whose results are on their way home; see `runner.Handle`."""

    wait: Callable[[], Tensor]
    rows: Sequence[Row]
    """Those that sample."""
    wishes: sampling.Wishes | None

    @property
    def is_ready(self) -> bool:
        """Nobody asked yet."""
        return False

    def read(self) -> list[int]:
        """Wait; return the ids."""
        return sampling.read(self.wait().tolist(), self.rows, self.wishes)
