"""How an engine's process is started: its command line, from the settings of the server."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from ..config import Config


@dataclass(frozen=True, slots=True)
class Command:
    """How to start an engine's process: the arguments of `python -m conure.engine`."""

    kind: str
    options: tuple[str, ...] = ()

    def argv(self, descriptor: int, epoch: int) -> list[str]:
        """The whole command line for one life of the engine."""
        return [
            sys.executable,
            "-m",
            "conure.engine",
            "--fd",
            str(descriptor),
            "--epoch",
            str(epoch),
            self.kind,
            *self.options,
        ]


def command_of(config: Config) -> Command:
    """The engine's command line for these settings; what is None is left to the engine."""
    settings: dict[str, object] = {
        "context-len": config.context_len,
        "num-blocks": config.num_blocks,
        "block-size": config.block_size,
        "step-tokens": config.step_tokens,
        "max-sequences": config.max_sequences,
    }
    if config.engine == "fake":
        settings |= {
            "script": config.script,
            "time-per-call": config.time_per_call,
            "time-per-prompt-token": config.time_per_prompt_token,
            "time-per-output-token": config.time_per_output_token,
        }
    else:
        settings |= {
            "model": config.model,
            "dummy-weights": config.dummy_weights,
            "dtype": config.dtype,
            "device": config.device,
            "threads": config.threads,
        }
    options = [
        text
        for name, value in settings.items()
        if value is not None
        for text in (f"--{name}", str(value))
    ]
    if config.batch_invariant:
        options.append("--batch-invariant")
    return Command(config.engine, tuple(options))
