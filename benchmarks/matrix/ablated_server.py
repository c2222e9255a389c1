"""`conure` without one part of its scheduling policy.

python benchmarks/matrix/ablated_server.py PART COMMAND [OPTION ...]
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from conure.cli.main import main as run_conure
from conure.server.scheduling import policy
from conure.server.scheduling.scheduler import Scheduler


def _ignore(scheduler: Scheduler, engine: str) -> None:
    """Do nothing when an engine has made a step."""


PARTS: Mapping[str, Sequence[tuple[Any, str, Any]]] = {
    "order": [(policy, "WORK_PENALTY", 0.0)],
    "holds": [(policy, "HOLD_MARGIN", math.inf)],
    "order-and-holds": [(policy, "WORK_PENALTY", 0.0), (policy, "HOLD_MARGIN", math.inf)],
    "starts-between-ends": [(Scheduler, "engine_advanced", _ignore)],
}
"""What to replace, and by what, to switch a part off."""


def main(arguments: Sequence[str]) -> int:
    """Run `conure` without a part."""
    part, *rest = arguments
    for owner, name, value in PARTS[part]:
        assert hasattr(owner, name), name
        setattr(owner, name, value)
    return run_conure(rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
