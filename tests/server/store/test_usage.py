"""Usage sums: every figure of a tenant's receipts, summed once by tenant and day."""

from __future__ import annotations

import random
import sqlite3
from collections import Counter
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conure.server.store.journal import EndRecord, Journal, JournalError

from .journal_records import FILE, program

DAY_S = 86_400
FIRST_S = 1_767_225_600.0
"""The first second of 2026, UTC."""


def end(id_: str, receipt: Any, *, status: str = "done", at: float = FIRST_S) -> EndRecord:
    raw = receipt if isinstance(receipt, bytes) else msgspec.json.encode(receipt)
    return EndRecord(
        program=id_, status=status, finished_at=at, receipt=raw, error=None, nodes=b"{}"
    )


async def sums(journal: Journal, tenant: str, **days: str) -> dict[tuple[str, str], float]:
    return {(r.status, r.name): r.amount for r in await journal.usage(tenant, **days)}


async def test_receipts_are_summed_by_tenant_day_status(
    tmp_path: Path,
) -> None:
    draw = random.Random(3)
    journal = Journal.open(tmp_path)
    totals: Counter[tuple[str, int, str, str]] = Counter()
    for number in range(200):
        tenant, day = draw.choice("ab"), draw.randrange(3)
        status = draw.choice(["done", "failed"])
        receipt: dict[str, Any] = {
            "calls": draw.randrange(9),
            "prompt_tokens": {"shared": {"static_text": draw.randrange(10**12)}},
            "critical_path": ["x", "7"],
            "kv_block_seconds": draw.randrange(64) / 8,
        }
        batch = [program(f"p{number}", tenant=tenant)]
        at = FIRST_S + day * DAY_S + draw.random() * (DAY_S - 1)
        journal.append([*batch, end(f"p{number}", receipt, status=status, at=at)])
        totals[tenant, day, status, "programs"] += 1
        totals[tenant, day, status, "calls"] += receipt["calls"]
        totals[tenant, day, status, "kv_block_seconds"] += receipt["kv_block_seconds"]
        static = receipt["prompt_tokens"]["shared"]["static_text"]
        totals[tenant, day, status, "prompt_tokens.shared.static_text"] += static
    await journal.append(())
    for tenant in "ab":
        for first, last in ((0, 2), (1, 1), (0, 1), (2, 0)):
            expected: Counter[tuple[str, str]] = Counter()
            for (owner, day, status, name), amount in totals.items():
                if owner == tenant and first <= day <= last:
                    expected[status, name] += amount
            days = {"since": f"2026-01-0{first + 1}", "until": f"2026-01-0{last + 1}"}
            assert await sums(journal, tenant, **days) == expected
    total = await sums(journal, "a")
    assert total == await sums(journal, "a", since="2026-01-01")
    assert isinstance(total["done", "calls"], int), "counts stay exact"
    assert await sums(journal, "c") == {}
    await journal.close()


async def test_program_ending_twice_counts_once(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    await journal.append([program("p"), end("p", {"calls": 2})])
    with pytest.raises(JournalError):
        await journal.append([end("p", {"calls": 3})])
    assert await sums(journal, "a") == {("done", "programs"): 1, ("done", "calls"): 2}
    await journal.close()


async def test_invalid_receipt_counts_as_a_program(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    await journal.append([program("p"), end("p", b"\xff{")])
    await journal.append([program("q"), end("q", b"")])
    assert await sums(journal, "a") == {("done", "programs"): 2}
    await journal.close()


async def test_migration_sums_earlier_receipts(tmp_path: Path) -> None:
    first = files("conure.server.store.migrations").joinpath("0001_programs.sql").read_text("utf-8")
    with sqlite3.connect(tmp_path / FILE) as connection:
        connection.executescript(first)
        for number in range(3):
            connection.execute(
                "INSERT INTO program VALUES (?, ?, 'a', NULL, x'00', 1.5, x'7b7d')",
                (number, f"p{number}"),
            )
        for number in range(2):
            connection.execute(
                "INSERT INTO ending VALUES (?, 'done', ?, ?, NULL, x'7b7d')",
                (number, FIRST_S, b'{"calls": 4, "prompt_tokens": {"logical": 5}}'),
            )
        connection.execute("PRAGMA user_version = 1")
    connection.close()
    journal = Journal.open(tmp_path)
    await journal.append([end("p2", {"calls": 1})])
    assert await sums(journal, "a") == {
        ("done", "programs"): 3,
        ("done", "calls"): 9,
        ("done", "prompt_tokens.logical"): 10,
    }
    await journal.close()
