"""A helper process that tries a grammar before the engine compiles it.

A constraint may be hostile: a grammar that takes minutes or all memory to compile or that
overflows a stack, a schema whose validation does not terminate. So each one is first compiled in
a helper process, `python -m conure.engine.constraints.sandbox`, which may take `CPU_S` and
`MEMORY_BYTES`. A helper that exceeds them is killed, and the next request starts another one. If
something else kills the helper, another is started and gets the same request.
Finished texts are validated against their constraint here, too.

The budget is CPU time, so a valid constraint is accepted on a busy machine, too. `DEADLINE_S`
bounds the wall time of a helper that gets no CPU time at all.

`SandboxedGrammarCheck` is the engine's side, `main` the helper's. They exchange length-prefixed
msgpack frames over pipes, one request at a time.

The helper compiles grammars over bytes. The model's vocabulary changes what a mask costs, but not
whether a grammar compiles.

Invariants: `validate` returns or raises within the deadline, for any request. A helper whose engine
has exited reads the end of its input and exits.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

import msgspec

from ..protocol import EngineError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

CPU_S: Final = 2.0
"""CPU time of one request."""
DEADLINE_S: Final = 8.0
"""Wall time of one request."""
MEMORY_BYTES: Final = 256 * 1024 * 1024
"""Memory that a helper may allocate beyond what it uses after starting."""
_START_S: Final = 30.0
_FOREIGN_EXITS: Final = (-signal.SIGKILL, -signal.SIGTERM)
"""Exit codes that no request can cause: none of the helper's limits sends these signals."""


class SandboxSetup(msgspec.Struct, frozen=True, array_like=True):
    """The first frame to a helper."""

    special_tokens: list[str]
    """Names of the special tokens that a grammar may contain."""
    cpu_s: float
    """CPU time of one request, in seconds."""


class SandboxRequest(msgspec.Struct, frozen=True, array_like=True):
    """Asks whether a constraint is valid, and whether a text matches it."""

    constraint: str
    text: str | None = None


class SandboxReply(msgspec.Struct, frozen=True, array_like=True):
    """The helper's answer."""

    constraint: str = ""
    """The constraint to compile: relaxed if necessary."""
    code: str = ""
    """Error code; empty if the constraint is valid."""
    message: str = ""
    matches: bool | None = None
    """Whether the text belongs to the language; None without a text."""


class SandboxedGrammarCheck:
    """Sends requests to a helper process, which is started on demand. For one thread."""

    def __init__(self, special_tokens: Sequence[str], *, cpu_s: float = CPU_S) -> None:
        """Start no helper yet.

        Args:
            special_tokens: names of the special tokens that a grammar may contain.
            cpu_s: CPU time of one request.
        """
        self._setup = SandboxSetup(list(special_tokens), cpu_s)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the helper, or None if it is not running."""
        return None if self._process is None else self._process.pid

    def validate(self, request: SandboxRequest) -> SandboxReply:
        """Return the reply for a valid constraint.

        Raises:
            EngineError: a `constraint.*` error of `grammar`; `constraint.too_complex` also if
                the helper ran out of time or memory; `constraint.unavailable` if it did not
                answer for another reason.
        """
        payload = msgspec.msgpack.encode(request)
        reply = self._send(payload)
        if reply is None:
            # Something else killed the helper, for example for the memory of the machine.
            reply = self._send(payload)
        if reply is None:
            raise EngineError(
                "constraint.unavailable", "the grammar sandbox was killed twice; try again"
            )
        decoded = msgspec.msgpack.decode(reply, type=SandboxReply)
        if decoded.code:
            raise EngineError(decoded.code, decoded.message)
        return decoded

    def close(self) -> None:
        """Kill the helper, if it is running."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in _pipes(process):
            # Closing flushes unread input to a dead process.
            with contextlib.suppress(OSError):
                pipe.close()

    def _send(self, payload: bytes) -> bytes | None:
        """Return the reply to a request, or None if something else killed the helper.

        Raises:
            EngineError: `constraint.too_complex` if the request ended the helper, or kept it busy
                until the deadline; `constraint.unavailable` if there is no helper, or it was not
                busy.
        """
        process = self._running() or self._start()
        stdin, stdout = _pipes(process)
        deadline, used_before_s = time.monotonic() + DEADLINE_S, _cpu_s_of(process)
        try:
            # The helper reads a whole request before it processes it.
            _write(stdin, payload, deadline)
            reply = _read(stdout, deadline)
        except OSError:
            reply = None
        if reply is not None:
            return reply
        is_late, used_s = time.monotonic() >= deadline, _cpu_s_of(process) - used_before_s
        self.close()
        if is_late and used_s < 0.9 * self._setup.cpu_s:  # the machine was busy, or stopped it
            raise EngineError(
                "constraint.unavailable",
                f"the grammar sandbox did not answer in {DEADLINE_S:g} s; try again",
            )
        if not is_late and process.returncode in _FOREIGN_EXITS:
            return None
        raise EngineError(
            "constraint.too_complex",
            f"processing the constraint takes more than {self._setup.cpu_s:g} s or "
            f"{MEMORY_BYTES >> 20} MiB; make it smaller",
        )

    def _running(self) -> subprocess.Popen[bytes] | None:
        """Return the helper, unless it ended after its last reply."""
        if self._process is not None and self._process.poll() is not None:
            self.close()
        return self._process

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            self._process = process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "RAYON_NUM_THREADS": "1"},
            )
        except OSError as error:
            raise EngineError(
                "constraint.unavailable", f"the grammar sandbox could not be started: {error}"
            ) from error
        stdin, stdout = _pipes(process)
        os.set_blocking(stdin.fileno(), False)  # for writing with a deadline
        deadline = time.monotonic() + _START_S
        try:
            _write(stdin, msgspec.msgpack.encode(self._setup), deadline)
            # The first frame signals that it is ready. The deadline of a request excludes it.
            is_ready = _read(stdout, deadline) is not None
        except OSError:
            is_ready = False
        if not is_ready:
            self.close()
            raise EngineError(
                "constraint.unavailable",
                f"the grammar sandbox ended or was not ready in {_START_S:g} s; try again",
            )
        return process


def _reply(tokenizer: LLTokenizer, request: SandboxRequest) -> SandboxReply:
    """Return the reply to a request.

    Raises:
        MemoryError: if the helper has no memory left. It ends then.
    """
    try:
        return _check(tokenizer, request)
    except EngineError as error:
        return SandboxReply(code=error.code, message=error.message)
    except MemoryError:
        raise
    except Exception as error:
        message = f"the constraint cannot be processed: {error!r:.300}"
        return SandboxReply(code="constraint.invalid", message=message)


def _check(tokenizer: LLTokenizer, request: SandboxRequest) -> SandboxReply:
    from . import grammar, validation

    compiled = grammar.compile_strict_or_relaxed(tokenizer, request.constraint)
    grammar.check_first_choice(compiled)
    is_relaxed = compiled.source != request.constraint
    schema = grammar.schema_of(request.constraint) if is_relaxed else None
    if is_relaxed:
        validation.check_schema(schema)
    if request.text is None:
        return SandboxReply(compiled.source)
    matches = grammar.accepts(compiled, list(request.text.encode()))
    if matches and is_relaxed:
        matches = validation.is_valid(schema, request.text)
    return SandboxReply(compiled.source, matches=matches)


def main() -> None:
    """Answer requests from stdin until it is closed."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    first = _read(source, None)
    if first is None:
        return
    # Imported here: the engine's side does not need it.
    from . import grammar

    setup = msgspec.msgpack.decode(first, type=SandboxSetup)
    tokenizer = grammar.byte_tokenizer(setup.special_tokens)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _limit_memory()
    # From here on, a crash is caused by a constraint: its error output is not of interest.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    _write(sink, b"", None)
    while (payload := _read(source, None)) is not None:
        # The signal of this timer ends the helper.
        signal.setitimer(signal.ITIMER_PROF, setup.cpu_s)
        reply = _reply(tokenizer, msgspec.msgpack.decode(payload, type=SandboxRequest))
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(sink, msgspec.msgpack.encode(reply), None)


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    # No core dump if the helper runs out of memory.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _cpu_s_of(process: subprocess.Popen[bytes]) -> float:
    """Return the CPU time of a process; 0 if the system does not know it any more."""
    try:
        line = Path(f"/proc/{process.pid}/stat").read_text("utf-8", errors="replace")
    except OSError:
        return 0.0
    _, _, fields = line.rpartition(")")  # the name before may have blanks
    in_user_mode, in_kernel = fields.split()[11:13]
    return (int(in_user_mode) + int(in_kernel)) / os.sysconf("SC_CLK_TCK")


def _pipes(process: subprocess.Popen[bytes]) -> tuple[BinaryIO, BinaryIO]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout  # type: ignore[return-value]  # IO[bytes] of a pipe


def _write(pipe: BinaryIO, payload: bytes, deadline: float | None) -> None:
    """Write a payload.

    Raises:
        OSError: if the deadline passes or the reader ends first.
    """
    data = memoryview(len(payload).to_bytes(4, "big") + payload)
    while data:
        if not _is_ready(pipe, select.POLLOUT, deadline):
            raise TimeoutError("the helper does not read")
        data = data[os.write(pipe.fileno(), data) :]


def _read(pipe: BinaryIO, deadline: float | None) -> bytes | None:
    """Return the next payload, or None if the deadline passes or the input ends first."""
    header = _read_bytes(pipe, 4, deadline)
    return header and _read_bytes(pipe, int.from_bytes(header, "big"), deadline)


def _read_bytes(pipe: BinaryIO, size: int, deadline: float | None) -> bytes | None:
    data = b""
    while len(data) < size:
        if not _is_ready(pipe, select.POLLIN, deadline):
            return None
        more = os.read(pipe.fileno(), size - len(data))
        if not more:
            return None
        data += more
    return data


def _is_ready(pipe: BinaryIO, event: int, deadline: float | None) -> bool:
    """Wait until a pipe can be read or written. Return False if the deadline passes first."""
    poll = select.poll()  # unlike `select`, it accepts file descriptors above 1,023
    poll.register(pipe, event)
    left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
    return bool(poll.poll(None if left_s is None else math.ceil(left_s * 1_000)))


if __name__ == "__main__":
    main()
