"""The constraints of all outputs: compiled once, and out of the way of the step loop.

Two threads do what may take long. The *compiler* lets the helper process (`vetting`) look
at a new constraint and then compiles it; the *mover* moves the grammars that were found to
be slow. The engine's loop goes on meanwhile and collects what is ready (`collect`); a file
descriptor (`fileno`) becomes readable when there is something, so that an idle loop wakes.

What was compiled is kept by its text, refusals too, least recently used out first, up to
`MAX_CACHED_BYTES` by a cautious estimate: the library does not say what a grammar holds, and
its lexer grows with the texts that it sees.

Knows sources, tokens and texts; refuses to know contexts. Kept true: a constraint belongs to
one thread at a time: while it is held to the one that moves it, else to the loop.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Final, TypeAlias

import msgspec
from llguidance import LLTokenizer

from . import api, grammar
from .constraint import Constraint
from .grammar import Compiled
from .vetting import Question, Vetter

MAX_CACHED_BYTES: Final = 256 * 1024 * 1024
_ENTRY_BYTES: Final = 64 * 1024
_BYTES_PER_CHARACTER: Final = 40
"""Of a grammar's source, once compiled. Measured: 30 for a schema of long enumerations."""
_BYTES_PER_TOKEN: Final = 2400
"""That an output may add to its grammar's lexer: two states."""

_log = logging.getLogger(__name__)

_Job: TypeAlias = Callable[[], None]


@dataclass(slots=True)
class _Entry:
    """What became of one constraint."""

    compiled: Compiled | None
    error: api.EngineError | None
    num_bytes: int
    is_relaxed: bool = False


class Constraints:
    """Makes, moves and checks constraints for one engine."""

    def __init__(
        self, tokenizer_json: str, eos_ids: Sequence[int], *, vetter: Vetter | None = None
    ) -> None:
        """Build the compiler's tokenizer: milliseconds for bytes, seconds for 100,000 tokens.

        Raises:
            ValueError: if the compiler cannot work with this tokenizer.
        """
        if not eos_ids:
            raise ValueError("the model has no end token")
        self._tokenizer = LLTokenizer(tokenizer_json, eos_token=list(eos_ids))
        self._eos_ids = tuple(eos_ids)
        self._vetter = vetter or Vetter(_special_tokens(tokenizer_json))
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._num_bytes = 0
        self._waiting: dict[bytes, list[Constraint]] = {}
        self._done: list[Constraint | api.Checked] = []
        self._num_pending = 0
        self._wake_out, self._wake_in = os.pipe()
        os.set_blocking(self._wake_out, False)
        os.set_blocking(self._wake_in, False)
        self._lock = threading.RLock()
        self._compiler = _Worker("compile grammars")
        self._mover = _Worker("follow slow grammars")

    # The loop's side.

    def new(self, source: str, room: int) -> Constraint:
        """Return the constraint of an output of at most `room` tokens.

        It is held until its grammar is compiled, unless that is known already.

        Raises:
            EngineError: if the constraint is known to be none.
        """
        key = _key(source)
        constraint = Constraint(source, key, self._eos_ids, room)
        with self._lock:
            entry = self._find(key)
            if entry is None:
                self._num_pending += 1
                waiting = self._waiting.setdefault(key, [])
                waiting.append(constraint)
                if len(waiting) == 1:
                    self._compiler.do(lambda: self._compile_for_waiting(key, source))
                return constraint
        self._begin(constraint, entry)
        constraint.is_held = False
        return constraint

    def take(self, constraint: Constraint, token_id: int) -> None:
        """Move on by a token; a slow constraint is held until that is done."""
        if constraint.is_slow:
            self._hold(constraint, self._mover, lambda: constraint.take(token_id))
        else:
            constraint.take(token_id)

    def validate(self, constraint: Constraint, text: str) -> None:
        """Hold a finished text against the schema of a relaxed constraint: sets `is_valid`."""

        def look() -> None:
            verdict = self._vetter.ask(Question(constraint.source, text))
            constraint.is_valid = verdict.matches is not False

        self._hold(constraint, self._compiler, look)

    def check(self, command: api.Check) -> None:
        """Find out about a constraint, and whether a text keeps it; the answer is collected."""
        self._num_pending += 1

        def look() -> None:
            self._finish(self._look(command))

        self._compiler.do(look)

    def retire(self, constraint: Constraint) -> None:
        """Note that an output is over: its text may have made its grammar larger."""
        with self._lock:
            entry = self._entries.get(constraint.key)
            if entry is not None and entry.compiled is not None:
                most = grammar.MAX_STATES * _BYTES_PER_TOKEN // 2
                more = min(constraint.num_taken * _BYTES_PER_TOKEN, most - entry.num_bytes)
                if more > 0:
                    entry.num_bytes += more
                    self._num_bytes += more
        self._shrink()

    def collect(self) -> list[Constraint | api.Checked]:
        """Return what has become ready; what was held is not any more."""
        if not self._num_pending:
            return []
        with self._lock:
            ready, self._done = self._done, []
            with suppress(BlockingIOError):
                os.read(self._wake_out, 65_536)
        self._num_pending -= len(ready)
        for item in ready:
            if isinstance(item, Constraint):
                item.is_held = False
        return ready

    @property
    def is_pending(self) -> bool:
        """Something is not collected yet."""
        return self._num_pending > 0

    def fileno(self) -> int:
        """Readable as soon as there is something to collect."""
        return self._wake_out

    def close(self) -> None:
        """End threads and helper; nothing is collected after it."""
        self._compiler.stop()
        self._mover.stop()
        self._vetter.close()
        os.close(self._wake_in)
        os.close(self._wake_out)

    def _hold(self, constraint: Constraint, worker: _Worker, work: _Job) -> None:
        """Let a worker do something to a constraint, which is collected when that is done."""
        constraint.is_held = True
        self._num_pending += 1
        worker.do(lambda: self._do(constraint, work))

    # In a worker's thread.

    def _do(self, constraint: Constraint, work: _Job) -> None:
        try:
            work()
        except api.EngineError as error:
            constraint.error = error
        except Exception:
            # A mistake of ours must not leave an output waiting for ever.
            _log.exception("a constraint failed")
            constraint.error = api.EngineError("constraint.failed", "the constraint failed")
        self._finish(constraint)

    def _compile_for_waiting(self, key: bytes, source: str) -> None:
        entry = self._entry(key, source)
        with self._lock:
            # From here on `new` finds the entry.
            waiting = self._waiting.pop(key)
        for constraint in waiting:
            self._do(constraint, partial(self._begin, constraint, entry))

    def _entry(self, key: bytes, source: str) -> _Entry:
        """Return what is known of a constraint; vet and compile it first if need be."""
        if (entry := self._find(key)) is not None:
            return entry
        weight = _ENTRY_BYTES + _BYTES_PER_CHARACTER * len(source)
        try:
            vetted = self._vetter.ask(Question(source)).constraint
            compiled = grammar.compile_grammar(self._tokenizer, vetted)
            entry = _Entry(compiled, None, weight, is_relaxed=vetted != source)
        except api.EngineError as error:
            entry = _Entry(None, error, _ENTRY_BYTES)
        except Exception:
            _log.exception("a constraint could not be compiled")
            failure = api.EngineError("constraint.failed", "the constraint could not be compiled")
            entry = _Entry(None, failure, _ENTRY_BYTES)
        with self._lock:
            self._entries[key] = entry
            self._num_bytes += entry.num_bytes
        self._shrink()
        return entry

    def _look(self, command: api.Check) -> api.Checked:
        entry = self._entry(_key(command.constraint), command.constraint)
        error, matches = entry.error, None
        if error is None and command.text is not None:
            try:
                matches = self._vetter.ask(Question(command.constraint, command.text)).matches
            except api.EngineError as failure:
                error = failure
        if error is not None:
            return api.Checked(command.nonce, code=error.code, message=error.message)
        return api.Checked(command.nonce, is_relaxed=entry.is_relaxed, matches=matches)

    # In any thread.

    def _begin(self, constraint: Constraint, entry: _Entry) -> None:
        if entry.error is not None:
            raise entry.error
        compiled = entry.compiled
        assert compiled is not None, "what has no error was compiled"
        constraint.is_relaxed = entry.is_relaxed
        constraint.begin(
            compiled.matcher.deep_copy(),
            lambda: grammar.compile_grammar(self._tokenizer, compiled.source).matcher,
        )

    def _finish(self, item: Constraint | api.Checked) -> None:
        # Together, so that whoever collects the last item leaves nothing to be woken by.
        with self._lock:
            self._done.append(item)
            if len(self._done) == 1:
                os.write(self._wake_in, b"\0")

    def _find(self, key: bytes) -> _Entry | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
            return entry

    def _shrink(self) -> None:
        with self._lock:
            while self._num_bytes > MAX_CACHED_BYTES and len(self._entries) > 1:
                _, entry = self._entries.popitem(last=False)
                self._num_bytes -= entry.num_bytes


class _Worker:
    """A thread that does one job after the other, started with the first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def do(self, job: _Job) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def stop(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def _key(source: str) -> bytes:
    return hashlib.blake2b(source.encode(), digest_size=16).digest()


def _special_tokens(tokenizer_json: str) -> list[str]:
    """Return the names of the tokens that no text is encoded to."""
    content = msgspec.json.decode(tokenizer_json)
    return [each["content"] for each in content.get("added_tokens", []) if each.get("special")]
