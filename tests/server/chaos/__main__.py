"""Long chaos: `python -m tests.server.chaos [--kills 1000] [--seed 0]`.

Random programs run on a server that is killed, whose engines are killed and stopped, and that kills
itself at aimed points. Ends with an error at the first broken guarantee.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from .driver import Chaos, Server
from .test_crash import write_script

ROUND = 50
"""Kills per server folder and port."""


async def play(num_kills: int, seed: int, folder: Path) -> None:
    """Kill a server `num_kills` times, and print the report."""

    def arguments(life: int) -> list[str]:
        script = write_script(folder, life)
        fake = ["--engine", "fake", "--script", str(script), "--time-per-output-token", "0.004"]
        return [*fake, "--engines", "2", "--log-level", "info"]

    async with Server(folder, arguments=arguments) as server:
        report = await Chaos(server, seed=seed, has_aimed_kills=True).run(num_kills=num_kills)
    sys.stdout.write(f"{report}\n")
    sys.stdout.flush()


def main() -> None:
    """Run rounds until the requested number of kills is reached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for first in range(0, options.kills, ROUND):
        with tempfile.TemporaryDirectory() as folder:
            num_kills = min(ROUND, options.kills - first)
            asyncio.run(play(num_kills, options.seed * 1_000 + first, Path(folder)))
        sys.stdout.write(f"{first + num_kills} kills\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
