"""Short constructors of journal records, and a simulated machine crash."""

from __future__ import annotations

import shutil
from pathlib import Path

from conure.server.store.journal import EndRecord, EventRecord, Journal, ProgramRecord, ValueRecord

FILE = "journal.sqlite3"


def program(
    id_: str, *, tenant: str = "a", key: str | None = None, body: bytes = b"{}"
) -> ProgramRecord:
    return ProgramRecord(
        id=id_, tenant=tenant, idempotency_key=key, body_hash=b"h" + body, body=body, created_at=1.5
    )


def value(id_: str, variable: str, content: bytes, *, attempt: int = 1) -> ValueRecord:
    return ValueRecord(
        program=id_,
        variable=variable,
        value=content,
        text="text \x00 \u00e9 \U0001f600",
        token_ids=[0, 1, 127, 70_000, 2**31 - 1],
        tokenizer_hash="hash",
        epoch=7,
        attempt=attempt,
    )


def event(journal: Journal, id_: str, type_: str = "node.started") -> EventRecord:
    return EventRecord(program=id_, seq=journal.next_seq(), type=type_, data=b'{"node": 1}', at=2.5)


def end(id_: str, status: str = "done") -> EndRecord:
    return EndRecord(
        program=id_, status=status, finished_at=3.5, receipt=b"{}", error=None, nodes=b'{"n": {}}'
    )


def crash_image(folder: Path, target: Path) -> Path:
    """Copy the files as a machine crash would leave them now, without the lock."""
    target.mkdir()
    # The commit log first: it may lack commits, but has none too many.
    for name in ("commits.log", FILE, FILE + "-wal"):
        shutil.copy(folder / name, target / name)
    return target


async def crash_image_without_log(journal: Journal, tmp_path: Path) -> Path:
    """Close a journal; return a copy of its files in which the write-ahead log is lost."""
    image = crash_image(tmp_path / "data", tmp_path / "image")
    await journal.close()
    (image / f"{FILE}-wal").unlink()
    return image
