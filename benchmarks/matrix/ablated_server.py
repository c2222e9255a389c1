"""`conure` without one part of its scheduling policy.

python benchmarks/matrix/ablated_server.py PART COMMAND [OPTION ...]
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence

from conure.cli.main import main as run_conure
from conure.server.scheduling import policy

PARTS: Mapping[str, Mapping[str, float]] = {
    "order": {"WORK_PENALTY": 0.0},
    "holds": {"HOLD_MARGIN": math.inf},
    "order-and-holds": {"WORK_PENALTY": 0.0, "HOLD_MARGIN": math.inf},
}
"""Constants of the policy, and the values that switch a part off."""


def main(arguments: Sequence[str]) -> int:
    """Run `conure` without a part."""
    part, *rest = arguments
    for name, value in PARTS[part].items():
        assert hasattr(policy, name), name
        setattr(policy, name, value)
    return run_conure(rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
