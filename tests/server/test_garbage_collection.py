"""Garbage collection in short pieces, and programs that need none."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conure.server import garbage_collection
from conure.server.garbage_collection import MIDDLE, MIN_COLLECTIONS, YOUNG, GarbageCollection
from conure.server.runtime.persistence import program_directory

from .inprocess import Program, ServerHarness, expr, generate, server_harness, var
from .service_double import until


class Node:
    """An object that can be part of a cycle."""

    def __init__(self) -> None:
        self.other: Node = self


@pytest.fixture
def restored_collector() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)
    gc.collect()


def promote() -> list[list[Any]]:
    """Return objects that have survived the collections of young objects."""
    return [[] for _ in range(2 * MIN_COLLECTIONS * YOUNG * MIDDLE)]


@pytest.mark.usefixtures("restored_collector")
def test_garbage_that_is_not_frozen_is_collected() -> None:
    collection = GarbageCollection(lambda: 0)
    collection.begin()
    node = Node()
    kept = promote()
    lost = weakref.ref(node)
    del node
    assert lost() is not None
    collection.collect()
    assert lost() is None
    assert gc.get_freeze_count() > len(kept)


@pytest.mark.usefixtures("restored_collector")
def test_nothing_is_scanned_before_objects_were_promoted() -> None:
    collection = GarbageCollection(lambda: 0)
    collection.begin()
    before = gc.get_stats()[2]["collections"]
    collection.collect()
    assert gc.get_stats()[2]["collections"] == before


@pytest.mark.usefixtures("restored_collector")
@pytest.mark.parametrize(("num_nodes", "is_collected"), [(0, True), (10_000, False)])
def test_frozen_objects_are_scanned_if_live_programs_do_not_explain_them(
    monkeypatch: pytest.MonkeyPatch, num_nodes: int, is_collected: bool
) -> None:
    monkeypatch.setattr(garbage_collection, "MAX_UNEXPLAINED", 50_000)
    collection = GarbageCollection(lambda: num_nodes)
    collection.begin()
    node, kept = Node(), promote()
    collection.collect()
    lost = weakref.ref(node)
    del node
    kept.clear()
    garbage = [Node() for _ in range(60_000)]
    gc.freeze()
    del garbage
    collection.collect_frozen()
    assert (lost() is None) is is_collected


PROGRAMS: dict[str, list[Any]] = {
    "expressions": [expr(f"e{i}", var(f"e{i - 1}") if i else 1) for i in range(10)],
    "calls": [generate(f"g{i}", "x") for i in range(10)],
    "map": [
        {
            "id": "m",
            "op": "map",
            "items": {"range": [20]},
            "as": "i",
            "body": [expr("e", {"add": [var("i"), 1]})],
            "collect": {"all": "e"},
        }
    ],
}


async def run(harness: ServerHarness, nodes: list[Any]) -> Program:
    program = await harness.submit(nodes)
    assert (await program.end()).status == "done"
    return program


@pytest.mark.usefixtures("restored_collector")
@pytest.mark.parametrize("name", PROGRAMS)
async def test_ended_program_is_free_without_a_collection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(program_directory, "MAX_RECENT", 1)
    async with server_harness(tmp_path) as harness:
        gc.disable()
        try:
            program = await run(harness, PROGRAMS[name])
            ended = harness.executor.programs.find(program.id, "t")
            assert ended is not None
            state = weakref.ref(ended.state)
            del ended
            for _ in range(3):  # later programs take its place among the recent ones
                await run(harness, [expr("a", 1)])
            await until(lambda: state() is None)
        finally:
            gc.enable()
