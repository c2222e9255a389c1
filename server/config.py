"""Configuration of one server process: address, engines, scheduling and limits.

The command line or a test builds a `Config` once and passes it down. No module reads settings
from the environment. The fields are the single source of the command line's flags and help.

Invariants: every field of a `Config` is within bounds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

from conure.engine.config import ConfigError, EngineConfig, Option, check_bounds

from .program.decoding.bodies import MAX_BODY_BYTES
from .scheduling.policy import DEFAULT_POLICY, POLICIES

__all__ = [
    "DEFAULT_HOST",
    "DEFAULT_PORT",
    "Config",
    "ConfigError",
    "default_data_folder",
    "is_loopback",
]

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8400


def default_data_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the default journal directory, below XDG_STATE_HOME."""
    state = environ.get("XDG_STATE_HOME") or ""
    # The XDG specification requires relative paths to be ignored.
    root = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return root / "conure"


def is_loopback(host: str) -> bool:
    """Return whether a server at `host` is reachable from this machine only."""
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


class Config(EngineConfig, frozen=True, kw_only=True):
    """Settings of one server process, and the options of its engines.

    Raises:
        ConfigError: if a setting is out of bounds, or two settings contradict each other.
    """

    data: Annotated[
        Path,
        Option(
            help="journal directory, used by one server at a time "
            "(default: conure in XDG_STATE_HOME, or in ~/.local/state)",
            group="options",
            metavar="DIR",
        ),
    ]
    recover: Annotated[
        bool,
        Option(
            help="continue with what is left of a damaged journal; the damaged files are kept",
            group="options",
        ),
    ] = False
    host: Annotated[str, Option(help="loopback address to listen on", group="options")] = (
        DEFAULT_HOST
    )
    port: Annotated[
        int, Option(help="port; 0 chooses a free one", group="options", bounds=(0, 65_535))
    ] = DEFAULT_PORT
    drain_s: Annotated[
        float,
        Option(
            help="seconds that running calls may take to finish after SIGTERM or Ctrl-C",
            group="options",
            metavar="S",
            bounds=(0, 3600),
        ),
    ] = 30.0
    """Calls that are still running afterwards run again at the next start."""

    keep_days: Annotated[
        float,
        Option(
            help="days after which an ended program is deleted from the journal; 0: never",
            group="retention",
            metavar="DAYS",
            bounds=(0, 36_500),
        ),
    ] = 30.0
    keep_gb: Annotated[
        float,
        Option(
            help="gigabytes of the journal above which the oldest ended programs are deleted; "
            "0: no limit",
            group="retention",
            metavar="GB",
            bounds=(0, 1_000_000),
        ),
    ] = 10.0
    idle_s: Annotated[
        float,
        Option(
            help="seconds without a request after which a program is ended that waits for its "
            "client, such as an open session; 0: never",
            group="retention",
            metavar="S",
            bounds=(0, 31_536_000),
        ),
    ] = 86_400.0

    session_idle_s: Annotated[
        float,
        Option(
            help="seconds after which an unused session of the Parrot API ends",
            group="options",
            metavar="S",
            bounds=(1, 7 * 86_400),
        ),
    ] = 3_600.0

    policy: Annotated[
        str,
        Option(
            help="how waiting calls are ordered and assigned to engines",
            group="scheduling",
            choices=tuple(POLICIES),
        ),
    ] = DEFAULT_POLICY
    latency_tokens: Annotated[
        int | None,
        Option(
            help="maximum tokens held by an engine while it runs a latency-critical call, "
            "to keep its steps short (default: no limit)",
            group="scheduling",
            metavar="TOKENS",
            bounds=(1, 1_000_000_000),
        ),
    ] = None

    retrieve: Annotated[
        Path | None,
        Option(
            help="folder of texts (.txt, .md, .rst) that the function `retrieve` searches",
            group="functions",
            metavar="DIR",
        ),
    ] = None
    allow: Annotated[
        str | None,
        Option(
            help="capabilities of functions that programs may use, separated by commas: `python`, "
            "or names of entry points of installed packages",
            group="functions",
            metavar="NAMES",
        ),
    ] = None

    max_programs: Annotated[
        int,
        Option(
            help="programs that may be open at once; more are refused with 429",
            group="limits",
            metavar="N",
            bounds=(1, 10_000_000),
        ),
    ] = 10_000
    max_queued_calls: Annotated[
        int,
        Option(
            help="LLM calls of all programs that may be open at once; programs with more are "
            "refused with 429",
            group="limits",
            metavar="N",
            bounds=(1, 10_000_000),
        ),
    ] = 100_000
    pin_share: Annotated[
        float,
        Option(
            help="share of an engine's KV blocks that pinned prefixes of stored procedures may "
            "keep; 0: no pins",
            group="limits",
            metavar="X",
            bounds=(0, 1),
        ),
    ] = 0.1
    pin_hours: Annotated[
        float,
        Option(
            help="hours for which a prefix may be pinned",
            group="limits",
            metavar="H",
            bounds=(0, 8760),
        ),
    ] = 24.0
    max_wait_s: Annotated[
        float,
        Option(
            help="estimated seconds that a new program may wait for the work before it; a program "
            "that would wait longer is refused with 429. For a program that a reader waits for, "
            "the limit is half of the program's duration, at least 2 s; 0: no limit for any "
            "program",
            group="limits",
            metavar="S",
            bounds=(0, 86_400),
        ),
    ] = 600.0
    max_body: Annotated[int, Option(bounds=(1, MAX_BODY_BYTES))] = MAX_BODY_BYTES
    """Maximum bytes of a request body. The decoder accepts at most the default."""

    @property
    def capabilities(self) -> frozenset[str]:
        """The names in `allow`."""
        return frozenset(filter(None, (name.strip() for name in (self.allow or "").split(","))))

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.retrieve is not None and not self.retrieve.is_dir():
            raise ConfigError(f"retrieve is {str(self.retrieve)!r}, which is not a folder")
        # A server runs the programs of everyone who reaches its port: it has no API keys yet.
        if not is_loopback(self.host):
            raise ConfigError(
                f"host {self.host!r} is reachable from other machines, and the server has no "
                "authentication; listen on 127.0.0.1, ::1 or localhost, behind a proxy of your own"
            )
        if self.engine == "fake":
            for name in ("batch_invariant", "model", "dummy_weights"):
                if getattr(self, name) not in (None, False):
                    raise ConfigError(f"{name} is for a local engine; remove it or use that engine")
        if self.dummy_weights is not None and self.model is not None:
            raise ConfigError("dummy_weights replaces the model; give one of the two")
