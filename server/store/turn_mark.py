"""The turn mark: which program the server was working on when it died.

A file of one line, mapped into memory. The server writes the id of a program before it works on
the program and clears it afterwards; each takes a few hundred nanoseconds. The kernel keeps the
page when the process is killed, so the next start finds the program whose turn did not end.

Out of scope: what follows from it (`runtime.program_watch`).
"""

from __future__ import annotations

import logging
import mmap
import os
from pathlib import Path

logger = logging.getLogger(__name__)

TURN_MARK_NAME = "turn"
SIZE = 64
_EMPTY = b"\0" * SIZE


class TurnMark:
    """The turn mark of a data folder."""

    def __init__(self, folder: Path) -> None:
        """Open the mark and clear it. Without a file, it is kept in memory only."""
        self.previous: str | None = None
        """The program that was marked when the file was opened."""
        self._map = mmap.mmap(-1, SIZE)
        try:
            file = os.open(folder / TURN_MARK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                # Without reserved disk space, a write to the mapped page could raise SIGBUS.
                os.posix_fallocate(file, 0, SIZE)
                self._map = mmap.mmap(file, SIZE)
            finally:
                os.close(file)
        except OSError as problem:
            logger.warning(
                "the file %s cannot be used (%s): a program that crashes the server again and "
                "again is not found",
                folder / TURN_MARK_NAME,
                problem,
            )
            return
        content = bytes(self._map).rstrip(b"\0")
        self.previous = content.decode("ascii", "replace") or None
        self.clear()

    def set(self, program: str) -> None:
        """Mark a program. No other program is marked."""
        content = program.encode("ascii", "replace")[:SIZE]
        self._map[: len(content)] = content

    def clear(self) -> None:
        """Remove the mark."""
        self._map[:] = _EMPTY

    def close(self) -> None:
        """Unmap the file; the mark is no longer used."""
        self._map.close()
