"""Runs random programs on a server that is killed again and again, and checks its promises.

Speaks HTTP alone. Every program has a client that submits it under an idempotency key, follows
its events over as many connections as it takes, and answers its client steps, each answer a
fresh one, so that asking twice would show. A prober reads values and statuses in between.
Whatever anybody hears goes into one ledger.

    async with Server(folder, arguments=...) as server:
        report = await Chaos(server, seed=1).run(num_kills=20)
"""

from __future__ import annotations

import asyncio
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

from .ledger import Heard, Ledger, ViolationError
from .programs import RandomProgram, random_program

Json = Any

READY_S = 30.0
HANG_S = 25.0
"""An answer, or a sign of life on a stream of events, must come within this."""
END_S = 60.0
"""After the last start all programs must have ended within this."""


class Server:
    """One data folder and port, and the server process that uses them at the moment."""

    def __init__(self, folder: Path, *, arguments: Callable[[int], Sequence[str]]) -> None:
        """Args: `arguments` gives the command line of the n-th life, beside data and port."""
        self.is_up = asyncio.Event()
        self.num_lives = 0
        self._folder = folder
        self._arguments = arguments
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port: int = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: asyncio.subprocess.Process | None = None

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

    async def spawn(self) -> None:
        """Start a process; it is not ready yet."""
        command = ["-m", "conure.server.cli", "serve", *self._arguments(self.num_lives)]
        command += ["--port", str(self._port), "--data", str(self._folder / "data")]
        self.num_lives += 1
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, *command, stdout=log, stderr=log, start_new_session=True
            )

    async def wait_ready(self) -> None:
        """Wait until the process says that it can serve."""
        assert self._process is not None
        deadline = time.monotonic() + READY_S
        async with httpx.AsyncClient(base_url=self.url, timeout=READY_S) as http:
            while time.monotonic() < deadline:
                if self._process.returncode is not None:
                    raise ViolationError(f"the server did not start: {self.last_words()}")
                try:
                    if (await http.get("/readyz")).status_code == 200:
                        self.is_up.set()
                        return
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.02)
        raise ViolationError(f"the server is not ready after {READY_S} s: {self.last_words()}")

    async def kill(self) -> None:
        """Kill (-9) the process and all that it started in its group; safe when it is dead."""
        self.is_up.clear()
        if self._process is None:
            return
        process, self._process = self._process, None
        if process.returncode is not None:
            raise ViolationError(f"the server had ended by itself: {self.last_words()}")
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        if "Traceback" in self._log.read_text("utf-8", "replace"):
            raise ViolationError(f"the server stumbled: {self.last_words()}")

    def last_words(self) -> str:
        """What the latest process printed: its first traceback, else the end."""
        said = self._log.read_text("utf-8", "replace")
        trouble = said.find("Traceback")
        return said[-4_000:] if trouble < 0 else said[max(0, trouble - 500) : trouble + 3_500]

    @property
    def _log(self) -> Path:
        return self._folder / f"life-{self.num_lives}.log"


@dataclass(slots=True)
class Report:
    """What a run was made of, so that a test can see that it tested something."""

    num_programs: int = 0
    num_nodes: int = 0
    num_values: int = 0
    num_client_steps: int = 0
    num_kills: int = 0
    num_kills_under_load: int = 0
    """Kills while programs were accepted and had not ended."""
    num_survivors: int = 0
    """Programs that lived through at least one kill."""
    num_calls_run_again: int = 0
    num_replays: int = 0
    """Submissions that were repeated because their answer was lost, or to try."""


class Chaos:
    """The clients of all programs, and who kills the server under them."""

    def __init__(self, server: Server, *, seed: int, num_at_once: int = 10) -> None:
        self.ledger = Ledger()
        self.report = Report()
        self._server = server
        self._seed = seed
        self._num_at_once = num_at_once
        self._keeps_submitting = True
        self._running: set[str] = set()
        self._survivors: set[str] = set()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(base_url=server.url, timeout=HANG_S, limits=limits)

    async def run(self, *, num_kills: int) -> Report:
        """Kill the server so often, let everything end, and check it all.

        Raises:
            ViolationError: in an ExceptionGroup, if a promise was broken.
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
        for _ in range(num_kills):
            await self._server.spawn()
            if source.random() < 0.2:
                # Somewhere between its first breath and the end of its recovery.
                await asyncio.sleep(source.uniform(0.0, 1.5))
            else:
                await self._server.wait_ready()
                await asyncio.sleep(source.uniform(0.02, 0.8))
            self.report.num_kills += 1
            self.report.num_kills_under_load += bool(self._running)
            self._survivors |= self._running
            await self._server.kill()
        await self._server.spawn()
        await self._server.wait_ready()

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
        response = await self._ask(
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
        response = await self._ask(
            "PUT",
            f"/v1/programs/{id_}/variables/{name}",
            json={"value": answer, "request_id": event.data["request_id"]},
        )
        if response.status_code != 200:
            status = (await self._ask("GET", f"/v1/programs/{id_}")).text
            raise ViolationError(
                f"{id_}: the answer {answer!r} to {event} got {response.text}; it is {status}"
            )
        self.ledger.heard_value(id_, name, answer)

    async def _events(self, id_: str) -> AsyncIterator[Heard]:
        """The journaled events of a program up to its end, over as many connections as needed."""
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
                    async for event in _read_events(response.aiter_lines()):
                        if event.seq <= last:
                            raise ViolationError(f"{id_}: {event} after number {last}")
                        last = event.seq
                        yield event
                        if event.type == "program.finished":
                            return
            except httpx.ReadTimeout as error:
                raise ViolationError(f"{id_}: the events stand still after {last}") from error
            except httpx.TransportError:
                await asyncio.sleep(0.02)

    async def _probe(self) -> None:
        """Read at random what clients do not: statuses, and values by their own path."""
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
            response = await self._ask("GET", f"/v1/programs/{id_}")
            _expect(response, id_, 200)
            self.ledger.heard_status(id_, response.json(), known=known)
            return
        name = source.choice(source.choice(list(self.ledger.programs[id_].variables.values())))
        response = await self._ask(
            "GET",
            f"/v1/programs/{id_}/variables/{name}",
            params={"wait_s": source.choice((0, 0, 0.2))},
        )
        _expect(response, id_, 200, 202)
        if response.status_code == 200:
            self.ledger.heard_value(id_, name, response.json()["value"])
        elif name in known:
            raise ViolationError(f"{id_}: {name} had a value and has none now: {response.text}")

    async def _ask(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        """Ask until there is an answer: servers die, and full ones say when to come again."""
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
                raise ViolationError(f"{method} {path}: not now, but when? {response.text}")
            await asyncio.sleep(0.05)

    # --- the end ------------------------------------------------------------------------

    async def _check_everything(self) -> None:
        """Read every accepted program from the first event on."""
        report = self.report
        for id_, program in self.ledger.programs.items():
            response = await self._ask("GET", f"/v1/programs/{id_}")
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


def _expect(response: httpx.Response, id_: str, *codes: int) -> None:
    if response.status_code not in codes:
        raise ViolationError(f"{id_}: {response.request.url} got {response.text}")


async def _read_events(lines: AsyncIterator[str]) -> AsyncIterator[Heard]:
    """The journaled events of a stream; transient ones have no id and are skipped."""
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
