"""Damages journals at random, opens them, and compares what is reported as kept with the truth.

    python -m tests.server.store.damaged_journals [--num 500] [--seed 0]

A `Sample` is a journal as a killed server leaves it: part of it is in the main file, part in the
write-ahead log. `damage` changes a copy of it.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from conure.server.store.damage.integrity import JournalReport
from conure.server.store.journal import (
    AppendRecord,
    EndRecord,
    EventRecord,
    Journal,
    JournalError,
    ProgramRecord,
    StoredProgram,
    ValueRecord,
)

MAIN, LOG, COMMITS = "journal.sqlite3", "journal.sqlite3-wal", "commits.log"


class Content(NamedTuple):
    """The content of one program, as a client may have read it."""

    stored: StoredProgram
    events: list[EventRecord]


class Sample(NamedTuple):
    """A folder with the files of a killed server, and what was acknowledged."""

    folder: Path
    programs: dict[str, Content]


async def make_sample(folder: Path, *, seed: int, num_programs: int = 120) -> Sample:
    """Write a journal with ended and open programs, and copy its files while it is open."""
    rng = random.Random(seed)
    journal = Journal.open(folder / "live")
    ids = [f"p_{rng.randbytes(12).hex()}" for _ in range(num_programs)]
    for number, id_ in enumerate(ids):
        await _write_program(journal, id_, rng)
        if number == num_programs * 2 // 3:
            journal._writer.checkpoint()
    target = folder / "sample"
    target.mkdir()
    for name in (COMMITS, MAIN, LOG):
        shutil.copy(folder / "live" / name, target / name)
    programs = {id_: await read_content(journal, id_) for id_ in ids}
    await journal.close()
    return Sample(target, programs)


async def _write_program(journal: Journal, id_: str, rng: random.Random) -> None:
    body = rng.randbytes(rng.choice((20, 200, 9_000)))
    await journal.append(
        [
            ProgramRecord(
                id=id_,
                tenant="a",
                idempotency_key=id_ if rng.random() < 0.5 else None,
                body_hash=b"h",
                body=body,
                created_at=rng.random(),
            ),
            _event(journal, id_, rng),
        ]
    )
    for number in range(rng.randrange(6)):
        value = ValueRecord(
            program=id_,
            variable=f"v{number}",
            value=rng.randbytes(rng.choice((5, 50, 6_000))),
            text=None if rng.random() < 0.3 else "t" * rng.randrange(40),
            token_ids=None if rng.random() < 0.3 else [1, 2, 3],
            tokenizer_hash="t",
            epoch=1,
            attempt=1,
        )
        await journal.append([value, _event(journal, id_, rng)])
    if rng.random() < 0.3:
        await journal.append([AppendRecord(program=id_, body=rng.randbytes(40))])
    if rng.random() < 0.6:
        last = EndRecord(
            program=id_,
            status="done",
            finished_at=rng.random(),
            receipt=b'{"calls": 1}',
            error=None,
            nodes=rng.randbytes(rng.choice((30, 3_000))),
        )
        await journal.append([_event(journal, id_, rng), last])


def _event(journal: Journal, id_: str, rng: random.Random) -> EventRecord:
    data = rng.randbytes(rng.randrange(10, 300))
    return EventRecord(program=id_, seq=journal.next_seq(), type="t", data=data, at=rng.random())


async def read_content(journal: Journal, id_: str) -> Content:
    """Return the content of a program of the sample."""
    stored = await journal.load_program("a", id_)
    assert stored is not None
    stored.values.sort(key=lambda value: value.variable)
    return Content(stored, await journal.events("a", id_))


# --- kinds of damage ----------------------------------------------------------------------


def flip(path: Path, rng: random.Random) -> None:
    """Flip one bit."""
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def cut(path: Path, rng: random.Random) -> None:
    """Cut off the end."""
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(len(content))])


def fill(path: Path, rng: random.Random) -> None:
    """Fill one to three pages with garbage, or with zeros."""
    content = bytearray(path.read_bytes())
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(max(1, len(content) // 4096)) * 4096
        page = rng.randbytes(4096) if rng.random() < 0.7 else bytes(4096)
        content[start : start + 4096] = page[: len(content) - start]
    path.write_bytes(content)


def remove(path: Path, _: random.Random) -> None:
    """Delete the file."""
    path.unlink()


KINDS: dict[str, tuple[str, Callable[[Path, random.Random], None]]] = {
    f"{change.__name__} {name}": (name, change)
    for name in (MAIN, LOG, COMMITS)
    for change in (flip, cut, fill, remove)
}


# --- the check ----------------------------------------------------------------------------


async def check_damaged(sample: Sample, folder: Path, kind: str, seed: int) -> str:
    """Damage a copy of the sample, open it, and return the outcome.

    Raises:
        AssertionError: if a report is not true.
    """
    shutil.copytree(sample.folder, folder)
    name, change = KINDS[kind]
    change(folder / name, random.Random(seed))
    try:
        journal = Journal.open(folder)
    except JournalError as error:
        text = str(error)
        assert "\n" not in text, text
        if error.code == "store.unusable":
            return "unusable"
        assert error.code == "store.damaged", text
        assert "--recover" in text, text
    else:
        assert journal.report.is_intact
        for id_, expected in sample.programs.items():
            assert await read_content(journal, id_) == expected, id_
        await journal.close()
        return "intact"
    journal = Journal.open(folder, recover=True)
    await _check_recovered(sample, journal)
    await journal.close()
    again = Journal.open(folder)  # the recovered journal is healthy
    assert again.report.is_intact
    await again.close()
    return "recovered"


async def _check_recovered(sample: Sample, journal: Journal) -> None:
    report: JournalReport = journal.report
    unfinished = {program.id: program for program in await journal.unfinished()}
    num_kept = 0
    unreadable = set(report.lost) | set(report.traces)
    for id_, expected in sample.programs.items():
        stored = await journal.load_program("a", id_)
        if stored is None:
            is_named = id_ in unreadable
            # An id that occurs in no readable byte cannot be named: the finding counts for it.
            assert is_named or any(
                "unreadable" in f or "cannot be read" in f or "missing" in f
                for f in report.findings
            ), (id_, report)
            continue
        num_kept += 1
        assert id_ not in report.lost
        if id_ in report.damaged:
            watch = unfinished[id_].watch
            assert watch is not None
            assert watch.problem == "program.damaged"
            for value in stored.values:
                assert value in expected.stored.values, id_
            for event in await journal.events("a", id_):
                assert event in expected.events, id_
            assert stored.body == expected.stored.body
        else:
            assert await read_content(journal, id_) == expected, id_
            assert (id_ in unfinished) == (expected.stored.end is None)
    assert num_kept == report.num_programs


async def check_many(num: int, seed: int, folder: Path) -> Counter[str]:
    """Check `num` damaged journals; return the outcomes by kind of damage."""
    outcomes: Counter[str] = Counter()
    sample = await make_sample(folder, seed=seed)
    kinds = list(KINDS)
    for number in range(num):
        kind = kinds[number % len(kinds)]
        target = folder / str(number)
        try:
            outcome = await check_damaged(sample, target, kind, seed * 1_000_003 + number)
        except Exception as error:
            error.add_note(f"{kind}, seed {seed * 1_000_003 + number}, folder {target}")
            raise
        outcomes[f"{kind}: {outcome}"] += 1
        shutil.rmtree(target)
    return outcomes


def main() -> None:
    """Check the number of damaged journals given on the command line, and print the outcomes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = asyncio.run(check_many(options.num, options.seed, Path(folder)))
    for name, count in sorted(outcomes.items()):
        sys.stdout.write(f"{count:5} {name}\n")


if __name__ == "__main__":
    main()
