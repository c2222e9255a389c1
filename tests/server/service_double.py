"""A scripted Service for tests, and ways to serve it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from pathlib import Path
from typing import Any

import httpx
import msgspec
import uvicorn
from litestar import Litestar

from conure.engine.protocol import StatusReport
from conure.server.app import create_app
from conure.server.config import Config
from conure.server.language.submission import SourceCompiler
from conure.server.program.errors import ConflictError, ConureError, NotFoundError
from conure.server.program.functions import FunctionSignature
from conure.server.program.ir import (
    Append,
    ClientNode,
    Constraint,
    ExprNode,
    GenerateNode,
    Objective,
    SourceSubmission,
    Submission,
)
from conure.server.program.status import (
    ENDED,
    Accepted,
    Event,
    NodeStatus,
    OutputTokens,
    Problem,
    ProgramPage,
    ProgramStatus,
    ProgramSummary,
    PromptTokens,
    PutValue,
    UsageReport,
    VariableStatus,
)
from conure.server.runtime.reporting.activity import ServerActivity
from conure.server.runtime.reporting.request_times import CallCounts, RequestTimeMeter
from conure.server.service import (
    EmbeddingService,
    EngineInfo,
    ExplanationService,
    GrammarInfo,
    ModelInfo,
    ProcedureService,
    Readiness,
    TokenizedPrompt,
    TraceService,
)


class ScriptedProgram:
    """A program whose events a test scripts."""

    def __init__(self, id_: str, submission: Submission) -> None:
        self.id = id_
        self.submission = submission
        self.is_open = submission.open
        self.status: str = "accepted"
        self.nodes: dict[str, NodeStatus] = {}
        self.variables: dict[str, VariableStatus] = {}
        self.events: list[Event] = []
        self.num_readers = 0
        self.num_waiters = 0
        self._seq = 0
        self._changed = asyncio.Event()

    def add(self, names: list[str]) -> None:
        for name in names:
            self.variables[name] = VariableStatus(name=name, status="waiting")

    def emit(self, type_: Any, *, is_journaled: bool = True, **data: Any) -> None:
        seq = None
        if is_journaled:
            self._seq += 1
            seq = self._seq
        self.events.append(Event(seq, type_, {"program": self.id, "seq": seq, **data}))
        self._wake()

    def delta(self, variable: str, text: str, *, offset: int, attempt: int = 1) -> None:
        self.emit(
            "node.delta",
            is_journaled=False,
            variable=variable,
            text=text,
            offset=offset,
            attempt=attempt,
        )

    def commit(self, variable: str, value: Any) -> None:
        self.variables[variable] = VariableStatus(name=variable, status="done", value=value)
        self.emit("variable.committed", variable=variable, value=value)

    def fail(self, variable: str, phase: Any, code: str, message: str = "") -> None:
        problem = Problem(code=code, message=message)
        self.variables[variable] = VariableStatus(name=variable, status=phase, error=problem)
        self._wake()

    def finish(self, status: str = "done") -> None:
        self.status = status
        self.emit("program.finished", status=status)

    def set_usage(self, node: str, *, prompt: int, shared: int, output: int) -> None:
        self.nodes[node] = NodeStatus(
            status="done",
            prompt_tokens=PromptTokens(logical=prompt, computed=prompt - shared, shared=shared),
            output_tokens=OutputTokens(decoded=output),
        )

    async def changed(self) -> None:
        await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def snapshot(self) -> ProgramStatus:
        status: Any = self.status
        return ProgramStatus(
            id=self.id,
            name=self.submission.program.name,
            status=status,
            created_at="2026-01-01T00:00:00Z",
            outputs=list(self.submission.program.outputs),
            variables=dict(self.variables),
            nodes=dict(self.nodes),
        )


class ScriptedService:
    """Implements the Service protocol with programs that a test controls."""

    def __init__(self, id_form: str = "p_{}") -> None:
        self.programs: dict[str, ScriptedProgram] = {}
        self.num_nodes = 0
        self.cancelled: list[str] = []
        self.objectives: list[Objective | None] = []
        self.puts: list[tuple[str, PutValue]] = []
        self.appended: list[Append] = []
        self.refusal: Exception | None = None
        self.on_submit: Callable[[ScriptedProgram], None] = lambda program: None
        self.readiness = Readiness(is_ready=True)
        self.life: list[str] = []
        self.request_times = RequestTimeMeter(self.count_calls)
        self.drained = asyncio.Event()
        self._keys: dict[str, ScriptedProgram] = {}
        self._id_form = id_form

    def count_calls(self) -> CallCounts:
        return CallCounts(num_running=0, num_ended=len(self.programs))

    async def start(self) -> None:
        self.life.append("start")
        if self.refusal is not None:
            raise self.refusal

    async def stop(self) -> None:
        self.life.append("stop")

    async def drain(self) -> None:
        self.life.append("drain")
        self.drained.set()

    async def compile(self, source: SourceSubmission) -> tuple[Submission, bytes]:
        return SourceCompiler([]).compile(source)

    async def submit(
        self,
        submission: Submission,
        *,
        body: bytes,
        tenant: str,
        idempotency_key: str | None = None,
    ) -> tuple[Accepted, bool]:
        assert body
        assert tenant == "local"
        if self.refusal is not None:
            raise self.refusal
        known = self._keys.get(idempotency_key or "")
        program = known or ScriptedProgram(self._id_form.format(len(self.programs) + 1), submission)
        self.programs[program.id] = program
        if idempotency_key:
            self._keys[idempotency_key] = program
        if known is None:
            program.add(names_of(submission.program))
            program.emit("program.accepted")
            self.on_submit(program)
        accepted = Accepted(
            id=program.id,
            status="accepted",
            outputs=list(submission.program.outputs),
            url=f"/v1/programs/{program.id}",
        )
        return accepted, known is not None

    async def append(
        self, program: str, append: Append, *, body: bytes, tenant: str, wait_s: float = 0.0
    ) -> ProgramStatus:
        found = self._find(program)
        if not found.is_open:
            raise ConflictError("program.closed", "the program takes no more nodes")
        self.appended.append(append)
        found.add(names_of(append))
        found.is_open = not append.close
        return found.snapshot()

    async def cancel(self, program: str, *, tenant: str) -> None:
        found = self._find(program)
        self.cancelled.append(program)
        if found.status not in ENDED:
            found.finish("cancelled")

    async def erase(self, program: str, *, tenant: str) -> None:
        self._find(program)
        del self.programs[program]

    async def find(self, program: str, *, tenant: str) -> Any:
        return self._find(program).status

    async def find_submitted(self, idempotency_key: str, *, tenant: str) -> str | None:
        known = self._keys.get(idempotency_key)
        return None if known is None else known.id

    @property
    def last_seq(self) -> int:
        return 0  # each scripted program counts its own events

    async def status(
        self, program: str, *, tenant: str, nodes: Sequence[str] | None = None
    ) -> ProgramStatus:
        return self._find(program).snapshot()

    async def status_parts(self, program: str, *, tenant: str) -> Iterator[bytes]:
        return iter([msgspec.json.encode(self._find(program).snapshot())])

    async def list_programs(
        self, *, tenant: str, status: str | None, cursor: int | None, limit: int, search: str = ""
    ) -> ProgramPage:
        listed = [
            ProgramSummary(
                id=found.id, status=found.snapshot().status, created_at="2026-01-01T00:00:00Z"
            )
            for found in reversed(self.programs.values())
            if status in (None, found.status) and search in found.id
        ]
        start = cursor or 0
        rest = listed[start + limit :]
        return ProgramPage(
            programs=listed[start : start + limit], next=str(start + limit) if rest else None
        )

    async def get(
        self,
        program: str,
        variable: str,
        *,
        tenant: str,
        wait_s: float,
        objective: Objective | None = None,
    ) -> VariableStatus:
        found = self._find(program)
        self.objectives.append(objective)
        if variable not in found.variables:
            raise NotFoundError("variable.unknown", f"there is no variable {variable!r}")
        found.num_waiters += 1
        try:
            async with asyncio.timeout(wait_s):
                while found.variables[variable].status not in ENDED:
                    await found.changed()
        except TimeoutError:
            pass
        finally:
            found.num_waiters -= 1
        return found.variables[variable]

    async def put(
        self, program: str, variable: str, body: PutValue, *, tenant: str
    ) -> VariableStatus:
        found = self._find(program)
        if found.variables[variable].status == "done":
            raise ConflictError("variable.committed", "the variable has another value")
        self.puts.append((variable, body))
        found.commit(variable, body.value)
        return found.variables[variable]

    async def events(
        self,
        program: str,
        *,
        tenant: str,
        after: int,
        is_durable: bool = False,
        texts: Collection[str] | None = None,
        follow: bool = True,
    ) -> AsyncGenerator[Event, None]:
        found = self._find(program)
        found.num_readers += 1
        try:
            position = 0
            while True:
                while position < len(found.events):
                    event = found.events[position]
                    position += 1
                    if event.seq is None and is_durable:
                        continue
                    if event.seq is None or event.seq > after:
                        yield event
                        if event.type == "program.finished":
                            return
                if not follow:
                    return
                await found.changed()
        finally:
            found.num_readers -= 1

    @property
    def procedures(self) -> ProcedureService:
        raise NotImplementedError

    @property
    def explainer(self) -> ExplanationService:
        raise NotImplementedError

    @property
    def traces(self) -> TraceService:
        raise NotImplementedError

    @property
    def embedder(self) -> EmbeddingService:
        raise NotImplementedError

    def functions(self) -> list[FunctionSignature]:
        return [FunctionSignature(name="calc", timeout_s=5.0)]

    def models(self) -> list[ModelInfo]:
        return [
            ModelInfo(
                id="tiny",
                aliases=("org/tiny",),
                context_len=4096,
                description="a double",
                created=1_700_000_000,
                purpose="test",
            ),
            ModelInfo(id="org/other", context_len=128),
        ]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode()

    async def check_grammar(self, constraint: Constraint, text: str | None) -> GrammarInfo:
        return GrammarInfo(is_supported=True, matches=None if text is None else text == "yes")

    async def tokenize(
        self,
        model: str,
        prompt: str | list[Any],
        *,
        tools: list[dict[str, Any]],
        bos: bool = False,
        template_options: Mapping[str, Any] | None = None,
    ) -> TokenizedPrompt:
        return TokenizedPrompt(count=2, max_model_len=4096, tokens=[1, 2])

    def activity(self, *, tenant: str) -> ServerActivity:
        return ServerActivity(
            engines=[], waiting=[], num_waiting=0, num_programs=len(self.programs)
        )

    async def engines(self) -> list[EngineInfo]:
        report = StatusReport(0, 10, 4, 5, 1, 2, *range(6))
        return [EngineInfo(id="engine-0", epoch=7, model="tiny", report=report)]

    async def usage(self, *, tenant: str, since: str | None, until: str | None) -> UsageReport:
        ended = [each.status for each in self.programs.values() if each.status in ENDED]
        programs = {status: ended.count(status) for status in ended}
        return UsageReport(since=since, until=until, programs=programs)

    async def metrics(self) -> bytes:
        return b"# TYPE conure_double gauge\nconure_double 1.0\n"

    async def ready(self) -> Readiness:
        return self.readiness

    def _find(self, program: str) -> ScriptedProgram:
        if program not in self.programs:
            raise NotFoundError("program.unknown", f"there is no program {program!r}")
        return self.programs[program]


def names_of(graph: Any) -> list[str]:
    """Return the names of all variables that a program or an append declares or produces."""
    names = list(graph.variables)
    for node in graph.nodes:
        if isinstance(node, ExprNode | ClientNode):
            names.append(node.output)
        elif isinstance(node, GenerateNode) and node.output:
            names.append(node.output.variable)
        elif isinstance(node, GenerateNode) and node.prompt:
            names += [segment.output for segment in node.prompt if segment.output]
    return names


def app_of(service: ScriptedService, **settings: Any) -> Litestar:
    """Return the application around a scripted service."""
    return create_app(Config(data=Path("unused"), **settings), service=service)


@contextlib.asynccontextmanager
async def in_process(app: Litestar) -> AsyncIterator[httpx.AsyncClient]:
    """Return a client that calls the application without a network. Streams arrive when they
    end.
    """
    asgi: Any = app  # two spellings of one protocol
    transport = httpx.ASGITransport(app=asgi, raise_app_exceptions=False)
    async with (
        app.lifespan(),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        yield client


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@contextlib.asynccontextmanager
async def over_socket(app: Litestar) -> AsyncIterator[str]:
    """Yield the address of a real server that runs the application in this event loop."""
    config = uvicorn.Config(
        app, http="httptools", ws="none", lifespan="off", log_config=None, access_log=False
    )
    server = _Server(config)
    async with app.lifespan():
        # As in `commands.serve`: without the protocol number, asyncio does not disable Nagle.
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
            listener.bind(("127.0.0.1", 0))
            running = asyncio.ensure_future(server.serve([listener]))
            try:
                await until(lambda: server.started)
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                server.should_exit = True
                server.force_exit = True
                await running


def client_at(url: str) -> httpx.AsyncClient:
    """Return a client that waits for a minute: httpx's 5 s are too short on a busy machine."""
    return httpx.AsyncClient(base_url=url, timeout=60)


async def until(condition: Callable[[], bool]) -> None:
    """Let other tasks run until the condition holds; fail after a minute."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - conditions of doubles have no event
            await asyncio.sleep(0.001)


def service_error(error: type[ConureError], code: str, **details: Any) -> ConureError:
    """Return an error for a scripted service to raise."""
    return error(code, f"refused with {code}", **details)
