"""`python`: Python code in a sandbox (pydantic-monty, the optional extra `python`).

The code runs in a worker process without files, network, environment or clock. Every limit of the
sandbox is set, and the pool kills a worker that exceeds its time.
"""

from __future__ import annotations

import threading
from typing import Any

from ..program.errors import RunError
from .registry import function

CAPABILITY = "python"
MAX_CODE = 65_536
"""Characters."""
MAX_SECONDS = 5.0
MAX_MEMORY = 64 * 1024 * 1024
MAX_RECURSION = 200
MAX_PRINTED = 65_536
"""Characters."""
MAX_MESSAGE = 2_000
"""Characters."""
NUM_WORKERS = 2
TIMEOUT_S = 20.0
"""Time limit of a call, including the wait for a worker that is free."""


class PythonSandbox:
    """A pool of sandboxed interpreters, started by the first call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: Any = None

    def close(self) -> None:
        """Stop the workers."""
        with self._lock:
            if self._pool is not None:
                self._pool.__exit__(None, None, None)
                self._pool = None

    def run(self, code: str, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the value of the last expression and what was printed.

        Raises:
            RunError: `python.failed`, `python.too_large`, `python.crashed`.
        """
        import pydantic_monty as monty

        if len(code) > MAX_CODE:
            raise RunError(
                "python.too_large",
                f"code can have at most {MAX_CODE:,} characters, got {len(code):,}",
            )
        printed: list[str] = []
        num_printed = 0

        def collect(_: str, text: str) -> None:
            nonlocal num_printed
            num_printed += len(text)
            if num_printed > MAX_PRINTED:
                raise ValueError(f"more than {MAX_PRINTED:,} characters printed")
            printed.append(text)

        limits = monty.ResourceLimits(
            max_feed_duration_secs=MAX_SECONDS,
            max_turn_duration_secs=MAX_SECONDS,
            max_memory=MAX_MEMORY,
            max_recursion_depth=MAX_RECURSION,
            max_suspensions=1_000,
            gc_interval=10_000,
        )
        try:
            with self._get_pool().checkout(limits=limits) as session:
                result = session.feed_run(code, inputs=inputs, print_callback=collect)
        except monty.MontyCrashedError as error:
            raise RunError("python.crashed", f"the sandbox was stopped: {error}") from None
        except monty.MontyError as error:
            raise RunError("python.failed", _shortened(str(error))) from None
        except (TimeoutError, MemoryError, ValueError) as error:
            raise RunError("python.failed", f"{type(error).__name__}: {error}") from None
        return {"value": result, "printed": "".join(printed)}

    def _get_pool(self) -> Any:
        import pydantic_monty as monty

        with self._lock:
            if self._pool is None:
                pool = monty.Monty(
                    min_processes=1,
                    max_processes=NUM_WORKERS,
                    # The call's own limit ends before, and names the cause.
                    checkout_timeout=TIMEOUT_S + 1,
                    request_timeout=MAX_SECONDS + 1,
                    max_checkouts_per_worker=100,
                )
                self._pool = pool.__enter__()
            return self._pool


def _shortened(text: str) -> str:
    """Return a message, cut to MAX_MESSAGE characters, with the number of those that are cut."""
    kept = text[:MAX_MESSAGE]
    return kept if kept == text else f"{kept}... ({len(text) - MAX_MESSAGE:,} more characters)"


def is_installed() -> bool:
    """Return whether the optional extra is installed."""
    try:
        import pydantic_monty  # noqa: F401
    except ImportError:
        return False
    return True


def make_python(sandbox: PythonSandbox) -> Any:
    """Return the function `python`."""

    @function(timeout_s=TIMEOUT_S, capability=CAPABILITY)
    def python(code: str, inputs: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run Python code in a sandbox; `inputs` are its variables. Gives `value` and `printed`."""
        return sandbox.run(code, inputs or {})

    return python
