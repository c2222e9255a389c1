"""Retention: ended programs are deleted by age and by size, and on request."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from conure.server.program.errors import NotFoundError
from conure.server.runtime.persistence.journal_retention import delete_expired
from conure.server.store.journal import RetentionLimits
from conure.server.store.retention import used_bytes

from ...inprocess import ServerHarness, client, expr, server_harness

DAY_S = 86_400.0


def all_content(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.iterdir() if path.is_file())


async def expire(harness: ServerHarness, limits: RetentionLimits) -> int:
    executor = harness.executor
    return await delete_expired(executor.services.journal, executor.programs, limits)


async def test_old_programs_are_deleted_and_open_ones_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server_harness(tmp_path) as harness:
        ended = await harness.submit([expr("x", 1)], outputs=["x"])
        await ended.end()
        session = await harness.submit([client("a", "y")], outputs=["y"])
        limits = RetentionLimits(max_age_s=DAY_S, max_bytes=None)
        assert await expire(harness, limits) == 0
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 2 * DAY_S)
        assert await expire(harness, limits) == 1
        with pytest.raises(NotFoundError):
            await ended.status()
        assert (await session.status()).status == "running"
        report = await harness.executor.usage(tenant=harness.tenant, since=None, until=None)
        assert report.programs == {"done": 1}


async def test_oldest_programs_are_deleted_above_the_size(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        programs = []
        for number in range(250):
            text = f"{number} ".ljust(20_000, "x")
            program = await harness.submit([expr("x", text)], outputs=["x"])
            programs.append(program)
        for program in programs:
            await program.end()
        limits = RetentionLimits(max_age_s=None, max_bytes=4_000_000)
        num_deleted = await expire(harness, limits)
        assert 100 <= num_deleted < 250
        assert await expire(harness, limits) == 0
        # No more programs are deleted than the limit requires.
        used = await harness.executor.services.journal._reader.read(used_bytes)
        assert used > 3_000_000
        with pytest.raises(NotFoundError):
            await programs[0].status()
        assert (await programs[-1].status()).status == "done"


@pytest.mark.parametrize("is_open", [False, True])
async def test_erased_program_leaves_nothing(tmp_path: Path, is_open: bool) -> None:
    secret = "a secret that must go " * 20
    async with server_harness(tmp_path) as harness:
        nodes = [expr("x", secret)] + ([client("a", "y")] if is_open else [])
        program = await harness.submit(nodes, outputs=["x"], key="k", open=is_open)
        await program.value("x")
        if not is_open:
            await program.end()
        other = await harness.submit([expr("x", 2)], outputs=["x"])
        await other.end()
        await harness.executor.erase(program.id, tenant=harness.tenant)
        with pytest.raises(NotFoundError):
            await program.status()
        with pytest.raises(NotFoundError):
            await harness.executor.erase(program.id, tenant=harness.tenant)
        again = await harness.submit([expr("x", 3)], outputs=["x"], key="k")
        assert again.id != program.id
        assert (await other.status()).status == "done"
    assert secret.encode() not in all_content(tmp_path)
