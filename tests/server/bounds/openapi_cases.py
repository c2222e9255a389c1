"""Requests that schemathesis generates from the API description, with all of its checks.

    python -m tests.server.bounds.openapi_cases --schemathesis PATH [--examples N] [--seed N]

A fake engine answers, and the built-in model computes embeddings. Operations whose bodies contain
themselves (programs within programs) are tested without the coverage phase, which enumerates their
bodies and does not end. Status 400 counts as an answer to a valid body: a schema cannot say that
the names in a program must exist.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from ...served import served

CONFIG = """\
[checks.positive_data_acceptance]
expected-statuses = ["2xx", 400, 401, 403, 404, 409, 422]
"""
EMBEDDINGS = "V1EmbeddingsCreateEmbeddings"
NUM_CASES = re.compile(r"(\d+) generated")


def _references(part: Any) -> Iterator[str]:
    """Yield the names of the components that a part of a description refers to."""
    if isinstance(part, dict):
        for key, value in part.items():
            if key == "$ref":
                yield value.rpartition("/")[2]
            else:
                yield from _references(value)
    elif isinstance(part, list):
        for value in part:
            yield from _references(value)


def recursive_operations(description: dict[str, Any]) -> list[str]:
    """Return the ids of the operations whose request bodies contain a component within itself."""
    components = description["components"]["schemas"]
    references = {name: set(_references(schema)) for name, schema in components.items()}

    def reachable(names: set[str]) -> set[str]:
        found: set[str] = set()
        pending = list(names)
        while pending:
            name = pending.pop()
            if name not in found:
                found.add(name)
                pending.extend(references[name])
        return found

    recursive = {name for name in references if name in reachable(references[name])}
    return [
        operation["operationId"]
        for operations in description["paths"].values()
        for operation in operations.values()
        if reachable(set(_references(operation.get("requestBody")))) & recursive
    ]


class Runs:
    """Runs of schemathesis, with the number of their cases."""

    def __init__(self, program: Path, options: Sequence[str], folder: Path) -> None:
        config = folder / "schemathesis.toml"
        config.write_text(CONFIG)
        self.num_cases = 0
        self.num_failed = 0
        self._command = [str(program), "--config-file", str(config), "run", "--checks", "all"]
        self._command += options

    def run(self, url: str, *selection: str) -> None:
        """Test the selected operations of a server, and print the report."""
        command = [*self._command, f"{url}/schema/openapi.json", *selection]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        sys.stdout.write(done.stdout)
        self.num_cases += sum(int(count) for count in NUM_CASES.findall(done.stdout))
        self.num_failed += done.returncode != 0


def main() -> None:
    """Test all operations, and end with an error if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemathesis", type=Path, required=True, help="path of the command")
    parser.add_argument("--examples", type=int, default=130, help="cases per operation and phase")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    common = ["--max-examples", str(options.examples), "--seed", str(options.seed)]
    common += ["--continue-on-failure", "--suppress-health-check", "all"]
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(options.schemathesis, common, Path(folder))
        with served("--engine", "fake") as url:
            description = httpx.get(f"{url}/schema/openapi.json", timeout=60).json()
            names = recursive_operations(description)
            runs.run(url, *[f"--exclude-operation-id={name}" for name in [*names, EMBEDDINGS]])
            phases = ("--phases", "examples,fuzzing,stateful")
            runs.run(url, *[f"--include-operation-id={name}" for name in names], *phases)
        with served("--embeddings") as url:
            runs.run(url, f"--include-operation-id={EMBEDDINGS}")
    sys.stdout.write(f"{runs.num_cases} cases, {runs.num_failed} of 3 runs with failures\n")
    sys.exit(runs.num_failed > 0)


if __name__ == "__main__":
    main()
