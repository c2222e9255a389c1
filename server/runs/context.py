"""The KV of one call: a context on one engine, forked from what is there already.

Knows where a call's tokens lie, which prefixes other calls will read, and what holding
them costs. Refuses to know what the tokens say and what comes of them.

Kept true: a call has at most one context, on at most one engine; every context that is made
is freed, or handed to `Sharing` for the calls that will fork from it.
"""

from __future__ import annotations

import time
from typing import Protocol

from conure.engine import api

from ..engines.engine import Engine, Listener
from .execution import NodeState
from .sharing import Held, Sharing, common_prefix_len

MIN_SHARED_TOKENS = 16
"""A prefix shorter than a block is filled again more cheaply than it is kept."""


class Engines(Protocol):
    """Where the engines are."""

    def engine(self, name: str) -> Engine | None:
        """The engine of that name, if it is alive."""
        ...


class CallContext:
    """The context of one call, made by the first `fill` on an engine."""

    def __init__(
        self,
        program: str,
        state: NodeState,
        sharing: Sharing,
        engines: Engines,
        *,
        hashes: tuple[bytes, ...],
        reads: tuple[bytes, ...],
        block_size: int,
        rank: float,
        salt: str,
        keeps_all: bool,
    ) -> None:
        self.engine: Engine | None = None
        self.id: int | None = None
        self.num_constant = 0
        """Leading tokens that are program text."""
        self.num_written = 0
        """Tokens taken from a context where a model had written them."""
        self.num_sent = 0
        """Tokens of the last fill, less what its context was forked from."""
        self.num_refilled = 0
        """Tokens of earlier slots that the last fill had to fill once more."""
        self._program = program
        self._state = state
        self._sharing = sharing
        self._engines = engines
        self._hashes = hashes
        """One for every boundary that a rendered prompt has, then those of its outputs."""
        self._reads = reads
        """Every prefix that it may find held, also such that end inside of what is spliced."""
        self._block_size = block_size
        self._rank = rank
        self._salt = salt
        self._keeps_all = keeps_all
        self._cuts: tuple[int, ...] = ()
        self._len = 0
        self._num_inherited = 0
        self._since = 0.0

    def home(self, ids: list[int]) -> tuple[str | None, int]:
        """The engine that keeps most of what a prompt starts with, and how many of its tokens."""
        if self.id is not None and self.engine is not None:
            return self.engine.name, self._len
        return self._sharing.find_longest(self._reads, ids)

    def cuts(self, keeps_all: bool) -> list[tuple[int, bool]]:
        """The boundaries of the first slot: tokens before each, and whether these stay cached."""
        return [(cut, keeps_all or cut <= self.num_constant) for cut in self._cuts]

    def set_rank(self, rank: float) -> None:
        """The call is more urgent than it was, or less."""
        self._rank = rank
        if self.engine is not None and self.id is not None:
            self.engine.send(api.Update(self.id, rank))

    def set_cuts(self, cuts: tuple[int, ...], constants: tuple[bool, ...]) -> None:
        """Say where the boundaries of the first slot lie in its tokens.

        Args:
            cuts: for every boundary, how many tokens lie wholly before it.
            constants: for every boundary, whether all before it is program text.
        """
        self._cuts = cuts
        pairs = zip(cuts, constants, strict=False)
        self.num_constant = max((cut for cut, is_constant in pairs if is_constant), default=0)

    # --- filling --------------------------------------------------------------------------

    def fill(self, engine: Engine, ids: list[int], prompt: list[int], listener: Listener) -> int:
        """Bring `ids` and `prompt` onto the engine; returns the context's id.

        Args:
            engine: where; another one than before gets everything anew.
            ids: tokens of the slots that are done.
            prompt: tokens that the next slot appends.
            listener: hears what the engine reports on the context.
        """
        if self.engine is not engine:
            self.free()
            self.engine = engine
        if self.id is None:
            self.id = self._fork(engine, ids, prompt, listener)
        else:
            engine.send(api.Fill(self.id, prompt, rank=self._rank))
            self.num_sent = len(prompt)
        self._len = len(ids) + len(prompt)
        return self.id

    def _fork(self, engine: Engine, ids: list[int], prompt: list[int], listener: Listener) -> int:
        """Make the context: forked from the deepest prefix that is held, and leaving held
        behind it every prefix that calls still to come will read.
        """
        wanted = ids + prompt
        self._sharing.engines.add(engine.name)
        parent, parent_len = None, 0
        # A prefix whose last reader is this call comes back released: fork first, free after.
        released = self._sharing.arrive(self._state.node.id)
        for held in [*released, *self._sharing.find(engine.name, self._reads)]:
            shared = common_prefix_len(held.ids, wanted)
            if held.engine == engine.name and shared > parent_len:
                parent, parent_len = held.context, shared
                self.num_written = max(0, shared - held.num_prompt)
                self._state.usage.retokenized = len(held.ids) - max(shared, held.num_prompt)
        if not ids and self._hashes:
            for boundary, end in enumerate(self._cuts):
                # Whole blocks only: a partial one would be computed by every reader once more.
                cut = end - end % self._block_size
                if cut - parent_len >= MIN_SHARED_TOKENS and self._is_worth_holding(boundary):
                    prefix = wanted[:cut]
                    num_keep = min(cut, self.num_constant)
                    parent = self._hold_prefix(
                        engine, prefix, boundary, parent, parent_len, num_keep, self._rank
                    )
                    parent_len = cut
        context = engine.new_context(listener, self._program)
        self._since = time.monotonic()
        self._num_inherited = parent_len
        self.num_sent = len(wanted) - parent_len
        self.num_refilled = max(0, len(ids) - parent_len)
        engine.send(
            api.Fill(context, wanted[parent_len:], parent, parent_len, self._salt, self._rank)
        )
        for held in released:
            release(held, self._engines, self._state, self._block_size)
        return context

    def fill_early(
        self,
        engine: Engine,
        ids: list[int],
        boundary: int,
        constants: tuple[bool, ...],
        rank: float,
    ) -> None:
        """Hold the beginning of the prompt for this call and whoever starts with it as well.

        Nothing happens where another engine holds it, or too little is new.

        Args:
            engine: where.
            ids: leading tokens of the prompt, as far as they can be known.
            boundary: the first one that they do not go beyond.
            constants: for every boundary, whether all before it is program text.
            rank: behind whom it is filled.
        """
        ids = ids[: len(ids) - len(ids) % self._block_size]
        home, _ = self._sharing.find_longest(self._reads, ids)
        if home not in (None, engine.name):
            return
        parent, parent_len = None, 0
        for held in self._sharing.find(engine.name, self._reads):
            shared = common_prefix_len(held.ids, ids)
            if shared > parent_len:
                parent, parent_len = held.context, shared
        if len(ids) - parent_len < MIN_SHARED_TOKENS:
            return
        num_keep = len(ids) if constants[boundary] else 0
        self._sharing.engines.add(engine.name)
        self._hold_prefix(engine, ids, boundary, parent, parent_len, num_keep, rank)

    def _is_worth_holding(self, boundary: int) -> bool:
        coming = self._sharing.is_coming(self._hashes[boundary])
        if not coming:
            return False
        deeper = boundary + 1
        return deeper >= len(self._cuts) or self._sharing.is_coming(self._hashes[deeper]) < coming

    def _hold_prefix(
        self,
        engine: Engine,
        ids: list[int],
        boundary: int,
        parent: int | None,
        parent_len: int,
        num_keep: int,
        rank: float,
    ) -> int:
        held = Held(
            engine=engine.name,
            context=0,
            ids=ids,
            num_keep=num_keep,
            num_prompt=len(ids),
            since=time.monotonic(),
            num_own=len(ids) - parent_len,
            is_filled=False,
            rank=rank,
        )
        usage = self._state.usage

        def on_report(report: api.Report) -> None:
            if isinstance(report, api.Filled):
                if self._state.has_ended and self._state.started_at is None:
                    usage.prompt_discarded += report.computed  # its call never came to be
                else:
                    usage.computed += report.computed
                usage.cached += report.cached
                usage.recomputed += report.recomputed
                self._sharing.filled(held)
                if held.is_released:
                    engine.free(held.context, held.num_keep)
            elif isinstance(report, api.Failed):
                # Nobody may fork from it any more; who has done so already fails with it.
                self._sharing.discard(held)
                engine.free(held.context)

        held.context = engine.new_context(on_report, self._program)
        self._sharing.fill(held)
        engine.send(api.Fill(held.context, ids[parent_len:], parent, parent_len, self._salt, rank))
        unneeded = self._sharing.hold(self._hashes[boundary], held)
        if unneeded is held:
            held.is_released = True  # another engine keeps it: here it lives for this call only
        elif unneeded is not None:
            release(unneeded, self._engines, self._state, self._block_size)
        if unneeded is not held:
            _keep_back(engine, held)
        return held.context

    # --- letting go -----------------------------------------------------------------------

    def keep(self, ids: list[int], *, num_prompt: int) -> None:
        """The call is done: leave the context to the readers that the graph knows of, else free it.

        Args:
            ids: all its tokens.
            num_prompt: those before the last output.
        """
        assert self.engine is not None
        assert self.id is not None
        self._len = len(ids)
        self._account()
        held = Held(
            engine=self.engine.name,
            context=self.id,
            ids=ids,
            # Worth keeping as cache: program text, and whole turns of chats and sessions.
            num_keep=len(ids) if self._keeps_all else self.num_constant,
            num_prompt=num_prompt,
            since=time.monotonic(),
            num_own=len(ids) - self._num_inherited,
            rank=self._rank,
        )
        self.id = None
        for boundary in range(len(self._hashes) - 1, len(self._cuts) - 1, -1):
            unneeded = self._sharing.hold(self._hashes[boundary], held)
            if unneeded is not None and unneeded is not held:
                release(unneeded, self._engines, self._state, self._block_size)
            if unneeded is not held:
                _keep_back(self.engine, held)
                return
        self.engine.free(held.context, held.num_keep)

    def free(self) -> None:
        """Give the context up, whatever runs on it; safe to repeat."""
        if self.engine is not None and self.id is not None:
            self._account()
            self.engine.send(api.Abort(self.id))
            self.engine.free(self.id)
        self.id = None

    def lose(self) -> None:
        """The engine is gone, and the context with it."""
        self.engine = None
        self.id = None

    def leave(self) -> None:
        """The call will not fork any more: prefixes that only it waited for are given up."""
        for held in self._sharing.arrive(self._state.node.id):
            release(held, self._engines, self._state, self._block_size)

    def _account(self) -> None:
        blocks = -(-max(self._len - self._num_inherited, 0) // self._block_size)
        self._state.usage.block_seconds += blocks * (time.monotonic() - self._since)


def _keep_back(engine: Engine, held: Held) -> None:
    """Where blocks are short, a prefix that was made for readers is taken to be read at once,
    until the program says when.
    """
    if engine.is_crowded:
        engine.send(api.Update(held.context, held.rank, time.monotonic()))


def release(held: Held, engines: Engines, state: NodeState, block_size: int) -> None:
    """Give up a context that kept a prefix, and book what it held."""
    blocks = -(-held.num_own // block_size)
    now = time.monotonic()
    state.usage.block_seconds += blocks * (now - held.since)
    held.since = now
    held.is_released = True
    if held.is_filled and (engine := engines.engine(held.engine)) is not None:
        engine.free(held.context, held.num_keep)
