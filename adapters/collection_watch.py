"""Whether the garbage collector runs on the current thread.

The collector closes generators of the app and of its libraries, whose code then runs within any
statement of the thread. There, code must not wait for another thread, which may wait for this one.
"""

from __future__ import annotations

import gc
import threading
from typing import Self


class CollectionWatch:
    """Finds out, in a `with` block, whether the garbage collector runs on the current thread."""

    def __init__(self) -> None:
        self._thread: int | None = None

    def __enter__(self) -> Self:
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._note)
        self._thread = None  # a collection may have called this

    @property
    def is_here(self) -> bool:
        """Whether a collection runs on the current thread."""
        return self._thread == threading.get_ident()

    def _note(self, phase: str, _: object) -> None:
        self._thread = threading.get_ident() if phase == "start" else None
