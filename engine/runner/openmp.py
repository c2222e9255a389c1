"""How long the threads of torch's OpenMP library spin while they wait for each other.

Each operation ends when all of its threads have finished. GNU's library lets a thread that waits
spin for some 10 ms before it sleeps. If another process has taken the core of the last thread, the
spinning threads keep the cores that this thread could run on. With a busy process per core, a
decode step took 70 times as long as on an idle machine.

Loads no torch: the library reads its environment once, when torch loads it.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Final

NUM_SPINS: Final = 1_000
"""Iterations before a thread sleeps: some 20 us, longer than most gaps between two operations."""


def limit_spinning(environment: MutableMapping[str, str] = os.environ) -> None:
    """Limit the spinning of OpenMP threads in this process, unless the environment configures it.

    Has no effect after torch was loaded.

    Args:
        environment: The environment of the process.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", str(NUM_SPINS))
