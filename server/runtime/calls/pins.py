"""Prefixes that engines keep in KV for a time, as stored procedures request.

A pin is an idle context with the tokens of a constant prefix. Calls find its blocks in the
engine's prefix tree, like any other KV with the same tokens and salt.

A pin ends at its expiry or when it is removed. When memory is short, an engine evicts cached blocks
first, then the blocks of pins, and last the prefixes that running programs retain: a pin never
delays a call. When fewer than 1/RELEASE_BELOW of an engine's blocks are available, its pins are
released, and their KV becomes ordinary cache. Pins are filled again once 1/FILL_ABOVE of the
engine's blocks would remain available.

Out of scope: the texts of prefixes, and the journal.

Invariants: pins never have more than their share of the blocks of an engine. A context of a pin
belongs to one engine in one epoch, and is freed with the pin.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from conure.engine import protocol

from ...engines.protocol import Engine
from ...program.errors import ConflictError, ProgramError
from ...program.procedures import PinnedPrefix
from ...prompts.served_model import ServedModel
from ..services import RuntimeServices

RELEASE_BELOW = 16
FILL_ABOVE = 4
OWNER = "pinned prefixes"
"""Names the contexts of pins where others have the id of a program."""


class PinKey(NamedTuple):
    """The version of a procedure."""

    tenant: str
    name: str
    version: str


class PinTotals(NamedTuple):
    """What all pins cost."""

    num_pins: int = 0
    num_tokens: int = 0
    """Tokens of all pinned prefixes; a shared token counts once."""
    num_held_blocks: int = 0
    """Blocks that pins hold now, on all engines."""
    num_computed_tokens: int = 0
    """Since the start of the server."""
    num_expired: int = 0
    num_releases: int = 0
    """Times that an engine's pins were released because its memory was short."""


@dataclass(slots=True)
class _Held:
    """The contexts of a pin on one engine."""

    engine: Engine
    since: float
    contexts: dict[int, list[int]] = field(default_factory=dict)
    """Ids by context."""


@dataclass(slots=True)
class _Pin:
    prefixes: list[list[int]]
    num_blocks: int
    num_tokens: int
    expires_at: float
    held: dict[str, _Held] = field(default_factory=dict)
    """By name of the engine."""
    num_computed: int = 0
    block_seconds: float = 0.0


class PinKeeper:
    """The pins of one server. `check` must be called about once a second."""

    def __init__(
        self, services: RuntimeServices, *, share: float, clock: Callable[[], float] | None = None
    ) -> None:
        self._services = services
        self._share = share
        self._now = services.clock.now if clock is None else clock
        self._pins: dict[PinKey, _Pin] = {}
        self._num_computed = self._num_expired = self._num_releases = 0

    @property
    def model(self) -> ServedModel:
        """The model whose tokens the prefixes are."""
        return self._services.model

    def now(self) -> float:
        """Return the time in Unix seconds."""
        return self._now()

    # --- changes --------------------------------------------------------------------------

    def check_room(self, key: PinKey, prefixes: Sequence[Sequence[int]]) -> None:
        """Check that a pin fits in addition to the existing ones.

        Raises:
            ProgramError: `procedure.pin_empty`.
            ConflictError: `procedure.pin_limit`.
        """
        size = self._services.model.limits.block_size
        needed = len(_blocks(prefixes, size))
        if not needed:
            message = (
                f"no prompt of {key.name}@{key.version} begins with {size} tokens, one block of "
                "KV, that do not depend on parameters: store it without `pin_s`"
            )
            raise ProgramError("procedure.pin_empty", message, path="pin_s")
        taken = sum(pin.num_blocks for other, pin in self._pins.items() if other != key)
        allowed = int(self._share * self._services.model.limits.num_blocks)
        if taken + needed > allowed:
            message = (
                f"the pin needs {needed} blocks of KV on each engine, and {taken} of the {allowed} "
                "for pins are taken: remove a pin, or start the server with a larger --pin-share"
            )
            raise ConflictError("procedure.pin_limit", message)

    def pin(self, key: PinKey, prefixes: list[list[int]], expires_at: float) -> None:
        """Keep prefixes in the KV of all engines until a time; replaces an earlier pin.

        Raises:
            ProgramError, ConflictError: as `check_room`.
        """
        self.check_room(key, prefixes)
        size = self._services.model.limits.block_size
        cut = (ids[: len(ids) - len(ids) % size] for ids in prefixes)
        whole = [ids for ids in cut if ids]
        known = self._pins.get(key)
        if known is not None and known.prefixes == whole:
            known.expires_at = expires_at
            return
        self.unpin(key)
        blocks = _blocks(whole, size)
        self._pins[key] = _Pin(whole, len(blocks), len(blocks) * size, expires_at)
        self.check()

    def unpin(self, key: PinKey) -> None:
        """Release a pin; safe to repeat."""
        pin = self._pins.pop(key, None)
        if pin is not None:
            for name in list(pin.held):
                self._release(pin, name)

    def check(self) -> None:
        """End pins that have expired, and adapt the others to the memory of the engines."""
        now = self._now()
        for key in [key for key, pin in self._pins.items() if pin.expires_at <= now]:
            self.unpin(key)
            self._num_expired += 1
        for pin in self._pins.values():
            for name, held in list(pin.held.items()):
                if self._services.engine(name) is not held.engine:
                    self._account(pin, pin.held.pop(name))
        for engine in self._services.engines.values():
            self._adapt(engine)

    def _adapt(self, engine: Engine) -> None:
        total = engine.hello.limits.num_blocks
        lowest = engine.take_lowest_available()
        holders = [pin for pin in self._pins.values() if engine.name in pin.held]
        if holders and lowest * RELEASE_BELOW < total:
            self._num_releases += 1
            for pin in holders:
                self._release(pin, engine.name)
            return
        available = engine.num_available
        for pin in self._pins.values():
            if engine.name in pin.held or (available - pin.num_blocks) * FILL_ABOVE < total:
                continue
            self._fill(pin, engine)
            available -= pin.num_blocks

    # --- engines --------------------------------------------------------------------------

    def _fill(self, pin: _Pin, engine: Engine) -> None:
        held = pin.held[engine.name] = _Held(engine, self._now())
        (key,) = (key for key, each in self._pins.items() if each is pin)
        for ids in pin.prefixes:

            def on_report(report: protocol.Report, index: int = len(held.contexts)) -> None:
                if isinstance(report, protocol.Filled):
                    pin.num_computed += report.computed + report.recomputed
                    self._num_computed += report.computed + report.recomputed
                elif isinstance(report, protocol.Failed):
                    context = list(held.contexts)[index]
                    held.contexts[context] = []
                    engine.free(context)

            context = engine.new_context(on_report, OWNER)
            held.contexts[context] = ids
            # Before later calls, which then share it even in the same step.
            engine.send(protocol.Fill(context, ids, salt=key.tenant, rank=time.monotonic()))

    def _release(self, pin: _Pin, name: str) -> None:
        held = pin.held.pop(name)
        self._account(pin, held)
        for context, ids in held.contexts.items():
            if ids:
                held.engine.free(context, len(ids), len(ids))

    def _account(self, pin: _Pin, held: _Held) -> None:
        pin.block_seconds += pin.num_blocks * (self._now() - held.since)

    # --- costs ----------------------------------------------------------------------------

    def cost(self, key: PinKey) -> PinnedPrefix | None:
        """Return the cost of a pin; None if the key has no pin."""
        pin = self._pins.get(key)
        return None if pin is None else self._cost(pin)

    def costs_of(self, tenant: str, versions: Iterable[str]) -> dict[str, PinnedPrefix]:
        """Return the costs of the pins of some versions, by `name@version`."""
        requested = frozenset(versions)
        return {
            f"{key.name}@{key.version}": self._cost(pin)
            for key, pin in self._pins.items()
            if key.tenant == tenant and key.version in requested
        }

    def _cost(self, pin: _Pin) -> PinnedPrefix:
        now = self._now()
        running = sum(pin.num_blocks * (now - held.since) for held in pin.held.values())
        return PinnedPrefix(
            expires_at=pin.expires_at,
            tokens=pin.num_tokens,
            blocks=pin.num_blocks,
            engines=sorted(pin.held),
            computed_tokens=pin.num_computed,
            block_seconds=pin.block_seconds + running,
        )

    @property
    def totals(self) -> PinTotals:
        """What all pins cost."""
        pins = self._pins.values()
        return PinTotals(
            num_pins=len(pins),
            num_tokens=sum(pin.num_tokens for pin in pins),
            num_held_blocks=sum(pin.num_blocks * len(pin.held) for pin in pins),
            num_computed_tokens=self._num_computed,
            num_expired=self._num_expired,
            num_releases=self._num_releases,
        )


def maximal(prefixes: Iterable[list[int]]) -> list[list[int]]:
    """Return the prefixes that no other one begins with."""
    longest: list[list[int]] = []
    for ids in sorted(prefixes, key=len, reverse=True):
        if ids and not any(other[: len(ids)] == ids for other in longest):
            longest.append(ids)
    return longest


def _blocks(prefixes: Sequence[Sequence[int]], size: int) -> set[tuple[int, int]]:
    """Return a key for each whole block; blocks after the same tokens have the same key."""
    return {key for ids in prefixes for key in _chain(ids, size)}


def _chain(ids: Sequence[int], size: int) -> Iterator[tuple[int, int]]:
    before = 0
    for end in range(size, len(ids) + 1, size):
        before = hash((before, *ids[end - size : end]))
        yield end, before
