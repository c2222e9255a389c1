"""The notices that this user has seen, in `notices` of the cache folder, one per line."""

from __future__ import annotations

import os
from collections.abc import Mapping

from conure.cache_folder import cache_folder


def is_first_time(notice: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a notice was not shown before, and remember it.

    A notice that cannot be remembered counts as new.
    """
    try:
        file = cache_folder(environ) / "notices"
    except FileNotFoundError:
        return True
    try:
        if notice in file.read_text("utf-8").splitlines():
            return False
    except (OSError, UnicodeDecodeError):
        pass  # the file does not exist yet, or cannot be read
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as lines:
            lines.write(notice + "\n")
    except OSError:
        pass  # it is shown again next time
    return True
