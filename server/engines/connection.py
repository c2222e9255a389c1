"""The connection to one engine process: its socket, its reports and its end.

Frames have a 4-byte big-endian length, then msgpack. The connection starts the process, hands each
report to the listener of its context, and calls `on_lost` once when the engine dies or freezes.

Out of scope: programs, and the choice of an engine.
Invariants: commands leave in the order in which they were sent, in one frame per iteration of the
event loop; an abort leaves at once, with the commands before it. Reports are delivered in order,
for about `DELIVERY_S` per iteration. After `on_lost` no listener is called. A context id is used
once per epoch. An exception in a listener fails the call of that listener only.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import signal
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, cast

import msgspec

from conure.engine import protocol

from .command_line import EngineCommandLine
from .heartbeat import HeartbeatMonitor
from .protocol import EMBEDDINGS_OWNER, Listener
from .reports import join_tokens
from .step_costs import StepCostMeter

logger = logging.getLogger(__name__)

_VERSION: Final = msgspec.msgpack.Decoder(protocol.HelloVersion)
_HELLO: Final = msgspec.msgpack.Decoder(protocol.Hello)
_STEP: Final = msgspec.msgpack.Decoder(protocol.StepReport)
_WORK: Final = (protocol.Fill, protocol.GenerateCommand, protocol.Embed)
"""Commands that start steps."""

MAX_FRAME_BYTES = 256 * 1024 * 1024
PING_EVERY_S = 1.0
STDERR_CHUNK_BYTES = 65_536
MAX_LINE_BYTES = 4_096
"""Bytes of a line of the engine's stderr that are logged."""
DELIVERY_S = 0.01
"""Seconds of an iteration of the event loop after which other callbacks run before more reports are
delivered. In 10 ms, about 60 calls end."""
NUM_PONG_WAITS = 10
"""Intervals that the wait for a pong is divided into."""


Reply = TypeVar("Reply")


class EngineStartError(Exception):
    """The engine process did not send a Hello that the server accepts. The message says why, or is
    the last line of the process's stderr.
    """


@dataclass(slots=True)
class _PendingReplies:
    """Futures by nonce."""

    pongs: dict[int, asyncio.Future[protocol.Pong]] = field(default_factory=dict)
    statuses: dict[int, asyncio.Future[protocol.StatusReport]] = field(default_factory=dict)
    checks: dict[int, asyncio.Future[protocol.Checked]] = field(default_factory=dict)
    embeddings: dict[int, asyncio.Future[protocol.Embedded | protocol.Failed]] = field(
        default_factory=dict
    )
    """Embeddings by context."""

    def fail(self, error: Exception) -> None:
        """Set an exception on all futures."""
        futures: list[asyncio.Future[Any]] = [
            *self.pongs.values(),
            *self.statuses.values(),
            *self.checks.values(),
            *self.embeddings.values(),
        ]
        for future in futures:
            if not future.done():
                future.set_exception(error)
                future.exception()  # mark as retrieved: the waiting task may be gone


def _resolve(pending: dict[int, asyncio.Future[Reply]], nonce: int, reply: Reply) -> None:
    future = pending.pop(nonce, None)
    if future is not None and not future.done():
        future.set_result(reply)


class EngineConnection(asyncio.Protocol):
    """An engine process and its socket. Created by `start`."""

    def __init__(
        self,
        name: str,
        epoch: int,
        on_lost: Callable[[EngineConnection, str], None],
        hang_s: float,
        freeze_s: float,
    ) -> None:
        self.name = name
        self.epoch = epoch
        self.num_free = 0
        self.num_cached = 0
        self._lowest = 0
        """Free and cached blocks in the step since the last request in which they were fewest."""
        self.num_steps = 0
        self.cost_meter = StepCostMeter(num_blocks=0, block_size=0)
        self.on_steps: Callable[[], None] | None = None
        self.answered_at = time.monotonic()
        self._hang_s = hang_s
        self._freeze_s = freeze_s
        self._heartbeat = HeartbeatMonitor(self._on_heartbeat)
        self._on_lost = on_lost
        self._alive = False
        self._is_closed = False
        self._is_killed = False
        """Whether this server ended the process."""
        self._process: asyncio.subprocess.Process | None = None
        self._transport: asyncio.Transport | None = None
        self._hello: asyncio.Future[protocol.Hello] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []
        self._buffer = bytearray()
        self._arrived: list[Sequence[protocol.Report]] = []
        """Reports by step, before they are merged."""
        self._undelivered: deque[protocol.Report] = deque()
        self._is_delivery_scheduled = False
        self._outgoing: list[protocol.Command] = []
        self._inflight_fill_tokens: dict[int, int] = {}
        """Tokens of fills by context that the engine's counts may not include yet."""
        self._num_inflight_tokens = 0
        self._listeners: dict[int, Listener] = {}
        self._aborting: dict[int, Callable[[protocol.Aborted | None], None]] = {}
        self._owners: dict[int, str] = {}
        self.num_contexts_by_owner: Counter[str] = Counter()
        self._context_ids = itertools.count(1)
        self._nonces = itertools.count(1)
        self._replies = _PendingReplies()
        self._last_line = ""
        self._encoder = msgspec.msgpack.Encoder()

    @classmethod
    async def start(
        cls,
        name: str,
        epoch: int,
        command: EngineCommandLine,
        *,
        on_lost: Callable[[EngineConnection, str], None],
        start_s: float,
        hang_s: float,
        freeze_s: float,
    ) -> EngineConnection:
        """Start the process and wait for its Hello.

        Raises:
            EngineStartError: if the process ends, or `start_s` seconds pass, before that.
        """
        engine = cls(name, epoch, on_lost, hang_s, freeze_s)
        try:
            await _launch(engine, command)
            await asyncio.wait_for(asyncio.shield(engine._hello), start_s)
            if engine._is_closed:
                raise ConnectionError("closed after Hello")
        except TimeoutError as error:
            await engine.stop()
            reason = f"{name} did not start within {start_s:g} s{_last_line(engine)}"
            raise EngineStartError(reason) from error
        except EngineStartError:
            await engine.stop()
            raise
        except ConnectionError as error:
            await engine.stop()
            raise EngineStartError(_why_ended(engine)) from error
        except asyncio.CancelledError:
            await engine.stop()  # the caller has no reference to the process
            raise
        engine._alive = True
        engine.answered_at = time.monotonic()
        engine._tasks.append(asyncio.create_task(engine._watch()))
        engine._tasks.append(asyncio.create_task(_watch_heartbeat(engine)))
        return engine

    @property
    def hello(self) -> protocol.Hello:
        """The engine's Hello. Available after `start`."""
        return self._hello.result()

    @property
    def is_alive(self) -> bool:
        """Whether commands still reach the engine."""
        return self._alive

    @property
    def num_available(self) -> int:
        """Free and cached blocks, as last reported, without those that fills in flight will use."""
        num_inflight = -(-self._num_inflight_tokens // self.hello.limits.block_size)
        return self.num_free + self.num_cached - num_inflight

    def take_lowest_available(self) -> int:
        """Return the least number of available blocks since the last call."""
        lowest, self._lowest = min(self._lowest, self.num_available), self.num_available
        return lowest

    @property
    def is_memory_constrained(self) -> bool:
        """Whether less than half of the blocks are available, so that evictions may follow."""
        return 2 * self.num_available < self.hello.limits.num_blocks

    def new_context(self, listener: Listener, owner: str) -> int:
        """Allocate a context id; see `Engine`."""
        context = next(self._context_ids)
        self._listeners[context] = listener
        self._owners[context] = owner
        self.num_contexts_by_owner[owner] += 1
        return context

    def send(self, *commands: protocol.Command) -> None:
        """Queue commands for the frame that leaves after this iteration of the event loop.

        On a lost engine this does nothing: `on_lost` informs its users.
        """
        if not self._alive:
            return
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.extend(commands)
        for command in commands:
            if isinstance(command, protocol.Fill | protocol.Embed):
                num_tokens = len(command.tokens)
                self._inflight_fill_tokens[command.context] = (
                    self._inflight_fill_tokens.get(command.context, 0) + num_tokens
                )
                self._num_inflight_tokens += num_tokens

    def free(self, context: int, num_cached: int = 0, num_expected: int = 0) -> None:
        """Free a context and remove its listener; see `Engine`."""
        _remove_context(self, context)
        self.send(protocol.Free(context, num_cached, num_expected))

    def abort(self, context: int, on_aborted: Callable[[protocol.Aborted | None], None]) -> None:
        """Abort and free a context; see `Engine`."""
        _remove_context(self, context)
        if not self._alive:
            on_aborted(None)
            return
        self._aborting[context] = on_aborted
        self.send(protocol.Abort(context))
        self._flush()  # The engine reads frames between steps: a later frame may cost a step.

    async def status(self) -> protocol.StatusReport:
        """Return the use of the engine's memory; see `Engine`."""
        nonce = next(self._nonces)
        return await self._request(self._replies.statuses, nonce, protocol.Status(nonce))

    async def validate_constraint(
        self, constraint: str, text: str | None = None
    ) -> protocol.Checked:
        """Check a constraint, and a text against it; see `Engine`."""
        nonce = next(self._nonces)
        command = protocol.ValidateConstraint(nonce, constraint, text)
        return await self._request(self._replies.checks, nonce, command)

    async def embed(self, tokens: list[int], rank: float) -> protocol.Embedded | protocol.Failed:
        """Embed a text; see `Engine`."""
        pending = self._replies.embeddings

        def listen(report: protocol.Report) -> None:
            if isinstance(report, protocol.Embedded | protocol.Failed):
                _resolve(pending, report.context, report)

        context = self.new_context(listen, EMBEDDINGS_OWNER)
        try:
            return await self._request(pending, context, protocol.Embed(context, tokens, rank))
        finally:
            pending.pop(context, None)
            self.free(context)

    async def _request(
        self, pending: dict[int, asyncio.Future[Reply]], nonce: int, command: protocol.Command
    ) -> Reply:
        """Send a command and wait for its reply.

        Raises:
            ConnectionError: if the engine is lost before it replies.
        """
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        pending[nonce] = reply
        self.send(command)
        if not self._alive:
            raise ConnectionError(f"{self.name} is not running")
        return await reply

    async def stop(self) -> None:
        """End the process without calling `on_lost`. May be called twice."""
        self._alive = False
        self._heartbeat.close()
        if self._transport is not None:
            self._transport.close()
        process = self._process
        if process is not None and process.returncode is None:
            try:
                await asyncio.wait_for(process.wait(), 2)
            except TimeoutError:
                _kill(self)
                await process.wait()
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()
        await asyncio.gather(*(t for t in self._tasks if t is not current), return_exceptions=True)

    # --- socket -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport (asyncio callback)."""
        # No isinstance check: uvloop's transports are not subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Decode the complete frames (asyncio callback)."""
        buffer = self._buffer
        buffer += data
        start = 0
        steps: list[protocol.StepReport] = []
        while len(buffer) - start >= 4:
            size = int.from_bytes(buffer[start : start + 4], "big")
            if size > MAX_FRAME_BYTES:
                self._mark_lost(
                    f"{self.name} sent a frame of {size} bytes, above {MAX_FRAME_BYTES}"
                )
                return
            if len(buffer) - start - 4 < size:
                break
            frame = bytes(buffer[start + 4 : start + 4 + size])
            start += 4 + size
            try:
                if not self._hello.done():
                    self._handle_hello(frame)
                else:
                    steps.append(_STEP.decode(frame))
            except msgspec.DecodeError as error:
                self._mark_lost(f"{self.name} sent a malformed frame: {error}")
                return
        del buffer[:start]
        self._handle_steps([step for step in steps if step.epoch == self.epoch])

    def connection_lost(self, exc: Exception | None) -> None:
        """The process or this server closed the socket (asyncio callback)."""
        self._is_closed = True
        _fail_hello(self, ConnectionError("closed before Hello"))
        self._mark_lost(f"{self.name} closed its connection")

    def _handle_hello(self, frame: bytes) -> None:
        version = _VERSION.decode(frame).protocol  # a Hello of another version has other fields
        if version != protocol.PROTOCOL_VERSION:
            reason = (
                f"{self.name} uses protocol version {version}, the server uses "
                f"{protocol.PROTOCOL_VERSION}: restart the server if Conure was upgraded meanwhile"
            )
            _fail_hello(self, EngineStartError(reason))
            return
        hello = _HELLO.decode(frame)
        self._hello.set_result(hello)
        limits = hello.limits
        self.num_free = self._lowest = limits.num_blocks
        self.cost_meter = StepCostMeter(limits.num_blocks, limits.block_size)

    def _handle_steps(self, steps: list[protocol.StepReport]) -> None:
        """Deliver the reports of steps. If the loop was late, those of several steps at once."""
        now = time.monotonic()
        for step in steps:
            self.cost_meter.observe(step, now)
            self.num_free = step.num_free
            self.num_cached = step.num_cached
            self.num_steps = step.number
            self._lowest = min(self._lowest, step.num_free + step.num_cached)
        self._arrived += [step.reports for step in steps]
        if not self._is_delivery_scheduled:
            _deliver_some(self)

    def _flush(self) -> None:
        commands, self._outgoing = self._outgoing, []
        if not commands or not self._alive or self._transport is None:
            return
        if any(isinstance(command, _WORK) for command in commands):
            self.cost_meter.start(time.monotonic())
        frame = self._encoder.encode(protocol.Commands(commands))
        self._transport.write(len(frame).to_bytes(4, "big") + frame)

    # --- liveness -------------------------------------------------------------------

    async def _watch(self) -> None:
        """Ping the engine. A frozen process keeps its socket open, but does not answer."""
        while self._alive:
            nonce = next(self._nonces)
            pong: asyncio.Future[protocol.Pong] = asyncio.get_running_loop().create_future()
            self._replies.pongs[nonce] = pong
            self.send(protocol.Ping(nonce))
            if not await _wait_for_pong(pong, self._hang_s):
                self._mark_lost(f"{self.name} did not answer a ping for {self._hang_s:g} s")
                return
            await asyncio.sleep(PING_EVERY_S)

    def _on_heartbeat(self) -> None:
        self.answered_at = time.monotonic()

    def _mark_lost(self, reason: str) -> None:
        if self._transport is not None:
            self._transport.abort()
        _fail_hello(self, EngineStartError(reason))
        if not self._alive:
            return
        self._alive = False
        self._heartbeat.close()
        _kill(self)  # A frozen process would keep its memory forever.
        self._listeners.clear()
        self._owners.clear()
        self.num_contexts_by_owner.clear()
        aborting, self._aborting = self._aborting, {}
        self._replies.fail(ConnectionError(reason))
        logger.warning("engine lost: %s", reason)
        self._on_lost(self, reason)
        for on_aborted in aborting.values():
            on_aborted(None)


async def _launch(engine: EngineConnection, command: EngineCommandLine) -> None:
    """Start the engine's process and connect to it."""
    ours, theirs = socket.socketpair()
    try:
        with theirs, engine._heartbeat.opened() as beats:
            engine._process = await asyncio.create_subprocess_exec(
                *command.argv(theirs.fileno(), beats, engine.epoch),
                pass_fds=(theirs.fileno(), beats),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                # Signals to the server's process group must not reach the engine before it drains.
                start_new_session=True,
            )
    except BaseException:
        ours.close()  # no transport will close it
        raise
    engine._tasks.append(asyncio.create_task(_read_stderr(engine)))
    ours.setblocking(False)
    await asyncio.get_running_loop().create_connection(lambda: engine, sock=ours)


def _fail_hello(engine: EngineConnection, error: Exception) -> None:
    """Let the start of an engine fail, unless its Hello has arrived."""
    if not engine._hello.done():
        engine._hello.set_exception(error)
        engine._hello.exception()  # mark as retrieved: the start may have been cancelled


def _why_ended(engine: EngineConnection) -> str:
    """Return why a process ended before its Hello."""
    process = engine._process
    code = None if process is None or engine._is_killed else process.returncode
    if code is not None and code < 0:
        name = signal.strsignal(-code) or "unknown"
        hint = ", which often means too little memory" if -code == signal.SIGKILL else ""
        ended = f"{engine.name} was ended by signal {-code} ({name}) while it started{hint}"
        return ended + _last_line(engine)
    return engine._last_line or f"{engine.name} closed its connection before it was ready"


def _last_line(engine: EngineConnection) -> str:
    return f"; its last line: {engine._last_line}" if engine._last_line else ""


def _remove_context(engine: EngineConnection, context: int) -> None:
    """Remove the listener of a context, and subtract the context from all counts."""
    engine._listeners.pop(context, None)
    engine._num_inflight_tokens -= engine._inflight_fill_tokens.pop(context, 0)
    if (owner := engine._owners.pop(context, None)) is not None:
        engine.num_contexts_by_owner[owner] -= 1
        if not engine.num_contexts_by_owner[owner]:
            del engine.num_contexts_by_owner[owner]


def _deliver_some(engine: EngineConnection) -> None:
    """Deliver the next reports, and the others in later iterations of the event loop."""
    engine._is_delivery_scheduled = False
    if not engine._alive:
        return
    if not engine._undelivered:
        engine._undelivered.extend(join_tokens(engine._arrived))
        engine._arrived.clear()
    end_s = time.monotonic() + DELIVERY_S
    while engine._undelivered:
        _handle_report(engine, engine._undelivered.popleft())
        if time.monotonic() >= end_s:
            break
    if engine._undelivered or engine._arrived:
        engine._is_delivery_scheduled = True
        asyncio.get_running_loop().call_soon(_deliver_some, engine)
    elif engine.on_steps is not None:
        engine.on_steps()


def _handle_report(engine: EngineConnection, report: protocol.Report) -> None:
    match report:
        case protocol.Tokens():
            _deliver(engine, report.context, report)
        case protocol.Finished() if report.context in engine._aborting:
            # The output ended before the abort, which finds no output.
            ended = protocol.Aborted(report.context, report.num_decoded, report.num_forced)
            engine._aborting.pop(report.context)(ended)
        case protocol.Aborted():
            on_aborted = engine._aborting.pop(report.context, None)
            if on_aborted is not None:
                on_aborted(report)
        case protocol.Pong():
            engine.answered_at = time.monotonic()
            _resolve(engine._replies.pongs, report.nonce, report)
        case protocol.StatusReport():
            _resolve(engine._replies.statuses, report.nonce, report)
        case protocol.Checked():
            _resolve(engine._replies.checks, report.nonce, report)
        case _:
            engine._num_inflight_tokens -= engine._inflight_fill_tokens.pop(report.context, 0)
            _deliver(engine, report.context, report)


def _deliver(engine: EngineConnection, context: int, report: protocol.Report) -> None:
    """Call the listener of a context. If it raises, its call fails as if the engine had failed it;
    the rest of the frame belongs to other calls.
    """
    listener = engine._listeners.get(context)
    if listener is None:
        return
    try:
        listener(report)
    except Exception:
        logger.exception("%s: the listener of context %d failed", engine.name, context)
        try:
            listener(protocol.Failed(context, "server.internal", "internal server error"))
        except Exception:
            logger.exception("%s: cannot fail the call of context %d", engine.name, context)
            engine.free(context)


async def _wait_for_pong(pong: asyncio.Future[protocol.Pong], hang_s: float) -> bool:
    """Return whether a pong arrives in time.

    The wait is divided into intervals. If one takes more than twice its time, this server was
    stopped or short of memory itself; the engine may have been, too, and gets its full time
    again.
    """
    interval_s = hang_s / NUM_PONG_WAITS
    now = asyncio.get_running_loop().time
    num_left = NUM_PONG_WAITS
    while num_left:
        started_s = now()
        await asyncio.wait([pong], timeout=interval_s)
        if pong.done():
            return pong.exception() is None
        was_stopped = now() - started_s > 2 * interval_s
        num_left = NUM_PONG_WAITS if was_stopped else num_left - 1
    return False


async def _watch_heartbeat(engine: EngineConnection) -> None:
    """Detect a process that is stopped. A process in a long step still sends heartbeats."""
    assert engine._process is not None
    await engine._heartbeat.wait_frozen(engine._process.pid, engine._freeze_s)
    engine._mark_lost(f"{engine.name} sent no heartbeat for {engine._freeze_s:g} s")


async def _read_stderr(engine: EngineConnection) -> None:
    """Log what the engine writes. A line of any length is read, or the engine would block."""
    process = engine._process
    assert process is not None and process.stderr is not None
    rest = b""
    while chunk := await process.stderr.read(STDERR_CHUNK_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > STDERR_CHUNK_BYTES:
            lines.append(rest)
            rest = b""
        for raw in lines:
            _log_line(engine, raw)
    _log_line(engine, rest)


def _log_line(engine: EngineConnection, raw: bytes) -> None:
    line = raw[:MAX_LINE_BYTES].decode(errors="replace").rstrip()
    if line:
        engine._last_line = line.removeprefix("conure-engine: ")
        logger.info("%s: %s", engine.name, line)


def _kill(engine: EngineConnection) -> None:
    process = engine._process
    if process is not None and process.returncode is None:
        engine._is_killed = True
        # The process may have ended after its return code was last read.
        with contextlib.suppress(ProcessLookupError):
            process.kill()
