"""`retrieve`: full-text search in a folder of texts that the operator names (SQLite FTS5, BM25).

Responsibility: the index of one folder, in memory, updated when its files change.
Out of scope: embeddings, and formats other than UTF-8 text.

Invariants: only files inside the folder are read; links that lead out of it are not followed. A
query is a set of words, never FTS5 syntax.
"""

from __future__ import annotations

import logging
import os
import re
import sqlite3
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..program.decoding.unicode_text import is_unicode
from ..program.errors import RunError
from .registry import function

logger = logging.getLogger(__name__)

SUFFIXES = frozenset({".txt", ".md", ".rst"})
MAX_FILES = 10_000
MAX_FILE_BYTES = 8 * 1024 * 1024
MAX_PASSAGE = 1_200
"""Characters of one passage: paragraphs are joined up to this length, longer ones are split."""
MAX_RESULTS = 100
MAX_WORDS = 64
RESCAN_S = 2.0
"""Maximum age of the list of files that a query uses."""
SEARCH_S = 5.0

_WORD = re.compile(r"\w+")
_PARAGRAPHS = re.compile(r"\n[ \t]*\n")


class FileStamp(NamedTuple):
    """The state of a file when it was indexed."""

    modified_ns: int
    size: int


_UNKNOWN: Final = FileStamp(-1, -1)


class IndexedFile(NamedTuple):
    """A file and the rows of its passages."""

    stamp: FileStamp
    rows: range


class FolderIndex:
    """The passages of the texts in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        self._database.execute(
            "CREATE VIRTUAL TABLE passages USING fts5("
            "text, source UNINDEXED, position UNINDEXED, tokenize='porter unicode61')"
        )
        self._lock = threading.Lock()
        self._indexed: dict[str, IndexedFile] = {}
        self._next_row = 1
        self._scanned_at = float("-inf")
        self._skipped: set[str] = set()

    def close(self) -> None:
        """Free the index."""
        with self._lock:
            self._database.close()

    def search(self, query: str, k: int) -> list[dict[str, Any]]:
        """Return the `k` passages that fit a query best, with source, position and score.

        Raises:
            RunError: `retrieve.timeout`.
        """
        # The index folds case by itself. `casefold` would turn ß into ss, which the index does not.
        words = list({word.lower(): word for word in _WORD.findall(query)}.values())[:MAX_WORDS]
        if not words:
            return []
        expression = " OR ".join(f'"{word}"' for word in words)
        with self._lock:
            self._rescan()
            deadline = time.monotonic() + SEARCH_S
            self._database.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
            try:
                rows = self._database.execute(
                    "SELECT text, source, position, bm25(passages) FROM passages "
                    "WHERE passages MATCH ? ORDER BY bm25(passages), rowid LIMIT ?",
                    (expression, k),
                ).fetchall()
            except sqlite3.OperationalError as error:
                raise RunError("retrieve.timeout", f"the search was stopped: {error}") from None
            finally:
                self._database.set_progress_handler(None, 0)
        return [
            {"text": text, "source": source, "position": position, "score": round(-score, 6)}
            for text, source, position, score in rows
        ]

    def _rescan(self) -> None:
        """Index new and changed files, and remove deleted ones, if the last scan is too old."""
        now = time.monotonic()
        if now - self._scanned_at < RESCAN_S:
            return
        self._scanned_at = now
        found: set[str] = set()
        for path, stamp in self._texts():
            name = path.relative_to(self._folder).as_posix()
            found.add(name)
            known = self._indexed.get(name)
            if known is None or known.stamp != stamp:
                self._remove(name)
                self._add(path, name, stamp)
        for name in self._indexed.keys() - found:
            self._remove(name)

    def _texts(self) -> Iterator[tuple[Path, FileStamp]]:
        """Yield the files that are searched, without those removed since they were listed."""
        num_files = 0
        for path in self._paths():
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            except OSError as error:
                self._skip(path, str(error))
                continue
            if not stat.S_ISREG(status.st_mode):
                continue
            if not path.resolve().is_relative_to(self._folder):
                self._skip(path, "it leads out of the folder")
            elif status.st_size > MAX_FILE_BYTES:
                self._skip(path, f"it has more than {MAX_FILE_BYTES:,} bytes")
            elif num_files >= MAX_FILES:
                self._skip(path, f"the folder has more than {MAX_FILES:,} texts")
            else:
                num_files += 1
                yield path, FileStamp(status.st_mtime_ns, status.st_size)

    def _paths(self) -> list[Path]:
        """Return the paths in the folder that have the suffix of a text, in order."""

        def skip(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):
                self._skip(Path(error.filename), str(error))

        paths: list[Path] = []
        for folder, _, names in os.walk(self._folder, onerror=skip):
            for name in names:
                path = Path(folder, name)
                if path.suffix.lower() not in SUFFIXES:
                    continue
                if is_unicode(path.relative_to(self._folder).as_posix()):
                    paths.append(path)
                else:
                    self._skip(path, "its name is not UTF-8")
        return sorted(paths)

    def _skip(self, path: Path, reason: str) -> None:
        if str(path) not in self._skipped:
            self._skipped.add(str(path))
            # `repr`, because a name that is not UTF-8 cannot be written to a log.
            logger.warning("%r is not searched: %s", str(path), reason)

    def _add(self, path: Path, name: str, stamp: FileStamp) -> None:
        """Index the passages of a file; one that cannot be read has none."""
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            self._skip(path, str(error))
            text = ""
        passages = list(split_passages(text))
        rows = range(self._next_row, self._next_row + len(passages))
        self._next_row = rows.stop
        # Known before they are inserted, so that they can be removed if that fails midway.
        self._indexed[name] = IndexedFile(_UNKNOWN, rows)
        self._database.executemany(
            "INSERT INTO passages (rowid, text, source, position) VALUES (?, ?, ?, ?)",
            (
                (row, passage, name, position)
                for position, (row, passage) in enumerate(zip(rows, passages, strict=True))
            ),
        )
        self._indexed[name] = IndexedFile(stamp, rows)

    def _remove(self, name: str) -> None:
        """Remove the passages of a file. A search by `source` would read the whole index."""
        known = self._indexed.pop(name, None)
        if known is not None:
            self._database.executemany(
                "DELETE FROM passages WHERE rowid = ?", ((row,) for row in known.rows)
            )


def split_passages(text: str) -> Iterator[str]:
    """Split a text into passages of at most `MAX_PASSAGE` characters, between paragraphs."""
    passage = ""
    for paragraph in _PARAGRAPHS.split(text):
        trimmed = paragraph.strip()
        while len(trimmed) > MAX_PASSAGE:
            if passage:
                yield passage
                passage = ""
            # After the last blank; without one, in the middle of a word.
            cut = trimmed.rfind(" ", 1, MAX_PASSAGE) + 1 or MAX_PASSAGE
            yield trimmed[:cut].rstrip()
            trimmed = trimmed[cut:]
        if passage and len(passage) + len(trimmed) + 2 > MAX_PASSAGE:
            yield passage
            passage = ""
        passage = "\n\n".join(part for part in (passage, trimmed) if part)
    if passage:
        yield passage


def make_retrieve(index: FolderIndex) -> Any:
    """Return the function `retrieve` over an index."""

    @function(timeout_s=30)
    def retrieve(query: str, k: int = 5) -> list[Any]:
        """Return the `k` passages that fit a query best: text, source, position, score."""
        if not 1 <= k <= MAX_RESULTS:
            raise RunError("retrieve.k", f"`k` must be from 1 to {MAX_RESULTS}, got {k}")
        return index.search(query, k)

    return retrieve
