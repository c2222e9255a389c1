"""A helper process that looks at a grammar before the engine does.

Whoever sends a constraint may want the engine's end: a grammar that takes minutes or all
memory to compile, that overflows a stack, a schema whose validation does not end. So it is
first compiled here, `python -m conure.engine.vetting`, in a process that may take
`DEADLINE_S` and `MEMORY_BYTES`; one that exceeds them dies alone, and the next question
starts another. Finished texts are held against their constraint here too.

`Vetter` is the engine's side, `main` the helper's. Between them go length-prefixed msgpack
frames over pipes. One question at a time.

Knows grammars over bytes; refuses to know the model's vocabulary, which changes what a mask
costs and not what a grammar does. Kept true: `ask` returns or raises within the deadline,
whatever the question is; a helper whose engine is gone reads the end of its input and exits.
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
from typing import BinaryIO, Final

import msgspec

from .api import EngineError

DEADLINE_S: Final = 2.0
MEMORY_BYTES: Final = 256 * 1024 * 1024
"""That a helper may take beyond what it starts with."""
_START_S: Final = 30.0


class Question(msgspec.Struct, frozen=True, array_like=True):
    """Is this a constraint that can be kept, and does this text keep it?"""

    constraint: str
    text: str | None = None


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """What the helper found."""

    constraint: str = ""
    """The constraint as it has to be compiled: relaxed if need be."""
    code: str = ""
    """Empty: it can be kept."""
    message: str = ""
    matches: bool | None = None
    """Whether the text belongs to the language; None without one."""


class Vetter:
    """Asks a helper process, started on demand. For one thread."""

    def __init__(self, special_tokens: Sequence[str], *, deadline_s: float = DEADLINE_S) -> None:
        """`special_tokens` are the names that a grammar may use."""
        self._special_tokens = list(special_tokens)
        self._deadline_s = deadline_s
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the helper, None while there is none."""
        return None if self._process is None else self._process.pid

    def ask(self, question: Question) -> Verdict:
        """Return the verdict on a constraint that can be kept.

        Raises:
            EngineError: `constraint.invalid`, `constraint.too_large` or
                `constraint.too_complex` as `grammar` has it, the last one also if the helper
                ran out of time or memory.
        """
        process = self._process or self._start()
        stdin, stdout = _pipes(process)
        payload = msgspec.msgpack.encode(question)
        deadline = time.monotonic() + self._deadline_s
        try:
            # The helper reads a question whole before it looks at it.
            _write(stdin, payload)
            answer = _read(stdout, deadline)
        except OSError:
            answer = None
        if answer is None:
            self.close()
            raise EngineError(
                "constraint.too_complex",
                f"the constraint takes more than {self._deadline_s:g} s or "
                f"{MEMORY_BYTES >> 20} MiB; make it smaller",
            )
        verdict = msgspec.msgpack.decode(answer, type=Verdict)
        if verdict.code:
            raise EngineError(verdict.code, verdict.message)
        return verdict

    def close(self) -> None:
        """End the helper; safe without one."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in _pipes(process):
            # What it did not read any more is of no use to anybody.
            with contextlib.suppress(OSError):
                pipe.close()

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "RAYON_NUM_THREADS": "1"},
        )
        stdin, stdout = _pipes(process)
        try:
            _write(stdin, msgspec.msgpack.encode(self._special_tokens))
            # Its first frame says that it is ready: starting up is not the question's time.
            is_ready = _read(stdout, time.monotonic() + _START_S) is not None
        except OSError:
            is_ready = False
        if not is_ready:
            self.close()
            raise EngineError("constraint.unavailable", "the process that vets grammars is gone")
        return process


def main() -> None:
    """Answer questions from stdin until it ends."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    first = _read(source, None)
    if first is None:
        return
    # Imported here: the engine's side does without.
    from . import grammar

    tokenizer = grammar.byte_tokenizer(msgspec.msgpack.decode(first, type=list[str]))

    def look(question: Question) -> Verdict:
        compiled = grammar.compile_strict_or_relaxed(tokenizer, question.constraint)
        grammar.check_beginning(compiled)
        is_relaxed = compiled.source != question.constraint
        schema = grammar.schema_of(question.constraint) if is_relaxed else None
        if is_relaxed:
            grammar.check_schema(schema)
        if question.text is None:
            return Verdict(compiled.source)
        matches = grammar.accepts(compiled, list(question.text.encode()))
        if matches and is_relaxed:
            matches = grammar.is_valid(schema, question.text)
        return Verdict(compiled.source, matches=matches)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _limit_memory()
    # From here on what dies does so by somebody's constraint: its last words are no news.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    _write(sink, b"")
    while (payload := _read(source, None)) is not None:
        # Should the engine die meanwhile, nobody else would end what does not end itself.
        signal.alarm(math.ceil(DEADLINE_S) + 1)
        try:
            verdict = look(msgspec.msgpack.decode(payload, type=Question))
        except EngineError as error:
            verdict = Verdict(code=error.code, message=error.message)
        signal.alarm(0)
        _write(sink, msgspec.msgpack.encode(verdict))


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    # What runs out of memory here should leave no image of it on the disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _pipes(process: subprocess.Popen[bytes]) -> tuple[BinaryIO, BinaryIO]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout  # type: ignore[return-value]  # IO[bytes] of a pipe


def _write(pipe: BinaryIO, payload: bytes) -> None:
    pipe.write(len(payload).to_bytes(4, "big") + payload)
    pipe.flush()


def _read(pipe: BinaryIO, deadline: float | None) -> bytes | None:
    """Return the next payload; None where the deadline passes or the input ends before it."""
    header = _read_bytes(pipe, 4, deadline)
    return header and _read_bytes(pipe, int.from_bytes(header, "big"), deadline)


def _read_bytes(pipe: BinaryIO, size: int, deadline: float | None) -> bytes | None:
    data = b""
    while len(data) < size:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        readable, _, _ = select.select([pipe], [], [], left)
        if not readable:
            return None
        more = os.read(pipe.fileno(), size - len(data))
        if not more:
            return None
        data += more
    return data


if __name__ == "__main__":
    main()
