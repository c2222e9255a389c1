"""Print what the package and some of its extras require, one requirement per line.

    python .ci/requirements.py server langchain

An environment that contains these runs the tests of a checkout, which need not be installed. So
several environments can be made at once: an installation writes into the checkout.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

FILE = Path(__file__).parents[1] / "pyproject.toml"
PROJECT = tomllib.loads(FILE.read_text("utf-8"))["project"]
OWN = re.compile(r"conure\[(.*)\]")
"""A requirement that stands for other extras of this package."""


def requirements(extras: Sequence[str]) -> Iterator[str]:
    """Yield the requirements of some extras."""
    for extra in extras:
        for requirement in PROJECT["optional-dependencies"][extra]:
            own = OWN.fullmatch(requirement)
            yield from [requirement] if own is None else requirements(own[1].split(","))


if __name__ == "__main__":
    wanted = [*PROJECT["dependencies"], *requirements(sys.argv[1:])]
    sys.stdout.writelines(f"{each}\n" for each in wanted)
