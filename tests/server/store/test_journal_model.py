"""The journal, compared with plain dicts under random interleavings, stops and crashes."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from conure.server.store.journal import AppendRecord, EventRecord, Journal, Record

from .journal_records import crash_image, end, program, value

Action = tuple[str, int, int]
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["program", "value", "event", "append", "end", "wait", "reopen", "crash"]),
        st.integers(0, 3),
        st.integers(0, 3),
    ),
    max_size=40,
)


class ReferenceJournal:
    """The expected content of the journal, as plain dicts."""

    def __init__(self) -> None:
        self.programs: set[str] = set()
        self.values: dict[tuple[str, str], bytes] = {}
        self.events: dict[str, list[int]] = {}
        self.appends: dict[str, list[bytes]] = {}
        self.ended: set[str] = set()

    def apply(self, action: str, id_: str, name: str, content: bytes, seq: int) -> bool:
        """Take one batch; False if it contradicts."""
        if action == "program":
            if id_ in self.programs:
                return False
            self.programs.add(id_)
            return True
        if id_ not in self.programs:
            return False
        if action == "value":
            if (id_, name) in self.values:
                return False
            self.values[id_, name] = content
        elif action == "event":
            self.events.setdefault(id_, []).append(seq)
        elif action == "append":
            self.appends.setdefault(id_, []).append(content)
        elif action == "end":
            if id_ in self.ended:
                return False
            self.ended.add(id_)
        return True

    async def check(self, journal: Journal) -> None:
        for id_ in self.programs:
            stored = await journal.load_program("a", id_)
            assert stored is not None
            assert {(id_, v.variable): v.value for v in stored.values} == {
                key: content for key, content in self.values.items() if key[0] == id_
            }
            assert stored.appends == self.appends.get(id_, [])
            assert (stored.end is not None) == (id_ in self.ended)
            found = await journal.events("a", id_)
            assert [e.seq for e in found] == self.events.get(id_, [])
        unfinished = await journal.unfinished()
        assert {p.id for p in unfinished} == self.programs - self.ended


async def play(actions: list[Action], folder: Path) -> None:
    """Run actions. Actions between two waits run concurrently."""
    journal, model = Journal.open(folder / "0"), ReferenceJournal()
    pending: list[tuple[asyncio.Future[None], bool]] = []

    async def settle() -> None:
        outcomes = await asyncio.gather(*(f for f, _ in pending), return_exceptions=True)
        assert [outcome is None for outcome in outcomes] == [fits for _, fits in pending]
        pending.clear()

    last_seq = 0
    for step, (action, i, j) in enumerate(actions):
        id_, name, content = f"p{i}", f"v{j}", b"%d" % step
        if action == "wait":
            await settle()
            await model.check(journal)
        elif action in ("reopen", "crash"):
            await settle()
            image = crash_image(folder / journal_folder(folder), folder / f"image{step}")
            await journal.close()
            if action == "crash":
                (folder / "current").write_text(image.name)
            journal = Journal.open(folder / journal_folder(folder))
            await model.check(journal)
        else:
            seq = journal.next_seq()
            assert seq > last_seq
            last_seq = seq
            if action != "program" and id_ not in model.programs:
                # Never created: a group may create a program after it was referenced.
                id_ = f"ghost{i}"
            records: dict[str, Record] = {
                "program": program(id_),
                "value": value(id_, name, content),
                "event": EventRecord(program=id_, seq=seq, type="t", data=b"", at=0.0),
                "append": AppendRecord(program=id_, body=content),
                "end": end(id_),
            }
            fits = model.apply(action, id_, name, content, seq)
            pending.append((journal.append([records[action]]), fits))
    await settle()
    await model.check(journal)
    await journal.close()


def journal_folder(folder: Path) -> str:
    """Return the current journal folder of `play`; a crash moves it to its image."""
    current = folder / "current"
    return current.read_text() if current.exists() else "0"


@settings(max_examples=60)
@given(ACTIONS)
def test_any_interleaving_matches_the_model(actions: list[Action]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(play(actions, Path(folder)))
