"""Compiles, caches and advances the constraints of all outputs, without blocking the step loop.

Three threads run what may take long. The *compile thread* first tries a new constraint in a sandbox
process, then compiles it. The *text thread* validates finished texts against relaxed schemas, in a
sandbox of its own. The *advance thread* starts outputs whose grammar was compiled, advances
grammars that turned out to be slow, and recompiles grammars whose lexer is exhausted. Work that an
output waits for runs before checks of constraints. The step loop continues meanwhile and collects
finished work (`collect`). A file descriptor (`fileno`) becomes readable when there is any, so that
an idle loop wakes up.

All outputs of one compiled grammar share its lexer, which is locked while a mask is computed. So
either the step loop or the advance thread uses a lexer. While the advance thread has work for one
output of a grammar, it also starts and advances the other outputs of that grammar.

Compiled grammars, and errors that constraints cause, are cached by source, least recently used
evicted first, up to `MAX_CACHED_BYTES` by a conservative estimate: the library does not report the
size of a grammar, and its lexer grows with the texts that it processes.

Out of scope: contexts.

Invariants: one thread owns a `ConstraintState` at a time: a worker while `is_busy`, else the loop.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from queue import PriorityQueue
from typing import Final, TypeAlias

import msgspec
from cachetools import LRUCache, TTLCache
from llguidance import LLTokenizer

from .. import protocol
from . import grammar
from .grammar import CompiledGrammar
from .sandbox import SandboxedGrammarCheck, SandboxRequest
from .state import ConstraintState, SharedLexer

LONG_S: Final = 1.0
RETRY_S: Final = 30.0
"""How long to keep an error that the constraint did not cause, if it took more than `LONG_S` to
appear."""
CHECK_S: Final = 10.0
"""How long a check may wait for the compile thread. The server waits no longer for its answer."""
MAX_CACHED_BYTES: Final = 256 * 1024 * 1024
_ENTRY_BYTES: Final = 64 * 1024
_BYTES_PER_CHARACTER: Final = 40
"""Compiled size per character of source. Measured: 30 for a schema of long enumerations."""
_BYTES_PER_TOKEN: Final = 2400
"""Growth of a grammar's lexer per output token: two states."""

_log = logging.getLogger(__name__)

_Job: TypeAlias = Callable[[], None]


@dataclass(slots=True)
class _CachedGrammar:
    """A compiled grammar, or the error of its compilation."""

    compiled: CompiledGrammar | None
    error: protocol.EngineError | None
    num_bytes: int
    is_relaxed: bool = False
    lexer: SharedLexer = field(default_factory=SharedLexer)
    retry_at_s: float = math.inf
    """When the constraint is compiled again, on the monotonic clock."""


class ConstraintCompiler:
    """Compiles, advances and validates the constraints of one engine."""

    def __init__(
        self,
        tokenizer_json: str,
        eos_ids: Sequence[int],
        *,
        sandbox: SandboxedGrammarCheck | None = None,
        text_sandbox: SandboxedGrammarCheck | None = None,
        max_cached_bytes: int = MAX_CACHED_BYTES,
    ) -> None:
        """Build the compiler's tokenizer: milliseconds for bytes, seconds for 100,000 tokens.

        Raises:
            ValueError: if the compiler does not support this tokenizer.
        """
        if not eos_ids:
            raise ValueError("the model has no end token")
        self._tokenizer = LLTokenizer(tokenizer_json, eos_token=list(eos_ids))
        self._eos_ids = tuple(eos_ids)
        special_tokens = _special_tokens(tokenizer_json)
        self._sandbox = sandbox or SandboxedGrammarCheck(special_tokens)
        self._text_sandbox = text_sandbox or SandboxedGrammarCheck(special_tokens)
        """Validates texts, which takes seconds under some schemas: no compilation waits for it."""
        self._slow_schemas: TTLCache[bytes, protocol.EngineError] = TTLCache(
            1_024,
            RETRY_S,
            timer=lambda: time.monotonic(),
        )
        """Errors of schemas under which the text of a check took too long. Other checks of these
        schemas fail at once for `RETRY_S`; outputs are validated."""
        self._grammars: LRUCache[bytes, _CachedGrammar] = LRUCache(
            max_cached_bytes, getsizeof=attrgetter("num_bytes")
        )
        self._waiting: dict[bytes, list[ConstraintState]] = {}
        """Constraints that wait for the compilation of their source."""
        self._ready: list[ConstraintState | protocol.Checked] = []
        self._num_pending = 0
        self._wake_out, self._wake_in = os.pipe()
        os.set_blocking(self._wake_out, False)
        os.set_blocking(self._wake_in, False)
        self._lock = threading.RLock()
        """Guards the cache, `_waiting`, `_ready` and the pipe."""
        self._compile_thread = _WorkerThread("compile grammars")
        self._text_thread = _WorkerThread("validate texts")
        self._advance_thread = _WorkerThread("advance slow grammars")

    # --- called by the step loop --------------------------------------------------------

    def create(self, source: str, max_tokens: int) -> ConstraintState:
        """Return the constraint of an output of at most `max_tokens` tokens.

        The constraint is busy until its grammar is compiled, unless the grammar is cached with a
        lexer that is neither exhausted nor in use by the advance thread.

        Raises:
            EngineError: if the constraint is cached as invalid.
        """
        key = _key(source)
        constraint = ConstraintState(source, key, self._eos_ids, max_tokens)
        with self._lock:
            cached = self._find_cached(key)
            if cached is None:
                self._num_pending += 1
                if key not in self._waiting:
                    self._waiting[key] = []
                    self._compile_thread.submit(lambda: self._compile_for_waiting(key, source))
                self._waiting[key].append(constraint)
                return constraint
        constraint.lexer = cached.lexer
        if cached.error is None and cached.lexer.num_jobs:
            self._submit_advance(constraint, partial(_start, constraint, cached))
        else:
            _start(constraint, cached)
            constraint.is_busy = False
            self._restart_if_exhausted(constraint)
        return constraint

    def advance(self, constraint: ConstraintState, token_id: int) -> None:
        """Consume a token. If the advance thread does it, the constraint is busy until then."""
        if constraint.is_slow or constraint.lexer.num_jobs:
            self._submit_advance(constraint, lambda: constraint.advance(token_id))
        else:
            constraint.advance(token_id)
            self._restart_if_exhausted(constraint)

    def rewind(self, constraint: ConstraintState, num_tokens: int, rest: str) -> None:
        """Go back to where a text ends, `rest` behind its first tokens, as `advance` consumes."""
        # Greedy tokens have the bytes of the text; the tokenizer may add a space before it.
        tokens = self._tokenizer.greedy_tokenize(rest)
        if constraint.is_slow or constraint.lexer.num_jobs:
            self._submit_advance(constraint, lambda: constraint.rewind(num_tokens, tokens))
        else:
            constraint.rewind(num_tokens, tokens)

    def validate_text(self, constraint: ConstraintState, text: str) -> None:
        """Validate a finished text against the schema of a relaxed constraint: set `is_valid`."""

        def validate() -> None:
            if not constraint.is_released:
                request = SandboxRequest(constraint.source, text)
                constraint.is_valid = self._text_sandbox.validate(request).matches is not False

        self._submit(constraint, self._text_thread, validate)

    def submit_check(self, command: protocol.ValidateConstraint) -> None:
        """Check a constraint, and optionally a text against it. `collect` returns the result."""
        self._num_pending += 1
        until_s = time.monotonic() + CHECK_S
        self._compile_thread.submit(lambda: self._check(command, until_s), is_check=True)

    def release(self, constraint: ConstraintState) -> None:
        """Stop waiting for a grammar, or account for its growth, when an output ends."""
        with self._lock:
            constraint.is_released = True
            waiting = self._waiting.get(constraint.key, [])
            if constraint in waiting:
                waiting.remove(constraint)
                self._num_pending -= 1
                return
            cached = self._grammars.get(constraint.key)
            if cached is None or cached.compiled is None:
                return
            limit = grammar.MAX_STATES * _BYTES_PER_TOKEN // 2
            growth = min(constraint.num_tokens * _BYTES_PER_TOKEN, limit - cached.num_bytes)
            if growth > 0:
                cached.num_bytes += growth
                # Stored again, so that the cache measures it again.
                self._grammars[constraint.key] = cached

    def collect(self) -> list[ConstraintState | protocol.Checked]:
        """Return what has become ready. The constraints among it are no longer busy."""
        if not self._num_pending:
            return []
        with self._lock:
            ready, self._ready = self._ready, []
            with suppress(BlockingIOError):
                os.read(self._wake_out, 65_536)
        self._num_pending -= len(ready)
        for item in ready:
            if isinstance(item, ConstraintState):
                item.is_busy = False
        return ready

    @property
    def is_pending(self) -> bool:
        """Whether submitted work is not collected yet."""
        return self._num_pending > 0

    def fileno(self) -> int:
        """Return a file descriptor that is readable while there is something to collect."""
        return self._wake_out

    def close(self) -> None:
        """Stop threads and sandbox. Nothing can be collected afterwards."""
        for thread in (self._compile_thread, self._text_thread, self._advance_thread):
            thread.stop()
        self._sandbox.close()
        self._text_sandbox.close()
        os.close(self._wake_in)
        os.close(self._wake_out)

    def _restart_if_exhausted(self, constraint: ConstraintState) -> None:
        """Restart a constraint whose lexer is exhausted. It is busy until that is done."""
        if constraint.is_exhausted:
            self._submit_advance(constraint, lambda: None)

    def _submit_advance(self, constraint: ConstraintState, job: _Job) -> None:
        """Run a job that uses the lexer of a constraint in the advance thread."""
        with self._lock:
            constraint.lexer.num_jobs += 1
        self._submit(constraint, self._advance_thread, partial(self._use_lexer, constraint, job))

    def _submit(self, constraint: ConstraintState, worker: _WorkerThread, job: _Job) -> None:
        """Run a job on a constraint in a worker thread. The constraint is collected afterwards."""
        constraint.is_busy = True
        self._num_pending += 1
        worker.submit(lambda: self._run(constraint, job))

    # --- called by worker threads -------------------------------------------------------

    def _run(self, constraint: ConstraintState, job: _Job) -> None:
        try:
            job()
        except Exception as error:
            # Without a result, the output would wait forever.
            constraint.error = _reported(error)
        self._add_ready(constraint)

    def _use_lexer(self, constraint: ConstraintState, job: _Job) -> None:
        """Run a job of the advance thread, and restart the constraint if its lexer is exhausted."""
        try:
            if not constraint.is_released:
                job()
            if not constraint.is_released and constraint.is_exhausted:
                self._restart(constraint)
        finally:
            with self._lock:
                constraint.lexer.num_jobs -= 1

    def _compile_for_waiting(self, key: bytes, source: str) -> None:
        with self._lock:
            if not self._waiting[key]:
                # All outputs have ended meanwhile.
                del self._waiting[key]
                return
        cached = self._get_or_compile(key, source)
        with self._lock:
            # From here on, `create` uses the cached grammar.
            waiting = self._waiting.pop(key)
            cached.lexer.num_jobs += len(waiting)
        for constraint in waiting:
            constraint.lexer = cached.lexer
            start = partial(self._use_lexer, constraint, partial(_start, constraint, cached))
            self._advance_thread.submit(partial(self._run, constraint, start))

    def _get_or_compile(self, key: bytes, source: str) -> _CachedGrammar:
        """Return a cached grammar. Otherwise check it in the sandbox, then compile it.

        An error is cached if the constraint causes it. After others, the next output tries again,
        or, if the error took long, those after `RETRY_S`: meanwhile other constraints compile.
        """
        started_s = time.monotonic()
        with self._lock:
            cached = self._find_cached(key)
        if cached is not None:
            return cached
        try:
            checked = self._sandbox.validate(SandboxRequest(source)).constraint
            compiled = grammar.compile_grammar(self._tokenizer, checked)
            cached = _CachedGrammar(
                compiled, None, _num_bytes(source), is_relaxed=checked != source
            )
        except Exception as error:
            failure = _reported(error)
            cached = _CachedGrammar(None, failure, _ENTRY_BYTES)
            if failure.code not in protocol.CONSTRAINT_FAULTS:
                failed_s = time.monotonic()
                if failed_s - started_s < LONG_S:
                    return cached
                cached = replace(cached, retry_at_s=failed_s + RETRY_S)
        with self._lock:
            self._grammars[key] = cached
        return cached

    def _find_cached(self, key: bytes) -> _CachedGrammar | None:
        """Return a cached grammar, or an error that is not to be tried again yet.

        The caller has the lock.
        """
        cached = self._grammars.get(key)
        return None if cached is None or time.monotonic() >= cached.retry_at_s else cached

    def _check(self, command: protocol.ValidateConstraint, until_s: float) -> None:
        """Check a constraint; then check its text, if it has one, in the thread for texts."""
        if time.monotonic() > until_s:
            self._add_ready(_unchecked(command))
            return
        cached = self._get_or_compile(_key(command.constraint), command.constraint)
        if cached.error is not None:
            self._add_ready(_failed(command, cached.error))
        elif command.text is None:
            self._add_ready(protocol.Checked(command.nonce, is_relaxed=cached.is_relaxed))
        else:
            is_relaxed, text = cached.is_relaxed, command.text
            self._text_thread.submit(
                lambda: self._add_ready(self._check_text(command, text, until_s, is_relaxed)),
                is_check=True,
            )

    def _check_text(
        self, command: protocol.ValidateConstraint, text: str, until_s: float, is_relaxed: bool
    ) -> protocol.Checked:
        if time.monotonic() > until_s:
            return _unchecked(command)
        key = _key(command.constraint)
        if (slow := self._slow_schemas.get(key)) is not None:
            return _failed(command, slow)
        try:
            request = SandboxRequest(command.constraint, text)
            matches = self._text_sandbox.validate(request).matches
        except Exception as failure:
            error = _reported(failure)
            if error.code == "constraint.too_complex":
                self._slow_schemas[key] = error
            return _failed(command, error)
        return protocol.Checked(command.nonce, is_relaxed=is_relaxed, matches=matches)

    def _restart(self, constraint: ConstraintState) -> None:
        """Continue an output whose lexer is exhausted with that of a grammar compiled again.

        Later outputs use the new grammar, too.
        """
        with self._lock:
            cached = self._find_cached(constraint.key)
        # Another output may have replaced the grammar.
        if cached is not None and self._restart_with(constraint, cached):
            return
        compiled = grammar.compile_grammar(self._tokenizer, constraint.compiled_source)
        num_bytes = _num_bytes(constraint.source)
        cached = _CachedGrammar(compiled, None, num_bytes, is_relaxed=constraint.is_relaxed)
        if self._restart_with(constraint, cached):
            with self._lock:
                self._grammars[constraint.key] = cached

    def _restart_with(self, constraint: ConstraintState, cached: _CachedGrammar) -> bool:
        """Restart a constraint with a copy of a grammar. Return False if that fails, too."""
        if cached.compiled is None:
            return False
        with self._lock:
            constraint.lexer.num_jobs -= 1
            constraint.lexer = cached.lexer
            constraint.lexer.num_jobs += 1
        return constraint.restart(cached.compiled.matcher.deep_copy())

    def _add_ready(self, item: ConstraintState | protocol.Checked) -> None:
        # Both under the lock, so that the pipe is empty once the last item is collected.
        with self._lock:
            self._ready.append(item)
            if len(self._ready) == 1:
                os.write(self._wake_in, b"\0")


class _WorkerThread:
    """A thread that runs jobs one after the other, checks last. It starts with the first job."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: PriorityQueue[tuple[bool, int, _Job | None]] = PriorityQueue()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def submit(self, job: _Job, *, is_check: bool = False) -> None:
        """Run a job, from any thread. An output waits for it, unless it is a check."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        self._jobs.put((is_check, next(self._numbers), job))

    def stop(self) -> None:
        if self._thread is not None:
            self._jobs.put((True, next(self._numbers), None))
            self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()[-1]) is not None:
            try:
                job()
            except Exception:
                # Later jobs would wait forever for a thread that has ended.
                _log.exception("a job of the thread to %s failed", self._name)


def _unchecked(command: protocol.ValidateConstraint) -> protocol.Checked:
    return protocol.Checked(
        command.nonce,
        code="constraint.unavailable",
        message=f"the constraint was not checked within {CHECK_S:g} s because others came first; "
        "try again",
    )


def _failed(command: protocol.ValidateConstraint, error: protocol.EngineError) -> protocol.Checked:
    return protocol.Checked(command.nonce, code=error.code, message=error.message)


def _reported(error: Exception) -> protocol.EngineError:
    """Return the error that an output or a check fails with. An unexpected one is logged."""
    if isinstance(error, protocol.EngineError):
        return _copy(error)
    _log.error("a constraint failed", exc_info=error)
    return protocol.EngineError(
        "constraint.failed", "the constraint failed because of an internal error"
    )


def _start(constraint: ConstraintState, cached: _CachedGrammar) -> None:
    """Start a constraint with a copy of a grammar. Called by any thread.

    Raises:
        EngineError: if the grammar has an error.
    """
    if cached.error is not None:
        # A copy: an error that is raised keeps the frames of all its callers.
        raise _copy(cached.error)
    compiled = cached.compiled
    assert compiled is not None, "a grammar without error is compiled"
    constraint.is_relaxed = cached.is_relaxed
    constraint.compiled_source = compiled.source
    constraint.start(compiled.matcher.deep_copy())


def _num_bytes(source: str) -> int:
    """Return the estimated size of a grammar that was compiled just now."""
    return _ENTRY_BYTES + _BYTES_PER_CHARACTER * len(source)


def _copy(error: protocol.EngineError) -> protocol.EngineError:
    """Return an equal error without traceback and context."""
    return protocol.EngineError(error.code, error.message)


def _key(source: str) -> bytes:
    return hashlib.blake2b(source.encode(), digest_size=16).digest()


def _special_tokens(tokenizer_json: str) -> list[str]:
    """Return the names of the special tokens, which plain text is never encoded to."""
    content = msgspec.json.decode(tokenizer_json)
    return [each["content"] for each in content.get("added_tokens", []) if each.get("special")]
