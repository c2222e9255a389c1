"""Pinned prefixes: bounds, expiry, release when memory is short, and lost engines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from conure.engine import protocol
from conure.server.program.errors import ConflictError, ProgramError
from conure.server.runtime.calls.pins import PinKeeper, PinKey, maximal

BLOCK = 4
NUM_BLOCKS = 100
KEY = PinKey("tenant", "greet", "0" * 32)
OTHER = PinKey("tenant", "greet", "1" * 32)


class EngineDouble:
    """Records commands. Tests send its reports and set its free memory."""

    def __init__(self, name: str) -> None:
        self.name = name
        limits = SimpleNamespace(num_blocks=NUM_BLOCKS, block_size=BLOCK)
        self.hello = SimpleNamespace(limits=limits)
        self.num_available = self.lowest = NUM_BLOCKS
        self.fills: list[protocol.Fill] = []
        self.freed: list[tuple[int, int]] = []
        self.listeners: dict[int, Any] = {}

    def take_lowest_available(self) -> int:
        lowest, self.lowest = min(self.lowest, self.num_available), self.num_available
        return lowest

    def new_context(self, listener: Any, owner: str) -> int:
        context = len(self.listeners) + 1
        self.listeners[context] = listener
        return context

    def send(self, command: protocol.Fill) -> None:
        self.fills.append(command)

    def free(self, context: int, num_cached: int = 0, num_expected: int = 0) -> None:
        self.freed.append((context, num_cached))


class Setting:
    """A keeper of pins with a simulated clock and engines."""

    def __init__(self, *names: str) -> None:
        self.engines = {name: EngineDouble(name) for name in names}
        self.time = 1000.0
        services: Any = SimpleNamespace(
            engines=self.engines,
            engine=self.engines.get,
            model=SimpleNamespace(limits=self.engines[names[0]].hello.limits),
            clock=SimpleNamespace(now=lambda: self.time),
        )
        self.keeper = PinKeeper(services, share=0.1)


def ids(num_tokens: int, first: int = 0) -> list[int]:
    return list(range(first, first + num_tokens))


@pytest.fixture
def setting() -> Setting:
    return Setting("a")


def test_a_pin_holds_whole_blocks_and_counts_shared_ones_once(setting: Setting) -> None:
    setting.keeper.pin(KEY, [ids(9), [*ids(4), 77, 78, 79, 80]], 1060.0)
    cost = setting.keeper.cost(KEY)
    assert cost is not None
    assert (cost.blocks, cost.tokens, cost.engines) == (3, 12, ["a"])
    engine = setting.engines["a"]
    assert [len(fill.tokens) for fill in engine.fills] == [8, 8]
    assert {fill.salt for fill in engine.fills} == {"tenant"}
    engine.listeners[1](protocol.Filled(1, 8, 0, 0))
    engine.listeners[2](protocol.Filled(2, 4, 4, 0))
    setting.time += 10
    cost = setting.keeper.cost(KEY)
    assert cost is not None
    assert cost.computed_tokens == 12
    assert cost.block_seconds == pytest.approx(30)
    assert setting.keeper.totals.num_held_blocks == 3


def test_an_expired_pin_becomes_ordinary_cache(setting: Setting) -> None:
    setting.keeper.pin(KEY, [ids(8)], 1060.0)
    setting.time = 1059.9
    setting.keeper.check()
    assert setting.keeper.cost(KEY) is not None
    setting.time = 1060.0
    setting.keeper.check()
    assert setting.keeper.cost(KEY) is None
    assert setting.engines["a"].freed == [(1, 8)]
    assert setting.keeper.totals.num_expired == 1


def test_a_removed_pin_is_released(setting: Setting) -> None:
    setting.keeper.pin(KEY, [ids(8)], 1060.0)
    setting.keeper.unpin(KEY)
    setting.keeper.unpin(KEY)
    assert setting.engines["a"].freed == [(1, 8)]
    assert setting.keeper.totals.num_pins == 0


@pytest.mark.parametrize("length", [8, 9])
def test_pinning_again_extends_the_pin_and_computes_nothing(setting: Setting, length: int) -> None:
    setting.keeper.pin(KEY, [ids(length)], 1060.0)
    setting.keeper.pin(KEY, [ids(length)], 1200.0)
    assert len(setting.engines["a"].fills) == 1
    setting.time = 1100.0
    setting.keeper.check()
    assert setting.keeper.cost(KEY) is not None


def test_pins_are_limited_to_a_share_of_the_blocks(setting: Setting) -> None:
    setting.keeper.pin(KEY, [ids(6 * BLOCK)], 1060.0)
    with pytest.raises(ConflictError) as refused:
        setting.keeper.pin(OTHER, [ids(5 * BLOCK, first=500)], 1060.0)
    assert refused.value.code == "procedure.pin_limit"
    assert "needs 5 blocks" in refused.value.message
    assert "6 of the 10" in refused.value.message
    setting.keeper.pin(OTHER, [ids(4 * BLOCK, first=500)], 1060.0)
    assert setting.keeper.totals.num_held_blocks == 10


def test_a_prefix_shorter_than_a_block_is_refused(setting: Setting) -> None:
    with pytest.raises(ProgramError) as refused:
        setting.keeper.pin(KEY, [ids(BLOCK - 1)], 1060.0)
    assert refused.value.code == "procedure.pin_empty"


def test_short_memory_releases_pins_until_there_is_room(setting: Setting) -> None:
    setting.keeper.pin(KEY, [ids(8)], 2000.0)
    engine = setting.engines["a"]
    engine.lowest, engine.num_available = 6, 50  # memory was short in one step between two checks
    setting.keeper.check()
    cost = setting.keeper.cost(KEY)
    assert cost is not None
    assert cost.engines == []
    assert engine.freed == [(1, 8)]
    assert setting.keeper.totals.num_releases == 1
    engine.num_available = 26
    setting.keeper.check()
    assert len(engine.fills) == 1
    engine.num_available = 27
    setting.keeper.check()
    cost = setting.keeper.cost(KEY)
    assert cost is not None
    assert cost.engines == ["a"]
    assert len(engine.fills) == 2


def test_every_engine_holds_a_pin_and_a_new_epoch_fills_it_again() -> None:
    setting = Setting("a", "b")
    setting.keeper.pin(KEY, [ids(8)], 2000.0)
    setting.engines["b"] = EngineDouble("b")
    setting.keeper.check()
    cost = setting.keeper.cost(KEY)
    assert cost is not None
    assert cost.engines == ["a", "b"]
    assert len(setting.engines["a"].fills) == len(setting.engines["b"].fills) == 1


def test_a_fill_that_fails_is_freed_and_not_repeated(setting: Setting) -> None:
    setting.keeper.pin(KEY, [ids(8)], 2000.0)
    engine = setting.engines["a"]
    engine.listeners[1](protocol.Failed(1, "engine.oom", "no memory"))
    setting.keeper.check()
    assert len(engine.fills) == 1
    setting.keeper.unpin(KEY)
    assert engine.freed == [(1, 0)]


def test_a_prefix_of_another_prefix_needs_no_pin_itself() -> None:
    assert maximal([ids(4), ids(8), [], ids(2, first=5)]) == [ids(8), ids(2, first=5)]
