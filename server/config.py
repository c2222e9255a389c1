"""What one server process is told at its start: where it listens, what it runs, its bounds.

Built once, by the command line or by a test, and passed down; nothing reads the
environment or a file behind its back. Refuses to know how an engine takes its options.

Kept true: a Config that exists is within bounds.

    ConfigError              a setting is out of its bounds; the message names it
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Literal, TypeAlias

from .program.decode import MAX_BODY_BYTES
from .scheduling.policy import DEFAULT_POLICY, POLICIES

EngineKind: TypeAlias = Literal["local", "fake"]

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8400


class ConfigError(ValueError):
    """A setting is out of its bounds."""


def default_data(environ: Mapping[str, str] = os.environ) -> Path:
    """The data folder of a server that was given none: below XDG_STATE_HOME."""
    state = environ.get("XDG_STATE_HOME") or ""
    # The XDG specification: a relative path is to be ignored.
    root = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return root / "conure"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens on `host`."""
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings of one server process; None leaves a choice to the engine."""

    data: Path
    """Folder of the journal; one server at a time."""
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    """0 lets the system choose."""

    engine: EngineKind = "local"
    num_engines: int = 1
    model: str | None = None
    """Folder or name of a model. None: the built-in one."""
    dummy_weights: str | None = None
    """A config, file or folder, that the engine makes random weights for; instead of `model`."""
    dtype: str | None = None
    device: str | None = None
    context_len: int | None = None
    """Tokens of one context at most."""
    num_blocks: int | None = None
    block_size: int | None = None
    step_tokens: int | None = None
    max_sequences: int | None = None
    threads: int | None = None
    """Threads of the engine's tensor library."""
    batch_invariant: bool = False
    """Of a local engine: an output is the same whatever else is in its steps, in bfloat16 too."""

    script: Path | None = None
    """Answers of the fake engine; None: a published function of the prompt."""
    time_per_call: float = 0.0
    """Of the fake engine, in seconds; likewise the next two."""
    time_per_prompt_token: float = 0.0
    time_per_output_token: float = 0.0

    policy: str = DEFAULT_POLICY
    """How calls are ordered and placed, by name."""
    latency_tokens: int | None = None
    """Tokens that an engine may hold while somebody waits for one of its calls by itself, so
    that its steps stay short; None: as many as fit."""

    max_queued_calls: int = 100_000
    """Calls accepted and not ended, over all programs; beyond it submissions get 429."""
    max_body: int = MAX_BODY_BYTES
    """Bytes of a request's body at most; the decoder takes no more than the default."""
    drain_s: float = 30.0
    """How long a terminated server lets calls run before it parks them."""

    def __post_init__(self) -> None:
        self._check_host()
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"the port is {self.port}; it must be within 0 and 65535")
        if self.engine not in ("local", "fake"):
            raise ConfigError(f"there is no engine {self.engine!r}; choose local or fake")
        if self.policy not in POLICIES:
            known = ", ".join(POLICIES)
            raise ConfigError(f"there is no policy {self.policy!r}; choose one of {known}")
        for name, most in _COUNTS.items():
            count = getattr(self, name)
            if count is not None and not 1 <= count <= most:
                raise ConfigError(f"{name} is {count}; it must be within 1 and {most}")
        for name in _TIMES:
            seconds = getattr(self, name)
            if not 0 <= seconds <= 3600:
                raise ConfigError(f"{name} is {seconds}; it must be within 0 and 3600 seconds")
        if self.engine == "fake" and self.batch_invariant:
            raise ConfigError("batch_invariant is for a local engine; the fake one always is")
        if self.engine == "fake" and self.model is not None:
            raise ConfigError("the fake engine takes no model; give it a script instead")
        if self.dummy_weights is not None and (self.engine == "fake" or self.model is not None):
            raise ConfigError(
                "dummy_weights takes the place of a local engine's model; give it no other"
            )

    def _check_host(self) -> None:
        # Whoever reaches the port may run programs, and there are no keys yet.
        if not is_loopback(self.host):
            raise ConfigError(
                f"the host {self.host!r} is reachable from outside, and there are no keys to "
                "ask for; use 127.0.0.1, ::1 or localhost behind a proxy of your own"
            )


_COUNTS = {
    "num_engines": 64,
    "context_len": 16_777_216,
    "num_blocks": 16_777_216,
    "block_size": 1_024,
    "step_tokens": 1_048_576,
    "max_sequences": 65_536,
    "threads": 1_024,
    "latency_tokens": 1_000_000_000,
    "max_queued_calls": 10_000_000,
    "max_body": MAX_BODY_BYTES,
}
_TIMES = ("time_per_call", "time_per_prompt_token", "time_per_output_token", "drain_s")
