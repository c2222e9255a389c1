"""Mutated requests to all routes: no internal error, and every accepted program ends.

`CONURE_FUZZ_BODIES` sets the number of bodies, `CONURE_FUZZ_SEED` the first random seed; `make
fuzz` sends many. Each part has a server and a seed of its own, so that parts can run in parallel
and a failure is repeated by one part.
"""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import pytest

from conure.server.app import create_app
from conure.server.config import Config

from ..service_double import in_process
from .fuzzer import Fuzzer
from .loop_lag import loop_lag

NUM_BODIES = int(os.environ.get("CONURE_FUZZ_BODIES", "400"))
SEED = int(os.environ.get("CONURE_FUZZ_SEED", "400"))
TIMEOUT_S = 120.0
MAX_LAG_S = 10.0
"""Far more than any turn takes."""
ACCEPTED = ("POST programs 202", "POST chat 200", "POST responses 200")
"""Responses that show that bodies are not all refused."""
PART_BODIES = 2_000
NUM_PARTS = -(-NUM_BODIES // PART_BODIES)


@pytest.mark.parametrize("seed", range(SEED, SEED + NUM_PARTS))
async def test_no_body_causes_an_internal_error(tmp_path: Path, seed: int) -> None:
    app = create_app(Config(data=tmp_path, engine="fake"))
    async with in_process(app) as client, loop_lag() as lag:
        client.timeout = httpx.Timeout(TIMEOUT_S)
        fuzzer = Fuzzer(client, seed)
        await fuzzer.run(min(PART_BODIES, NUM_BODIES))
    for name, count in sorted(fuzzer.statuses.items()):
        print(f"{count:7} {name}")
    print(f"{fuzzer.num_bodies} bodies, longest lag {lag.worst_s:.2f} s")
    assert lag.worst_s < MAX_LAG_S
    for name in ACCEPTED:
        assert fuzzer.statuses[name] > 0, f"no mutated body gave {name}"
