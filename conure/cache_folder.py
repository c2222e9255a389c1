"""The folder for what Conure can make again: compiled kernels, the model `seeded`, seen notices."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return `$XDG_CACHE_HOME/conure`, or `~/.cache/conure`. The folder need not exist.

    A relative path in the variable is ignored, as the XDG Base Directory Specification requires.

    Raises:
        FileNotFoundError: if the user has no home folder and the variable is not set.
    """
    cache = environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(cache):
        return Path(cache) / "conure"
    home = environ.get("HOME") or os.path.expanduser("~")
    if not os.path.isabs(home):
        raise FileNotFoundError(errno.ENOENT, "no home folder is known; set XDG_CACHE_HOME", home)
    return Path(home) / ".cache" / "conure"
