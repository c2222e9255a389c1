"""One engine as the server sees it: a child process, a socket, and what it reports.

Knows frames (4-byte big-endian length, then msgpack), the engine's hello, and who waits
for which context. Refuses to know programs and placement: it delivers reports to whoever
listens to a context and says once when the engine is gone.

Kept true: commands leave in the order they were sent, one frame per turn of the event
loop; after `lost` was called no listener hears anything more; a context id is never used
twice in one epoch; a listener that raises ends its own call and nobody else's.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from conure.engine import api

from .command import Command
from .reports import join_tokens

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 256 * 1024 * 1024
PING_EVERY_S = 1.0
HANG_PARTS = 10
"""Parts that the wait for a pong is cut into."""

Listener = Callable[[api.Report], None]


class EngineStartError(Exception):
    """The engine's process ended before it said hello; the message is its own last line."""


@dataclass(slots=True)
class _Waiters:
    """Futures that engine replies resolve, by nonce."""

    pongs: dict[int, asyncio.Future[None]] = field(default_factory=dict)
    statuses: dict[int, asyncio.Future[api.StatusReport]] = field(default_factory=dict)
    checks: dict[int, asyncio.Future[api.Checked]] = field(default_factory=dict)


class Engine(asyncio.Protocol):
    """A connected engine. Made by `start`; ends by `stop`, by dying or by freezing."""

    def __init__(
        self, name: str, epoch: int, lost: Callable[[Engine, str], None], hang_s: float
    ) -> None:
        self.name = name
        self.epoch = epoch
        self.num_free = 0
        self.num_cached = 0
        self.num_steps = 0
        """Made so far, as last reported."""
        self.answered_at = time.monotonic()
        self._hang_s = hang_s
        self._lost = lost
        self._alive = False
        self._is_closed = False
        self._process: asyncio.subprocess.Process | None = None
        self._transport: asyncio.Transport | None = None
        self._hello: asyncio.Future[api.Hello] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []
        self._buffer = bytearray()
        self._outgoing: list[api.Command] = []
        self._promised: dict[int, int] = {}
        """Tokens of fills that the engine has not reported on, by context: its own counts may not
        know of them yet."""
        self._num_promised = 0
        self._listeners: dict[int, Listener] = {}
        self._owners: dict[int, str] = {}
        self._num_owned: Counter[str] = Counter()
        self._context_ids = itertools.count(1)
        self._nonces = itertools.count(1)
        self._waiters = _Waiters()
        self._last_line = ""
        self._encoder = msgspec.msgpack.Encoder()
        self._hello_decoder = msgspec.msgpack.Decoder(api.Hello)
        self._step_decoder = msgspec.msgpack.Decoder(api.Step)

    @classmethod
    async def start(
        cls,
        name: str,
        epoch: int,
        command: Command,
        *,
        lost: Callable[[Engine, str], None],
        start_s: float,
        hang_s: float,
    ) -> Engine:
        """Start the process and wait for its hello.

        Raises:
            EngineStartError: if it ends, or stays silent for `start_s` seconds, before that.
        """
        engine = cls(name, epoch, lost, hang_s)
        ours, theirs = socket.socketpair()
        with theirs:
            engine._process = await asyncio.create_subprocess_exec(
                *command.argv(theirs.fileno(), epoch),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                # A signal to the server's group is the server's business: it drains first.
                start_new_session=True,
            )
        engine._tasks.append(asyncio.create_task(engine._read_stderr()))
        ours.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: engine, sock=ours)
        try:
            await asyncio.wait_for(asyncio.shield(engine._hello), start_s)
            if engine._is_closed:
                raise ConnectionError("closed after hello")
        except (TimeoutError, ConnectionError) as error:
            await engine.stop()
            reason = engine._last_line or f"{name} did not answer within {start_s:g} s"
            raise EngineStartError(reason) from error
        except asyncio.CancelledError:
            await engine.stop()  # nobody else knows of the process
            raise
        engine._alive = True
        engine.answered_at = time.monotonic()
        engine._tasks.append(asyncio.create_task(engine._watch()))
        return engine

    @property
    def hello(self) -> api.Hello:
        """What the engine said of itself. Only after `start`."""
        return self._hello.result()

    @property
    def is_alive(self) -> bool:
        """Whether commands still reach it."""
        return self._alive

    @property
    def num_available(self) -> int:
        """Blocks that nobody holds, as the engine last said, and that nothing on its way to it will
        take.
        """
        num_promised = -(-self._num_promised // self.hello.limits.block_size)
        return self.num_free + self.num_cached - num_promised

    @property
    def is_crowded(self) -> bool:
        """Whether more than half of its blocks are held, so that it may have to evict soon."""
        return 2 * self.num_available < self.hello.limits.num_blocks

    def new_context(self, listener: Listener, owner: str) -> int:
        """Allocate a context id whose reports go to `listener`; `owner` names its program."""
        context = next(self._context_ids)
        self._listeners[context] = listener
        self._owners[context] = owner
        self._num_owned[owner] += 1
        return context

    def num_contexts(self, owner: str) -> int:
        """Contexts of this owner that were allocated and not given up."""
        return self._num_owned.get(owner, 0)

    def send(self, *commands: api.Command) -> None:
        """Queue commands for the frame that leaves at the end of this turn of the loop.

        Sending to an engine that is gone is safe and does nothing: `lost` tells its callers.
        """
        if not self._alive:
            return
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.extend(commands)
        for command in commands:
            if isinstance(command, api.Fill):
                num_tokens = len(command.tokens)
                self._promised[command.context] = (
                    self._promised.get(command.context, 0) + num_tokens
                )
                self._num_promised += num_tokens

    def free(self, context: int, keep: int = 0) -> None:
        """Stop listening to a context and give it up; its first `keep` tokens stay cached."""
        self._listeners.pop(context, None)
        self._num_promised -= self._promised.pop(context, 0)
        if (owner := self._owners.pop(context, None)) is not None:
            self._num_owned[owner] -= 1
            if not self._num_owned[owner]:
                del self._num_owned[owner]
        self.send(api.Free(context, keep))

    async def status(self) -> api.StatusReport:
        """Ask what the engine holds.

        Raises:
            ConnectionError: if the engine is lost before it answers.
        """
        nonce = next(self._nonces)
        future: asyncio.Future[api.StatusReport] = asyncio.get_running_loop().create_future()
        self._waiters.statuses[nonce] = future
        self.send(api.Status(nonce))
        if not self._alive:
            raise ConnectionError(f"{self.name} is gone")
        return await future

    async def check(self, constraint: str, text: str | None = None) -> api.Checked:
        """Ask whether a constraint can be kept, and whether a text keeps it.

        Raises:
            ConnectionError: if the engine is lost before it answers.
        """
        nonce = next(self._nonces)
        future: asyncio.Future[api.Checked] = asyncio.get_running_loop().create_future()
        self._waiters.checks[nonce] = future
        self.send(api.Check(nonce, constraint, text))
        if not self._alive:
            raise ConnectionError(f"{self.name} is gone")
        return await future

    async def stop(self) -> None:
        """End the process; safe to call twice. Nobody's `lost` is called for it."""
        self._alive = False
        if self._transport is not None:
            self._transport.close()
        process = self._process
        if process is not None and process.returncode is None:
            try:
                await asyncio.wait_for(process.wait(), 2)
            except TimeoutError:
                process.kill()
                await process.wait()
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()
        await asyncio.gather(*(t for t in self._tasks if t is not current), return_exceptions=True)

    # --- the socket -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember the transport (asyncio's callback)."""
        # Not an isinstance check: uvloop's transports are no subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Cut frames out of the stream (asyncio's callback)."""
        buffer = self._buffer
        buffer += data
        start = 0
        steps: list[api.Step] = []
        while len(buffer) - start >= 4:
            size = int.from_bytes(buffer[start : start + 4], "big")
            if size > MAX_FRAME_BYTES:
                self._die(f"{self.name} sent a frame of {size} bytes")
                return
            if len(buffer) - start - 4 < size:
                break
            frame = bytes(buffer[start + 4 : start + 4 + size])
            start += 4 + size
            try:
                if not self._hello.done():
                    self._greet(self._hello_decoder.decode(frame))
                else:
                    steps.append(self._step_decoder.decode(frame))
            except msgspec.DecodeError as error:
                self._die(f"{self.name} sent a frame that cannot be read: {error}")
                return
        del buffer[:start]
        self._take([step for step in steps if step.epoch == self.epoch])

    def connection_lost(self, exc: Exception | None) -> None:
        """The process is gone, or we closed (asyncio's callback)."""
        self._is_closed = True
        if not self._hello.done():
            self._hello.set_exception(ConnectionError("closed before hello"))
            self._hello.exception()
        self._die(f"{self.name} closed its connection")

    def _greet(self, hello: api.Hello) -> None:
        if hello.protocol != api.PROTOCOL_VERSION:
            self._hello.set_exception(
                ConnectionError(f"{self.name} speaks protocol {hello.protocol}")
            )
            return
        self._hello.set_result(hello)
        self.num_free = hello.limits.num_blocks

    def _take(self, steps: list[api.Step]) -> None:
        """Tell what came, all at once where the loop was late."""
        for step in steps:
            self.num_free = step.num_free
            self.num_cached = step.num_cached
            self.num_steps = step.number
        for report in join_tokens([step.reports for step in steps]):
            match report:
                case api.Tokens():
                    self._deliver(report.context, report)
                case api.Pong():
                    self.answered_at = time.monotonic()
                    if (pong := self._waiters.pongs.pop(report.nonce, None)) and not pong.done():
                        pong.set_result(None)
                case api.StatusReport():
                    status = self._waiters.statuses.pop(report.nonce, None)
                    if status is not None and not status.done():
                        status.set_result(report)
                case api.Checked():
                    check = self._waiters.checks.pop(report.nonce, None)
                    if check is not None and not check.done():
                        check.set_result(report)
                case _:
                    self._num_promised -= self._promised.pop(report.context, 0)
                    self._deliver(report.context, report)

    def _deliver(self, context: int, report: api.Report) -> None:
        """Tell whoever listens. What a listener does not survive ends its own call, as if the
        engine had failed it: the engine is everybody's, and the frame has more in it.
        """
        listener = self._listeners.get(context)
        if listener is None:
            return
        try:
            listener(report)
        except Exception:
            logger.exception("%s: a report on context %d broke its listener", self.name, context)
            try:
                listener(api.Failed(context, "server.internal", "the server made a mistake"))
            except Exception:
                logger.exception("%s: context %d cannot even fail", self.name, context)
                self.free(context)

    def _flush(self) -> None:
        commands, self._outgoing = self._outgoing, []
        if not self._alive or self._transport is None:
            return
        frame = self._encoder.encode(api.Commands(commands))
        self._transport.write(len(frame).to_bytes(4, "big") + frame)

    # --- life and death -------------------------------------------------------------------

    async def _watch(self) -> None:
        """A frozen engine keeps its socket open; only a pong from its own loop counts as life."""
        while self._alive:
            nonce = next(self._nonces)
            pong: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.pongs[nonce] = pong
            self.send(api.Ping(nonce))
            if not await self._answers(pong):
                self._die(f"{self.name} did not answer a ping for {self._hang_s:g} s")
                return
            await asyncio.sleep(PING_EVERY_S)

    async def _answers(self, pong: asyncio.Future[None]) -> bool:
        """Whether a pong comes in time.

        Waited for in parts: where the server itself stood still in one, stopped or out of
        memory, the engine may have as well, and its time begins anew.
        """
        part_s = self._hang_s / HANG_PARTS
        now = asyncio.get_running_loop().time
        num_left = HANG_PARTS
        while num_left:
            began_s = now()
            await asyncio.wait([pong], timeout=part_s)
            if pong.done():
                return pong.exception() is None
            num_left = HANG_PARTS if now() - began_s > 2 * part_s else num_left - 1
        return False

    def _die(self, reason: str) -> None:
        if self._transport is not None:
            self._transport.abort()
        if not self._alive:
            return
        self._alive = False
        process = self._process
        if process is not None and process.returncode is None:
            # A frozen process would hold its memory for ever; a dead one does not mind.
            process.send_signal(signal.SIGKILL)
        self._listeners.clear()
        self._owners.clear()
        self._num_owned.clear()
        error = ConnectionError(reason)
        waiting: Sequence[asyncio.Future[Any]] = [
            *self._waiters.pongs.values(),
            *self._waiters.statuses.values(),
            *self._waiters.checks.values(),
        ]
        for future in waiting:
            if not future.done():
                future.set_exception(error)
                future.exception()  # a watcher may be gone already
        logger.warning("engine lost: %s", reason)
        self._lost(self, reason)

    async def _read_stderr(self) -> None:
        process = self._process
        assert process is not None and process.stderr is not None
        async for raw in process.stderr:
            line = raw.decode(errors="replace").rstrip()
            if line:
                self._last_line = line.removeprefix("conure-engine: ")
                logger.info("%s: %s", self.name, line)
