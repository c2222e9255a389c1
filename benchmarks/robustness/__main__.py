"""Run the simulations of the sensitivity table into a folder of results.

    python -m robustness FOLDER [--seconds S]        (in the folder `benchmarks`)

Several processes can share a folder. A process ends after `--seconds`; another one continues.
`paper.py --results FOLDER` reads the folder.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from .results import Results, run_all


def main() -> int:
    """Run a part of the simulations; return 1 if some are left."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    arguments = parser.parse_args()
    until_s = time.monotonic() + arguments.seconds
    left = run_all(Results(arguments.folder), lambda: time.monotonic() > until_s)
    print(f"{left} simulations are left")
    return int(left > 0)


if __name__ == "__main__":
    sys.exit(main())
