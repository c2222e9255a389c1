"""kill -9 of a whole server under load: guarantees hold after the restart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .driver import Chaos, Server


def write_script(folder: Path, life: int) -> Path:
    """Write the model's outputs for one server process; most differ between processes.

    A repeated call, or a call that read a lost value, is then detected.
    """
    script = folder / f"script-{life}.json"
    script.write_text(json.dumps([{"match": "^(Say|List)|brief", "text": f"{life} lives"}]))
    return script


@pytest.mark.timeout(600)
async def test_twenty_crashes_lose_nothing(tmp_path: Path) -> None:
    def arguments(life: int) -> list[str]:
        script = write_script(tmp_path, life)
        fake = ["--engine", "fake", "--script", str(script), "--time-per-output-token", "0.004"]
        return [*fake, "--log-level", "info"]  # info: the messages of engines that exit

    async with Server(tmp_path, arguments=arguments) as server:
        report = await Chaos(server, seed=1).run(num_kills=20)
    print(report)
    # Otherwise it would have tested nothing.
    assert report.num_kills == 20
    assert report.num_kills_under_load >= 10
    assert report.num_survivors >= 10
    assert report.num_calls_run_again >= 5
    assert report.num_client_steps >= 10
