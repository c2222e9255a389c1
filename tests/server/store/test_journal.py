"""The journal: records are stored in order, once, and for their tenant only."""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from conure.server.program.errors import UnavailableError
from conure.server.store.journal import (
    AppendRecord,
    DeleteRecord,
    DuplicateKeyError,
    Journal,
    JournalError,
)
from conure.server.store.writer import WriteBatch

from .journal_records import FILE, crash_image, end, event, program, value


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[Journal]:
    journal = Journal.open(tmp_path / "data")
    yield journal
    await journal.close()


# --- the folder -------------------------------------------------------------------------


async def test_folder_and_files_are_private(journal: Journal, tmp_path: Path) -> None:
    await journal.append([program("p")])
    assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "data").iterdir()}
    files = {FILE, FILE + "-wal", FILE + "-shm", "lock", "commits.log", "reserve", "turn"}
    assert set(modes) == files
    assert set(modes.values()) == {0o600}


async def test_second_server_on_folder_is_rejected(journal: Journal, tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=f"in use by another server .process {os.getpid()}"):
        Journal.open(tmp_path / "data")
    await journal.append([program("p")])
    await journal.close()
    await Journal.open(tmp_path / "data").close()


def test_newer_journal_is_rejected_unchanged(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / FILE)
    connection.execute("PRAGMA user_version = 999")
    connection.close()
    for _ in range(2):  # The failed open released the folder.
        with pytest.raises(JournalError, match="schema version 999") as caught:
            Journal.open(tmp_path)
        assert caught.value.code == "store.unusable"


@pytest.mark.parametrize("what", ["not a database", "a file instead of the folder"])
def test_invalid_journal_is_rejected_with_its_path(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "data"
    if what == "not a database":
        folder.mkdir()
        (folder / FILE).write_bytes(b"something else, long enough to be read as a header" * 100)
    else:
        folder.write_bytes(b"")
    with pytest.raises(JournalError, match=str(folder)) as caught:
        Journal.open(folder)
    assert caught.value.code == "store.unusable"


async def test_full_sync_and_foreign_keys_are_enabled(journal: Journal) -> None:
    connection = journal._connection
    pragmas = {
        name: connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("journal_mode", "synchronous", "foreign_keys", "wal_autocheckpoint")
    }
    assert pragmas == {
        "journal_mode": "wal",
        "synchronous": 2,
        "foreign_keys": 1,
        "wal_autocheckpoint": 0,
    }


# --- reading ------------------------------------------------------------------


async def test_appended_records_are_read_back(journal: Journal) -> None:
    records = (program("p", key="k", body=b'{"x": 1}'), value("p", "x", b'"1"'))
    expected_events = [event(journal, "p", kind) for kind in ("node.started", "variable.committed")]
    await journal.append([*records, *expected_events])
    await journal.append([AppendRecord(program="p", body=b"first")])
    await journal.append([AppendRecord(program="p", body=b"second"), value("p", "y", b"2")])

    running = await journal.load_program("a", "p")
    assert running is not None
    assert (running.id, running.tenant, running.idempotency_key) == ("p", "a", "k")
    assert (running.body, running.body_hash) == (b'{"x": 1}', b'h{"x": 1}')
    assert (running.created_at, running.end) == (1.5, None)
    assert running.appends == [b"first", b"second"]
    assert {v.variable: v for v in running.values} == {
        "x": value("p", "x", b'"1"'),
        "y": value("p", "y", b"2"),
    }
    assert await journal.events("a", "p") == expected_events

    await journal.append([end("p")])
    ended = await journal.load_program("a", "p")
    assert ended is not None
    assert ended.end == end("p")


async def test_events_are_paged_by_sequence_number(journal: Journal) -> None:
    await journal.append([program("p"), program("q")])
    mine = []
    for i in range(20):
        batch = [event(journal, "p"), event(journal, "q")]
        mine.append(batch[0])
        await journal.append(batch if i % 2 else batch[::-1])
    assert await journal.events("a", "p", after=0, limit=5) == mine[:5]
    assert await journal.events("a", "p", after=mine[4].seq, limit=5) == mine[5:10]
    assert await journal.events("a", "p", after=mine[-1].seq) == []
    size = len(mine[0].data)
    assert await journal.events("a", "p", max_bytes=3 * size) == mine[:3]
    assert await journal.events("a", "p", max_bytes=size - 1) == mine[:1]


async def test_programs_are_listed_newest_first(journal: Journal) -> None:
    await journal.append([program(f"p{number}") for number in range(4)])
    await journal.append([end("p0"), end("p2", "failed")])

    async def listed(status: str | None = None, before: int = 2**63 - 1) -> list[str]:
        found = await journal.list_programs("a", status=status, before=before, limit=3)
        return [f"{each.id} {each.status}" for each in found]

    assert await listed() == ["p3 None", "p2 failed", "p1 None"]
    third = (await journal.list_programs("a", status=None, before=2**63 - 1, limit=3))[-1]
    assert await listed(before=third.number) == ["p0 done"]
    assert await listed("running") == ["p3 None", "p1 None"]
    assert await listed("failed") == ["p2 failed"]
    assert await journal.list_programs("b", status=None, before=2**63 - 1, limit=3) == []


@pytest.mark.parametrize("status", [None, "running", "done"])
async def test_programs_are_found_by_name_or_id(journal: Journal, status: str | None) -> None:
    named = {"p_1": "Travel Reports", "p_2": "tea_100%", "p_23": "Über-Straße"}
    await journal.append(
        [msgspec.structs.replace(program(id_), name=name) for id_, name in named.items()]
    )
    if status == "done":
        await journal.append([end(id_) for id_ in named])

    async def found(search: str) -> list[str]:
        listed = await journal.list_programs(
            "a", status=status, before=2**63 - 1, limit=9, search=search
        )
        return [each.id for each in listed]

    assert await found("") == ["p_23", "p_2", "p_1"]
    assert await found("travel") == ["p_1"]
    assert await found("REPORTS") == ["p_1"]
    assert await found("p_2") == ["p_23", "p_2"]
    assert await found("%") == ["p_2"]
    assert await found("über") == await found("STRASSE") == ["p_23"]
    assert await found("nothing") == []


async def test_listing_has_name_times_and_calls(journal: Journal) -> None:
    await journal.append([msgspec.structs.replace(program("p"), name="summary")])
    await journal.append([msgspec.structs.replace(end("p"), receipt=b'{"calls":3}')])
    (listing,) = await journal.list_programs("a", status="done", before=2**63 - 1, limit=1)
    assert (listing.name, listing.num_calls) == ("summary", 3)
    assert listing.finished_at is not None


async def test_other_tenant_sees_nothing(journal: Journal) -> None:
    await journal.append([program("p", key="k"), value("p", "x", b"1"), event(journal, "p")])
    assert await journal.load_program("b", "p") is None
    assert await journal.events("b", "p") == []
    assert await journal.find_idempotent("b", "k") is None
    assert await journal.find_idempotent("a", "k") == ("p", b"h{}")
    await journal.append([end("p")])
    assert await journal.find_status("b", "p") is None
    assert await journal.load_variable("b", "p", "x") is None


async def test_one_variable_is_read_with_the_end(journal: Journal) -> None:
    await journal.append([program("p"), value("p", "x", b"1"), value("p", "y", b"2")])
    assert await journal.find_status("a", "p") is None
    assert await journal.load_variable("a", "p", "x") is None
    await journal.append([end("p", "failed")])
    assert await journal.find_status("a", "p") == "failed"
    ending = end("p", "failed")
    assert await journal.load_variable("a", "p", "x") == (ending, value("p", "x", b"1"))
    assert await journal.load_variable("a", "p", "z") == (ending, None)


async def test_names_are_bound_and_never_sql(journal: Journal) -> None:
    name = "x'); DROP TABLE program; --"
    await journal.append([program(name, tenant=name, key=name), value(name, name, b"1")])
    stored = await journal.load_program(name, name)
    assert stored is not None
    assert [v.variable for v in stored.values] == [name]


async def test_large_value_is_stored_unchanged(journal: Journal) -> None:
    content = random.Random(0).randbytes(3_000_000)
    await journal.append([program("p", body=content), value("p", "x", content)])
    stored = await journal.load_program("a", "p")
    assert stored is not None
    assert (stored.body, stored.values[0].value) == (content, content)


async def test_unfinished_programs_have_all_records(journal: Journal, tmp_path: Path) -> None:
    await journal.append([program("ended"), end("ended")])
    await journal.append([program("old", tenant="b"), program("new")])
    started = event(journal, "old", "node.started")
    committed = event(journal, "old", "variable.committed")
    requested = event(journal, "old", "client.requested")
    await journal.append([requested, committed, started, value("old", "x", b"1")])
    await journal.append([AppendRecord(program="old", body=b"1"), event(journal, "ended")])
    await journal.append([AppendRecord(program="old", body=b"2")])
    await journal.close()

    again = Journal.open(tmp_path / "data")
    old, new = await again.unfinished()
    assert (old.id, old.tenant, old.appends) == ("old", "b", [b"1", b"2"])
    assert (old.values, old.events) == ([value("old", "x", b"1")], [started, requested])
    assert (new.id, new.values, new.events, new.end) == ("new", [], [], None)
    await again.append([end("old"), end("new")])
    assert await again.unfinished() == []
    await again.close()


# --- order and grouping -----------------------------------------------------------------


async def test_futures_resolve_in_append_order(journal: Journal) -> None:
    await journal.append([program("p")])
    resolved: list[int] = []
    futures = []
    for i in range(1_500):
        future = journal.append([event(journal, "p")] if i % 3 else [])
        future.add_done_callback(lambda _, i=i: resolved.append(i))  # type: ignore[misc]
        futures.append(future)
        if i % 100 == 0:
            await asyncio.sleep(0)
    await journal.append(())
    assert resolved == list(range(1_500))
    assert all(future.done() for future in futures)


async def test_deletion_does_not_concern_later_batches_of_its_commit(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    journal._writer.join(60)  # From here on this thread uses the connection.
    loop = asyncio.get_running_loop()
    deletion = WriteBatch([DeleteRecord(programs=("p",))], loop.create_future(), False)
    accepted = WriteBatch([program("p")], loop.create_future(), False)
    assert journal._writer._try_commit([deletion, accepted]) is None
    assert [stored.id for stored in await journal.unfinished()] == ["p"]
    await journal.close()


async def test_waiting_batches_share_a_commit_and_a_wakeup(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    await journal.append([program("p")])
    loop = asyncio.get_running_loop()
    wakeups = 0
    original = loop.call_soon_threadsafe

    def counting(*args: object, **kwargs: object) -> object:
        nonlocal wakeups
        wakeups += 1
        return original(*args, **kwargs)  # type: ignore[arg-type]

    before = journal.status()
    monkeypatch.setattr(loop, "call_soon_threadsafe", counting)
    await asyncio.gather(*(journal.append([event(journal, "p")]) for _ in range(1_000)))
    after = journal.status()
    assert after.num_records - before.num_records == 1_000
    # At most 512 batches per commit, so at least 2; the first may start before the others arrive.
    assert 2 <= after.num_commits - before.num_commits <= 10
    assert wakeups == after.num_commits - before.num_commits
    assert after.num_pending == 0


async def test_an_empty_batch_waits_for_earlier_appends(journal: Journal) -> None:
    future = journal.append([program("p")])
    empty = journal.append(())
    assert not empty.done()
    await empty
    assert future.done()


async def test_cancelling_a_waiter_does_not_undo_append(journal: Journal) -> None:
    future = journal.append([program("p")])
    future.cancel()
    await journal.append(())
    assert await journal.load_program("a", "p") is not None


async def test_close_writes_pending_and_rejects_later(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    futures = [journal.append([program(f"p{i}")]) for i in range(700)]
    await journal.close()
    await journal.close()
    assert all(future.done() and future.exception() is None for future in futures)
    with pytest.raises(JournalError, match="closed"):
        await journal.append([program("late")])
    again = Journal.open(tmp_path)
    assert len(await again.unfinished()) == 700
    await again.close()


# --- once -------------------------------------------------------------------------------


async def test_first_value_is_final_and_second_batch_rejected(
    journal: Journal,
) -> None:
    await journal.append([program("p"), value("p", "x", b"1")])
    bad = event(journal, "p", "variable.committed")
    good = event(journal, "p")
    # Four batches that share a commit: only the contradicting one is rejected.
    outcomes = await asyncio.gather(
        journal.append([value("p", "y", b"1")]),
        journal.append([bad, value("p", "x", b"2", attempt=2), program("q")]),
        journal.append([good]),
        journal.append([value("p", "y", b"3")]),
        return_exceptions=True,
    )
    assert [getattr(outcome, "code", None) for outcome in outcomes] == [
        None,
        "store.invariant",
        None,
        "store.invariant",
    ]
    assert "value of x in p" in str(outcomes[1])
    stored = await journal.load_program("a", "p")
    assert stored is not None
    assert {v.variable: v.value for v in stored.values} == {"x": b"1", "y": b"1"}
    assert stored.values[0].attempt == 1
    assert await journal.events("a", "p") == [good]
    assert await journal.load_program("a", "q") is None
    assert journal.healthy


async def test_unknown_program_and_second_end_are_rejected(journal: Journal) -> None:
    await journal.append([program("p"), end("p", "failed")])
    for records in (
        [value("ghost", "x", b"1")],
        [event(journal, "ghost")],
        [AppendRecord(program="ghost", body=b"")],
        [end("ghost")],
        [end("p", "done")],
        [program("p", tenant="b")],
    ):
        with pytest.raises(JournalError, match="contradicts"):
            await journal.append(records)
    stored = await journal.load_program("a", "p")
    assert stored is not None
    assert stored.end == end("p", "failed")


async def test_end_of_unknown_program_ends_no_other(journal: Journal) -> None:
    await journal.append([program("p"), end("p")])
    await journal.append([program("q")])
    with pytest.raises(JournalError, match="contradicts"):
        await journal.append([end("ghost")])
    assert [p.id for p in await journal.unfinished()] == ["q"]


async def test_unwritable_record_does_not_affect_others(journal: Journal) -> None:
    await journal.append([program("p")])
    lone_surrogate = value("p", "\ud800", b"1")
    outcomes = await asyncio.gather(
        journal.append([value("p", "x", b"1")]),
        journal.append([lone_surrogate]),
        journal.append([value("p", "y", b"1")]),
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in outcomes] == [type(None), JournalError, type(None)]
    assert str(outcomes[1]).isprintable()
    assert journal.healthy


async def test_idempotency_key_accepts_one_program(journal: Journal) -> None:
    outcomes = await asyncio.gather(
        *(
            journal.append([program(f"p{i}", key="k"), event(journal, f"p{i}")], fail_fast=True)
            for i in range(20)
        ),
        journal.append([program("other", tenant="b", key="k")]),
        journal.append([program("keyless")]),
        journal.append([program("keyless2")]),
        return_exceptions=True,
    )
    assert outcomes[0] is None
    for outcome in outcomes[1:20]:
        assert isinstance(outcome, DuplicateKeyError)
        assert (outcome.program, outcome.body_hash) == ("p0", b"h{}")
    assert outcomes[20:] == [None, None, None]
    assert await journal.find_idempotent("a", "k") == ("p0", b"h{}")
    assert {p.id for p in await journal.unfinished()} == {"p0", "other", "keyless", "keyless2"}


# --- sequence numbers -------------------------------------------------------------------


async def test_sequence_numbers_continue_after_clean_stop(tmp_path: Path) -> None:
    expected = 1
    for generation in range(1, 4):
        journal = Journal.open(tmp_path)
        assert journal.generation == generation
        assert journal.last_seq == expected - 1
        assert [journal.next_seq() for _ in range(5)] == list(range(expected, expected + 5))
        await journal.append([program(f"p{generation}"), event(journal, f"p{generation}")])
        expected += 6
        await journal.close()


async def test_sequence_number_is_not_reused_after_crash(journal: Journal, tmp_path: Path) -> None:
    await journal.append([program("p"), event(journal, "p")])
    handed_out = max(journal.next_seq() for _ in range(100_000))  # None of them is on disk.
    survivor = Journal.open(crash_image(tmp_path / "data", tmp_path / "image"))
    assert survivor.next_seq() > handed_out
    await survivor.close()


async def test_numbers_run_out_before_reuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conure.server.store.database.SEQ_BLOCK", 100)
    monkeypatch.setattr("conure.server.store.writer.SEQ_BLOCK", 100)
    journal = Journal.open(tmp_path)
    await journal.append([program("p")])
    for _ in range(300):  # With events that reach the disk, the reservation moves on.
        await journal.append([event(journal, "p")])
    reserved = journal._writer.reserved_seq
    while journal.last_seq < reserved - 1:
        journal.next_seq()
    with pytest.raises(UnavailableError):
        journal.next_seq()
    await journal.close()
    assert reserved <= 300 + 150
