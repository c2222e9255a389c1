"""The command line of an engine process: `python -m conure.engine` and its arguments."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from conure.engine.config import EngineConfig


@dataclass(frozen=True, slots=True)
class EngineCommandLine:
    """Builds the command line of one engine process."""

    config: EngineConfig

    def argv(self, descriptor: int, heartbeat: int, epoch: int) -> list[str]:
        """Return the command and its arguments for one epoch of the engine.

        Args:
            descriptor: File descriptor of the inherited socket.
            heartbeat: File descriptor of the pipe for the engine's heartbeat.
            epoch: The engine's epoch.
        """
        return [
            *(sys.executable, "-m", "conure.engine"),
            *("--fd", str(descriptor), "--heartbeat", str(heartbeat), "--epoch", str(epoch)),
            *("--config", self.config.to_json()),
        ]
