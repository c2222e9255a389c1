"""Throughput of the journal in durable records per second, compared with an fsync of the same disk.

    python benchmarks/journal.py [--seconds 2] [--folder PATH]

Like a running program, a producer appends one batch (a value of 300 bytes and its event), waits
until it is durable, and repeats. `accept` is one producer of whole submissions. Other processes use
the disk, too, so compare figures within one run only: the fsync is measured before and after.

The last part fills a journal with unfinished programs and measures how long a start takes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path

from conure.server.store.journal import EventRecord, Journal, ProgramRecord, Record, ValueRecord

VALUE = b'"' + b"v" * 298 + b'"'
PRODUCERS = (1, 8, 64, 512)


def program(id_: str, body: bytes = b"{}") -> ProgramRecord:
    """Return an accepted program."""
    return ProgramRecord(
        id=id_,
        tenant="bench",
        idempotency_key=None,
        body_hash=b"0" * 32,
        body=body,
        created_at=time.time(),
    )


def event(journal: Journal, id_: str, type_: str, data: bytes = b"{}") -> EventRecord:
    """Return an event that happens now."""
    return EventRecord(program=id_, seq=journal.next_seq(), type=type_, data=data, at=time.time())


def value(id_: str, variable: str) -> ValueRecord:
    """Return a value of 300 bytes that a model wrote."""
    return ValueRecord(
        program=id_,
        variable=variable,
        value=VALUE,
        text=None,
        token_ids=list(range(64)),
        tokenizer_hash="bench",
        epoch=1,
        attempt=1,
    )


def fsync_ms(folder: Path, *, num: int = 100) -> list[float]:
    """Return durations of appending 4 KB to a file and syncing it, in milliseconds."""
    durations = []
    descriptor = os.open(folder / "fsync", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for _ in range(num):
        os.write(descriptor, b"0" * 4096)
        start = time.perf_counter()
        os.fdatasync(descriptor)
        durations.append((time.perf_counter() - start) * 1e3)
    os.close(descriptor)
    return durations


def quantiles(durations: list[float]) -> str:
    """Return the median and 99th percentile as text."""
    ordered = sorted(durations)
    p99 = ordered[int(len(ordered) * 0.99)]
    return f"p50 {statistics.median(ordered):6.2f} ms  p99 {p99:6.2f} ms"


async def accepts(journal: Journal, *, seconds: float) -> list[float]:
    """Submit programs one at a time; return the durations in milliseconds."""
    durations: list[float] = []
    stop = time.perf_counter() + seconds
    while (start := time.perf_counter()) < stop:
        id_ = f"accept-{len(durations)}"
        records: list[Record] = [program(id_, VALUE * 8), event(journal, id_, "program.accepted")]
        await journal.append(records, fail_fast=True)
        durations.append((time.perf_counter() - start) * 1e3)
    return durations


async def produce(journal: Journal, id_: str, *, stop: float) -> list[float]:
    """Commit values of one program one at a time; return the durations in milliseconds."""
    await journal.append([program(id_)])
    durations: list[float] = []
    while (start := time.perf_counter()) < stop:
        committed = event(journal, id_, "variable.committed", VALUE)
        await journal.append([value(id_, f"v{len(durations)}"), committed])
        durations.append((time.perf_counter() - start) * 1e3)
    return durations


async def throughput(journal: Journal, num_producers: int, *, seconds: float) -> None:
    """Run `num_producers` programs concurrently and print the journal's throughput."""
    before, start = journal.status(), time.perf_counter()
    lists = await asyncio.gather(
        *(
            produce(journal, f"{num_producers}-{i}", stop=start + seconds)
            for i in range(num_producers)
        )
    )
    took, after = time.perf_counter() - start, journal.status()
    durations = [duration for one in lists for duration in one]
    records = after.num_records - before.num_records
    commits = after.num_commits - before.num_commits
    print(
        f"{num_producers:4d} producers  {records / took:8.0f} records/s  "
        f"{len(durations) / took:8.0f} values/s  {len(durations) / commits:6.1f} per commit  "
        f"{quantiles(durations)}"
    )


async def start_up(folder: Path, *, num_programs: int = 10_000, num_nodes: int = 10) -> None:
    """Measure reading a journal with many unfinished programs."""
    journal = Journal.open(folder)
    for i in range(num_programs):
        id_ = f"p{i}"
        records: list[Record] = [program(id_, VALUE * 8)]
        for node in range(num_nodes):
            records += [event(journal, id_, t) for t in ("node.queued", "node.started")]
            if node % 2:
                records += [value(id_, f"v{node}"), event(journal, id_, "variable.committed")]
        journal.append(records)
    await journal.close()
    size_bytes = os.stat(folder / "journal.sqlite3").st_size
    start = time.perf_counter()
    journal = Journal.open(folder)
    opened = time.perf_counter()
    programs = await journal.unfinished()
    read = time.perf_counter()
    await journal.close()
    print(
        f"start with {len(programs)} unfinished programs of {num_nodes} nodes "
        f"({size_bytes / 1e6:.0f} MB): open {opened - start:.3f} s, read {read - opened:.3f} s"
    )


async def run(folder: Path, *, seconds: float) -> None:
    """Measure the disk, the journal on it, and the disk again."""
    disk = fsync_ms(folder)
    print(f"fsync of 4 KB, before     {quantiles(disk)}")
    journal = Journal.open(folder / "journal")
    durations = await accepts(journal, seconds=seconds)
    ratio = statistics.median(durations) / statistics.median(disk)
    print(f"accept                    {quantiles(durations)}  ({ratio:.2f} fsyncs)")
    for num_producers in PRODUCERS:
        await throughput(journal, num_producers, seconds=seconds)
    await journal.close()
    print(f"fsync of 4 KB, after      {quantiles(fsync_ms(folder))}")
    await start_up(folder / "start")


def main() -> None:
    """Run all measurements and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="per measurement (2)")
    parser.add_argument("--folder", type=Path, help="on the disk to measure (a temporary one)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        asyncio.run(run(Path(folder), seconds=arguments.seconds))


if __name__ == "__main__":
    main()
