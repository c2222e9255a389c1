"""Runs random programs on a server that is repeatedly killed, and checks its guarantees.

Uses HTTP only. Every program has a client that submits it under an idempotency key, follows its
events over as many connections as necessary, and answers its client steps. Each answer is new, so
a repeated request is detected. A prober reads values and statuses in between. All responses are
recorded in one ledger.

    async with Server(folder, arguments=...) as server:
        report = await Chaos(server, seed=1).run(num_kills=20)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import msgspec

from . import crash_points
from .ledger import Heard, Ledger, ViolationError
from .programs import RandomProgram, random_program

Json = Any

READY_S = 60.0
HANG_S = 60.0
"""Limit for a response, or for the next data of an event stream."""
END_S = 180.0
"""Limit for the end of all programs after the last start."""


class Server:
    """A data folder and port, and the server process that currently uses them."""

    def __init__(self, folder: Path, *, arguments: Callable[[int], Sequence[str]]) -> None:
        """Args: `arguments` returns additional arguments for the n-th process."""
        self.is_up = asyncio.Event()
        self.num_starts = 0
        self._folder = folder
        self._arguments = arguments
        self._port = _unused_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: asyncio.subprocess.Process | None = None
        self._is_aimed = False

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self.kill()
        except ViolationError:
            if error is None:
                raise

    async def spawn(self, aim: tuple[str, int] | None = None) -> None:
        """Start a process; it is not ready yet.

        `aim`: a point of `crash_points`, and the number of the call at which the process kills
        itself.
        """
        self._is_aimed = aim is not None
        command = ["-m", "conure.cli.main"]
        if aim is not None:
            command = ["-m", crash_points.__name__, aim[0], str(aim[1])]
        command += ["serve", *self._arguments(self.num_starts)]
        command += ["--port", str(self._port), "--data", str(self._folder / "data")]
        self.num_starts += 1
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, *command, stdout=log, stderr=log, start_new_session=True
            )

    async def wait_ready(self) -> None:
        """Wait until the process reports that it is ready."""
        assert self._process is not None
        process, deadline = self._process, time.monotonic() + READY_S
        async with httpx.AsyncClient(base_url=self.url, timeout=READY_S) as http:
            while time.monotonic() < deadline:
                if process.returncode is not None:
                    if self._is_aimed and process.returncode == -signal.SIGKILL:
                        return
                    raise ViolationError(f"the server did not start: {self.log_excerpt()}")
                try:
                    if (await http.get("/readyz")).status_code == 200:
                        self.is_up.set()
                        return
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.02)
        raise ViolationError(f"the server is not ready after {READY_S} s: {self.log_excerpt()}")

    async def kill(self) -> None:
        """Kill (-9) the process and its process group; safe when it is dead."""
        self.is_up.clear()
        if self._process is None:
            return
        process, self._process = self._process, None
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has just crashed where it was aimed
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        elif not self._is_aimed or process.returncode != -signal.SIGKILL:
            raise ViolationError(f"the server had ended by itself: {self.log_excerpt()}")
        if "Traceback" in self._log.read_text("utf-8", "replace"):
            raise ViolationError(f"the server logged a traceback: {self.log_excerpt()}")

    async def wait_dead(self, seconds: float) -> bool:
        """Wait until an aimed process has killed itself; return whether it has."""
        assert self._process is not None
        try:
            await asyncio.wait_for(self._process.wait(), seconds)
        except TimeoutError:
            return False
        self.is_up.clear()
        return True

    def signal_engine(self, number: signal.Signals, source: random.Random) -> bool:
        """Send a signal to one of the engines; return whether there was one."""
        if self._process is None or self._process.returncode is not None:
            return False
        task = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        try:
            children = [int(each) for each in task.read_text("ascii").split()]
            engines = [
                each
                for each in children
                if b"conure.engine" in Path(f"/proc/{each}/cmdline").read_bytes()
            ]
            if engines:
                os.kill(source.choice(sorted(engines)), number)
        except OSError:  # it ended meanwhile
            return False
        return bool(engines)

    def log_excerpt(self) -> str:
        """Return the first traceback of the latest process, or the end of its output."""
        log_text = self._log.read_text("utf-8", "replace")
        trouble = log_text.find("Traceback")
        return (
            log_text[-4_000:] if trouble < 0 else log_text[max(0, trouble - 500) : trouble + 3_500]
        )

    @property
    def _log(self) -> Path:
        return self._folder / f"life-{self.num_starts}.log"


@dataclass(slots=True)
class Report:
    """Counts of a run, so that a test can check that it exercised something."""

    num_programs: int = 0
    num_nodes: int = 0
    num_values: int = 0
    num_client_steps: int = 0
    num_kills: int = 0
    num_kills_under_load: int = 0
    """Kills while programs were accepted and had not ended."""
    num_engine_kills: int = 0
    num_engine_freezes: int = 0
    num_aimed_kills: int = 0
    num_survivors: int = 0
    """Programs that lived through at least one kill."""
    num_calls_run_again: int = 0
    num_replays: int = 0
    """Submissions that were repeated because their answer was lost, or to try."""


class Chaos:
    """The clients of all programs, and the task that kills the server."""

    def __init__(
        self, server: Server, *, seed: int, num_at_once: int = 10, has_aimed_kills: bool = False
    ) -> None:
        """Args: `has_aimed_kills` also kills and stops engines, and aims at crash points."""
        self.ledger = Ledger()
        self.report = Report()
        self._server = server
        self._seed = seed
        self._num_at_once = num_at_once
        self._has_aimed_kills = has_aimed_kills
        self._keeps_submitting = True
        self._running: set[str] = set()
        self._survivors: set[str] = set()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(base_url=server.url, timeout=HANG_S, limits=limits)

    async def run(self, *, num_kills: int) -> Report:
        """Kill the server `num_kills` times, let all programs end, and check them.

        Raises:
            ViolationError: in an ExceptionGroup, if a guarantee was violated.
        """
        async with self._http:
            async with asyncio.TaskGroup() as tasks:
                prober = tasks.create_task(self._probe())
                clients = [
                    tasks.create_task(self._submit_for_ever(i)) for i in range(self._num_at_once)
                ]
                await self._kill_often(num_kills)
                self._keeps_submitting = False
                _, stuck = await asyncio.wait(clients, timeout=END_S)
                if stuck:
                    raise ViolationError(
                        f"after {END_S} s still not ended: {sorted(self._running)}"
                    )
                prober.cancel()
            await self._check_everything()
        return self.report

    # --- killing ------------------------------------------------------------------------

    async def _kill_often(self, num_kills: int) -> None:
        source = random.Random(f"{self._seed}/kill")
        while self.report.num_kills < num_kills:
            if self._has_aimed_kills and source.random() < 0.6:
                await self._kill_aimed(source)
                continue
            await self._server.spawn()
            if source.random() < 0.2:
                # During its start or its recovery.
                await asyncio.sleep(source.uniform(0.0, 1.5))
            else:
                await self._server.wait_ready()
                await asyncio.sleep(source.uniform(0.02, 0.8))
            await self._kill_server()
        await self._server.spawn()
        await self._server.wait_ready()

    async def _kill_aimed(self, source: random.Random) -> None:
        """Kill or stop engines of one server process, or let it crash at an aimed point."""
        report = self.report
        if source.random() < 0.5:
            await self._server.spawn()
            await self._server.wait_ready()
            for _ in range(source.randint(1, 4)):
                await asyncio.sleep(source.uniform(0.02, 0.6))
                is_freeze = source.random() < 0.2
                number = signal.SIGSTOP if is_freeze else signal.SIGKILL
                if self._server.signal_engine(number, source):
                    report.num_engine_freezes += is_freeze
                    report.num_engine_kills += not is_freeze
            await asyncio.sleep(source.uniform(0.1, 1.0))
        else:
            point = source.choice(sorted(crash_points.POINTS))
            await self._server.spawn((point, source.choice((1, 2, 5, 20, 100))))
            await self._server.wait_ready()
            is_dead = await self._server.wait_dead(source.uniform(0.2, 2.0))
            report.num_aimed_kills += is_dead
        await self._kill_server()

    async def _kill_server(self) -> None:
        self.report.num_kills += 1
        self.report.num_kills_under_load += bool(self._running)
        self._survivors |= self._running
        await self._server.kill()

    # --- clients ------------------------------------------------------------------------

    async def _submit_for_ever(self, client: int) -> None:
        number = 0
        while self._keeps_submitting:
            await self._run_program(random.Random(f"{self._seed}/{client}/{number}"))
            number += 1

    async def _run_program(self, source: random.Random) -> None:
        program = random_program(source)
        key = f"key-{source.getrandbits(64):x}"
        id_ = await self._submit(program, key)
        self.ledger.accepted(id_, program)
        self._running.add(id_)
        async with asyncio.TaskGroup() as tasks:
            await self._follow(id_, source, tasks)
            if source.random() < 0.2:
                await self._submit_again(id_, program, key)
        self._running.discard(id_)

    async def _submit(self, program: RandomProgram, key: str) -> str:
        response = await self._send_request(
            "POST",
            "/v1/programs",
            content=msgspec.json.encode(program.submission),
            headers={"Content-Type": "application/json", "Idempotency-Key": key},
        )
        self.report.num_replays += "Idempotent-Replay" in response.headers
        if response.status_code not in (200, 202):
            raise ViolationError(f"refused {response.text}: {program.submission}")
        accepted = response.json()
        if accepted["outputs"] != program.submission["program"]["outputs"]:
            raise ViolationError(f"the outputs of {accepted} are not those of {program.submission}")
        id_: str = accepted["id"]
        return id_

    async def _submit_again(self, id_: str, program: RandomProgram, key: str) -> None:
        again = await self._submit(program, key)
        if again != id_:
            raise ViolationError(f"one key made two programs, {id_} and {again}")

    async def _follow(self, id_: str, source: random.Random, tasks: asyncio.TaskGroup) -> None:
        """Read the events of a program to its end and answer its client steps."""
        answered: set[str] = set()
        async for event in self._events(id_):
            self.ledger.heard_event(id_, event)
            if event.type == "client.requested" and event.data["node"] not in answered:
                answered.add(event.data["node"])
                answer = f"answer {source.getrandbits(32):x}"
                tasks.create_task(self._answer(id_, event, answer))

    async def _answer(self, id_: str, event: Heard, answer: str) -> None:
        name = event.data["output"]
        response = await self._send_request(
            "PUT",
            f"/v1/programs/{id_}/variables/{name}",
            json={"value": answer, "request_id": event.data["request_id"]},
        )
        if response.status_code != 200:
            status = (await self._send_request("GET", f"/v1/programs/{id_}")).text
            raise ViolationError(
                f"{id_}: the answer {answer!r} to {event} got {response.text}; it is {status}"
            )
        self.ledger.heard_value(id_, name, answer)

    async def _events(self, id_: str) -> AsyncIterator[Heard]:
        """Iterate over the journaled events of a program, over as many connections as necessary."""
        last = 0
        while True:
            await self._server.is_up.wait()
            try:
                async with self._http.stream(
                    "GET", f"/v1/programs/{id_}/events", headers={"Last-Event-ID": str(last)}
                ) as response:
                    if response.status_code in (429, 503):
                        await asyncio.sleep(0.05)
                        continue
                    if response.status_code != 200:
                        await response.aread()
                        raise ViolationError(f"{id_}: no events: {response.text}")
                    async for event in read_events(response.aiter_lines()):
                        if event.seq <= last:
                            raise ViolationError(f"{id_}: {event} after number {last}")
                        last = event.seq
                        yield event
                        if event.type == "program.finished":
                            return
            except httpx.ReadTimeout as error:
                raise ViolationError(f"{id_}: no event for {HANG_S} s after {last}") from error
            except httpx.TransportError:
                await asyncio.sleep(0.02)

    async def _probe(self) -> None:
        """Read random statuses and values."""
        source = random.Random(f"{self._seed}/probe")
        while True:
            await asyncio.sleep(0.01)
            if not self.ledger.programs:
                continue
            await self._probe_one(source)

    async def _probe_one(self, source: random.Random) -> None:
        id_ = source.choice(list(self.ledger.programs)[-3 * self._num_at_once :])
        known = self.ledger.known(id_)
        if source.random() < 0.5:
            response = await self._send_request("GET", f"/v1/programs/{id_}")
            _expect(response, id_, 200)
            self.ledger.heard_status(id_, response.json(), known=known)
            return
        name = source.choice(source.choice(list(self.ledger.programs[id_].variables.values())))
        response = await self._send_request(
            "GET",
            f"/v1/programs/{id_}/variables/{name}",
            params={"wait_s": source.choice((0, 0, 0.2))},
        )
        _expect(response, id_, 200, 202)
        if response.status_code == 200:
            self.ledger.heard_value(id_, name, response.json()["value"])
        elif name in known:
            raise ViolationError(f"{id_}: {name} had a value and has none now: {response.text}")

    async def _send_request(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        """Send a request until it is answered; wait if the server answers 429 or 503."""
        while True:
            await self._server.is_up.wait()
            try:
                response = await self._http.request(method, path, **arguments)
            except httpx.ReadTimeout as error:
                raise ViolationError(f"{method} {path} hangs") from error
            except httpx.TransportError:
                await asyncio.sleep(0.02)
                continue
            if response.status_code not in (429, 503):
                return response
            if "Retry-After" not in response.headers:
                raise ViolationError(f"{method} {path}: no Retry-After: {response.text}")
            await asyncio.sleep(0.05)

    # --- the end ------------------------------------------------------------------------

    async def _check_everything(self) -> None:
        """Read every accepted program from the first event on."""
        report = self.report
        for id_, program in self.ledger.programs.items():
            response = await self._send_request("GET", f"/v1/programs/{id_}")
            _expect(response, id_, 200)
            history = [event async for event in self._events(id_)]
            self.ledger.check_history(id_, history, response.json())
            report.num_nodes += len(program.variables)
            report.num_client_steps += len(program.client_args)
            started = [event.data["node"] for event in history if event.type == "node.started"]
            report.num_calls_run_again += len(
                {node for node in started if started.count(node) > len(program.variables[node])}
            )
        report.num_programs = len(self.ledger.programs)
        report.num_values = len(self.ledger.values)
        report.num_survivors = len(self._survivors)


def _unused_port() -> int:
    """Return a port that stays free while no server listens: not one of an outgoing connection."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text("ascii").split()[0])
    for port in random.SystemRandom().sample(range(lowest // 2, lowest), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ViolationError("no free port among 100")


def _expect(response: httpx.Response, id_: str, *codes: int) -> None:
    if response.status_code not in codes:
        raise ViolationError(f"{id_}: {response.request.url} got {response.text}")


async def read_events(lines: AsyncIterator[str]) -> AsyncIterator[Heard]:
    """Return the journaled events of a stream; transient events have no id and are skipped."""
    fields: dict[str, str] = {}
    async for line in lines:
        if line:
            name, _, content = line.partition(":")
            fields[name] = content.removeprefix(" ")
            continue
        if "id" in fields:
            data = msgspec.json.decode(fields["data"])
            yield Heard(int(fields["id"]), fields["event"], data)
        fields = {}
