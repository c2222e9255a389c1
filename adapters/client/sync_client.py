# Generated from async_client.py by .ci/unasync.py. Do not edit.
"""The synchronous client: submits programs, reads their values and events, runs client steps.

    with Client() as client:
        run = client.submit({"nodes": [...], "outputs": ["test"]}, inputs={"task": "..."})
        print(run.get("test"))

Responsibility: the operations of a client and of its runs.
Out of scope: the content of requests and the retries (`exchange`), connections, sleeping and the
execution of client steps (`sync_io`).
Invariants: an event stream resumes where its connection broke. A client runs a client step at most
once per request of the server, even if it sees the request several times.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Generator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import httpx

from conure.server.program.decoding.typed_json import convert_record
from conure.server.program.errors import ConflictError, ConureError, NotFoundError
from conure.server.program.explanation.records import ProgramExplanation
from conure.server.program.ir import Append, Json, Options
from conure.server.program.procedures import DEFAULT_ALIAS, RunProcedure, StoredProcedure
from conure.server.program.status import (
    ENDED,
    Accepted,
    Event,
    EventType,
    ProgramPage,
    ProgramStatus,
    PutValue,
    Receipt,
    VariableStatus,
)

from .client_steps import (
    STEP_EVENTS,
    ClientStepSession,
    Function,
    StepRequest,
    StepResult,
    answer_of,
    check_functions,
)
from .connection import (
    AttachedStream,
    EventReader,
    begins_event_stream,
    committed_values,
    has_failure,
    has_last_event,
    reply_of,
    types_query,
)
from .exchange import models, procedures, programs
from .exchange.problems import ServerUnreachableError
from .exchange.programs import Submittable
from .exchange.records import Flow, Reply, Request, Sleep
from .exchange.retry import CANCEL_TIMEOUT_S, Retry
from .sync_io import (
    BaseClient,
    StepRunner,
    call_function,
    is_interruption,
    sleep,
)

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Client(BaseClient):
    """A synchronous client of a Conure server."""

    def submit(
        self,
        program: Submittable,
        inputs: Mapping[str, Json] | None = None,
        objectives: Mapping[str, Json] | None = None,
        options: Options | Mapping[str, Json] | None = None,
        *,
        open: bool = False,  # noqa: A002 - the name on the wire
        idempotency_key: str | None = None,
        follow: bool = False,
        types: Collection[EventType] | None = None,
        retry_within_s: float | None = None,
    ) -> Run:
        """Submit a program. It is durable on the server when this method returns.

        Args:
            program: a program or a complete submission, as a record or as JSON, or a text in the
                decoder language.
            inputs: values of the program's inputs.
            objectives: what matters for an output: `latency`, `throughput`, ...
            options: how the program is run.
            open: keep the program open for `append`.
            idempotency_key: makes retries safe. Default: a random key.
            follow: request the program's events as the reply, which saves a round trip. The next
                call of `events` or `result` reads the events. The caller must make that call.
            types: the types of those events, as in `events`.
            retry_within_s: wait for the replies to this request, and to those of the returned run,
                for at most this time. None: as long as the client's `Retry` allows.

        Raises:
            ProgramError: if the program is invalid.
            UnavailableError: if the server is unreachable or accepts no programs now.
        """
        body = programs.submission_body(
            program, inputs=inputs, objectives=objectives, options=options, is_open=open
        )
        retry = self._retry.from_now(retry_within_s)
        # The outputs of a text are known to the server only, and its events do not list them.
        if not follow or "source" in body:
            accepted = self._do(programs.submit(body, retry, key=idempotency_key))
            return Run(self, accepted, body.get("program"), retry=retry)
        query = types_query(types)
        flow = programs.submit_attached(body, retry, key=idempotency_key, query=query)
        accepted, response = self._do(flow)
        attached = None if response is None else AttachedStream(response, types)
        return Run(self, accepted, body.get("program"), attached, retry=retry)

    def attach(self, program_id: str) -> Run:
        """Return a handle on a program that was submitted before, by any client."""
        status = self._do(programs.status(program_id, self._retry))
        return Run(self, programs.accepted_of(status), is_attached=True)

    def append(
        self, program_id: str, more: Append | Mapping[str, Json], *, wait_s: float = 0.0
    ) -> ProgramStatus:
        """Add nodes or values to an open program, or close it.

        Args:
            program_id: id of the program.
            more: the changes; all are applied, or none.
            wait_s: how long the server waits for the program, if its submission may arrive after
                this request.
        """
        return self._do(programs.append(program_id, more, self._retry, wait_s=wait_s))

    def run(
        self,
        program: Submittable,
        inputs: Mapping[str, Json] | None = None,
        functions: Mapping[str, Function] | None = None,
        objectives: Mapping[str, Json] | None = None,
        options: Options | Mapping[str, Json] | None = None,
    ) -> StepResult:
        """Submit a program, run its client steps in this process, and wait for its end.

        The program is cancelled if the caller is interrupted.

        Args:
            program: as in `submit`.
            inputs: as in `submit`.
            functions: by name of the client steps. A step's `args` are keyword arguments.
            objectives: as in `submit`.
            options: as in `submit`.

        Raises:
            ProgramError: if the program is invalid, an input has no value, or a client step has no
                function; the client steps of a text are known only when they are requested.
            ConureError: if the program failed or was cancelled. If one of the functions failed, or
                a client step of a text has none, that exception is the cause.
        """
        body = programs.submission_body(
            program, inputs=inputs, objectives=objectives, options=options, requires_inputs=True
        )
        check_functions(body.get("program"), functions or {})
        if "program" in body:  # a text has no id
            body["id"] = body.get("id") or programs.new_id()
        run: Run | None = None
        try:
            run = self.submit(body, follow=True, types=STEP_EVENTS)
            return run.serve_client_steps(functions or {})
        except ConureError:
            raise
        except BaseException:
            # RuntimeError: the client was closed meanwhile.
            with contextlib.suppress(ConureError, RuntimeError):
                if run is not None:
                    run.cancel(timeout_s=CANCEL_TIMEOUT_S)
                elif "id" in body:  # the server may have accepted the submission
                    cancel = programs.cancel(body["id"], self._retry.from_now(CANCEL_TIMEOUT_S))
                    self._shield(self._do(cancel))
            raise

    def explain(
        self,
        program: Submittable,
        inputs: Mapping[str, Json] | None = None,
        objectives: Mapping[str, Json] | None = None,
    ) -> ProgramExplanation:
        """Explain what a program would do, without running it.

        Args:
            program: as in `submit`; or the id of a submitted program, to explain what it did. Any
                other string is a text.
            inputs: as in `submit`.
            objectives: as in `submit`.

        Raises:
            ProgramError: if the program is invalid.
            NotFoundError: if there is no program with the id.
        """
        if isinstance(program, str) and programs.is_id(program):
            return self._do(programs.explain_run(program, self._retry))
        body = programs.submission_body(program, inputs=inputs, objectives=objectives)
        return self._do(programs.explain(body, self._retry))

    def store_procedure(
        self,
        name: str,
        program: Submittable,
        *,
        alias: str | None = DEFAULT_ALIAS,
        pin_s: float | None = None,
    ) -> StoredProcedure:
        """Store a version of a procedure on the server.

        Args:
            name: name of the procedure.
            program: a program as a record or as JSON, or a text in the decoder language. Its
                inputs are the parameters, its outputs are the results.
            alias: the alias that names this version from now on; None: no alias.
            pin_s: seconds for which the engines keep the constant beginnings of its prompts in
                their KV; None: as before.

        Raises:
            ProgramError: if the program is invalid, or cannot be pinned.
            ConflictError: `procedure.signature` if the alias names a version with other
                parameters or results.
        """
        return self._do(procedures.put(name, program, self._retry, alias=alias, pin_s=pin_s))

    def move_alias(self, name: str, alias: str, version: str) -> StoredProcedure:
        """Point an alias of a procedure to another version with the same parameters and results.

        Raises:
            NotFoundError: if there is no such version.
            ConflictError: `procedure.signature`.
        """
        return self._do(procedures.put_alias(name, alias, version, self._retry))

    def remove_alias(self, name: str, alias: str) -> None:
        """Remove an alias of a procedure; the version that it names stays.

        Raises:
            NotFoundError: if there is no such alias.
        """
        self._do(procedures.delete_alias(name, alias, self._retry))

    def remove_procedure(self, reference: str) -> None:
        """Remove one version of a procedure, and its pin.

        Programs and procedures that use this version keep a copy.

        Args:
            reference: `name@version`.

        Raises:
            NotFoundError: if there is no such version.
            ConflictError: `procedure.in_use` while an alias names the version.
        """
        self._do(procedures.delete(reference, self._retry))

    def procedure(self, reference: str) -> StoredProcedure:
        """Return one version of a procedure: `name`, `name:alias` or `name@version`."""
        return self._do(procedures.get(reference, self._retry))

    def procedures(self) -> list[StoredProcedure]:
        """Return all versions of all procedures with their aliases."""
        return self._do(procedures.list_all(self._retry))

    def run_procedure(
        self,
        reference: str,
        inputs: Mapping[str, Json] | None = None,
        *,
        objectives: Mapping[str, Json] | None = None,
        options: Options | Mapping[str, Json] | None = None,
        idempotency_key: str | None = None,
    ) -> Run:
        """Submit a procedure as a program. It is durable on the server when this method returns.

        Args:
            reference: `name`, `name:alias` or `name@version`.
            inputs: the arguments.
            objectives: as in `submit`.
            options: as in `submit`.
            idempotency_key: as in `submit`.

        Raises:
            NotFoundError: if there is no such procedure.
            ProgramError: if the arguments do not fit its parameters.
        """
        body = RunProcedure(
            inputs=dict(inputs or {}),
            objectives=dict(objectives or {}),
            options=convert_record(options or {}, Options),
        )
        flow = procedures.run(reference, body, self._retry, key=idempotency_key)
        return Run(self, self._do(flow))

    def programs(
        self,
        *,
        status: str | None = None,
        search: str | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> ProgramPage:
        """Return a page of the list of programs, newest first.

        Args:
            status: only programs with this status; `running` selects all that have not ended.
            search: only programs whose name or id contains this text, in any case.
            cursor: the `next` of the page before.
            limit: programs per page, at most 200.
        """
        flow = programs.list_all(
            self._retry, status=status, search=search, cursor=cursor, limit=limit
        )
        return self._do(flow)

    def models(self) -> list[dict[str, Json]]:
        """Return the models that programs can use, in the format of `/v1/models`."""
        return self._do(models.list_all(self._retry))

    def tokenize(
        self,
        prompt: str | Sequence[Mapping[str, Json]],
        *,
        model: str = "default",
        tools: Sequence[Mapping[str, Json]] = (),
    ) -> list[int]:
        """Return the token ids of a text, or of messages as a call to the model sends them."""
        body: dict[str, Json] = {"model": model}
        body["prompt" if isinstance(prompt, str) else "messages"] = prompt
        if tools:
            body["tools"] = list(tools)
        return self._do(models.tokenize(body, self._retry))

    def embed(
        self, texts: Sequence[str], *, model: str = "default", dimensions: int | None = None
    ) -> list[list[float]]:
        """Return the embeddings of texts, vectors of length 1.

        The server must have been started with `--embeddings`.

        Args:
            texts: none of them empty.
            model: name of a model on the server.
            dimensions: keep only the first components, at length 1 again.
        """
        flow = models.embed(texts, self._retry, model=model, dimensions=dimensions)
        return self._do(flow)

    def _do(self, flow: Flow[T]) -> T:
        """Perform the requests and sleeps of a flow of `exchange`; return its result."""
        http = self._http()
        reply: Reply | None = None
        failure: ServerUnreachableError | None = None
        while True:
            try:
                action = flow.throw(failure) if failure is not None else flow.send(reply)
            except StopIteration as end:
                result: T = end.value
                return result
            reply, failure = None, None
            if isinstance(action, Sleep):
                sleep(action.delay_s)
                continue
            try:
                reply = self._send(http, action)
                self._settings.is_known = True
            except httpx.TransportError as problem:
                failure = self._settings.unreachable(problem)

    def _send(self, http: httpx.Client, request: Request) -> Reply:
        message = http.build_request(**self._settings.request_arguments(request))
        response = http.send(message, stream=request.accepts_stream)
        if not request.accepts_stream:
            return reply_of(response, response.content)
        if begins_event_stream(response, request.timeout_s):
            return reply_of(response, b"", response)
        with contextlib.closing(response):
            return reply_of(response, response.read())

    def _events(
        self, reader: EventReader, attached: AttachedStream | None
    ) -> Generator[Event, None, None]:
        reading = self._event_batches(reader, attached)
        with contextlib.closing(reading) as batches:
            for events in batches:
                yield from events

    def _event_batches(
        self, reader: EventReader, attached: AttachedStream | None
    ) -> Generator[list[Event], None, None]:
        """Yield the events of a program, those that arrived together in one list."""
        http = self._http()
        if attached is not None and not attached.serves(reader):
            attached.response.close()
            attached = None
        while not reader.is_over:
            try:
                if attached is not None:
                    response, attached = attached.response, None
                else:
                    request = http.build_request(**reader.stream_arguments())
                    response = http.send(request, stream=True)
                with contextlib.closing(response):
                    if response.status_code >= 400:
                        reader.on_refusal(reply_of(response, response.read()))
                    else:
                        for chunk in response.iter_raw():
                            yield reader.feed(chunk)
                        reader.on_end()
            except httpx.TransportError as problem:
                reader.on_disconnect(problem)
            if reader.may_have_ended():
                status = self._do(programs.status(reader.program, reader.retry))
                if status.status in ENDED:
                    reader.on_ended()
            if not reader.is_over:
                sleep(reader.next_delay_s())


class Run:
    """A handle on a program on the server."""

    def __init__(
        self,
        client: Client,
        accepted: Accepted,
        program: Any = None,
        attached: AttachedStream | None = None,
        retry: Retry | None = None,
        *,
        is_attached: bool = False,
    ) -> None:
        self._client = client
        self._is_attached = is_attached
        """Whether another client may have submitted the program."""
        self._retry = retry or client._retry
        self._program = program
        """As it was submitted; None if it was a text, or if this client did not submit it."""
        self._attached = attached
        self.id = accepted.id
        self.outputs = accepted.outputs
        """Names of the program's outputs."""

    def __repr__(self) -> str:
        return f"Run({self.id!r})"

    @property
    def is_followed(self) -> bool:
        """Whether the next reader of events or of the result reads the reply to the submission."""
        return self._attached is not None

    def get(self, variable: str, *, wait_s: float | None = None) -> Json:
        """Wait for the value of a variable, without limit if `wait_s` is None.

        Raises:
            NotReadyError: if the variable gets no value within `wait_s` seconds.
            ConureError: if the variable ended without a value. The code is the server's.
        """
        return self._client._do(
            programs.get(self.id, variable, self._retry, wait_s=wait_s, clock=time.monotonic)
        )

    def status(self) -> ProgramStatus:
        """Return the current status of the program."""
        return self._client._do(programs.status(self.id, self._retry))

    def events(
        self,
        after: int = 0,
        *,
        types: Collection[EventType] | None = None,
        follow: bool = True,
    ) -> Generator[Event, None, None]:
        """Iterate over the program's events up to its end.

        A broken connection is reopened and resumed. A text that was streaming then begins again,
        with one delta at offset 0.

        Args:
            after: skip events with this sequence number or a lower one.
            types: only events of these types, and the last event. None: all events.
            follow: wait for new events until the program ends.
        """
        attached, self._attached = self._attached, None
        settings = self._client._settings
        reader = EventReader(settings, self.id, after, types, follow=follow, retry=self._retry)
        return self._client._events(reader, attached)

    def put(self, variable: str, value: Json, *, request_id: str | None = None) -> VariableStatus:
        """Write the value of a variable. Writing the same value again has no effect.

        Raises:
            ConflictError: if the variable has another value.
        """
        answer = PutValue(value=value, request_id=request_id)
        return self._client._do(programs.put(self.id, variable, answer, self._retry))

    def append(self, more: Append | Mapping[str, Json]) -> ProgramStatus:
        """Add nodes to a program that was submitted with `open`, or close it."""
        status = self._client._do(programs.append(self.id, more, self._retry))
        self.outputs = status.outputs
        return status

    def cancel(self, *, timeout_s: float | None = None) -> ProgramStatus:
        """Cancel the program. Nodes that have ended keep their results.

        The request is sent even if the caller is cancelled meanwhile.

        Args:
            timeout_s: how long to wait for the server. None: as long as the client's `Retry`
                allows.
        """
        return self._client._shield(self._cancel(self._retry.from_now(timeout_s)))

    def _cancel(self, retry: Retry) -> ProgramStatus:
        attached, self._attached = self._attached, None
        if attached is not None:
            attached.response.close()
        return self._client._do(programs.cancel(self.id, retry))

    def result(self, *, wait_s: float | None = None) -> dict[str, Json]:
        """Wait for all outputs, at most `wait_s` seconds for each.

        The values are read from the attached event stream if there is one and no limit is given.
        """
        attached, values = self._attached, {}
        if wait_s is None and attached is not None:
            self._attached = None
            values = self._read_values(attached)
        return {
            name: values[name] if name in values else self.get(name, wait_s=wait_s)
            for name in self.outputs
        }

    def _read_values(self, attached: AttachedStream) -> dict[str, Json]:
        """Return the values that events report until the program ends.

        Stop earlier if all outputs have values, or if a node fails: an output may never get a
        value, and an open program does not end.
        """
        values: dict[str, Json] = {}
        settings = self._client._settings
        reader = EventReader(settings, self.id, 0, attached.types, retry=self._retry)
        reading = self._client._event_batches(reader, attached)
        with contextlib.closing(reading) as batches:
            for events in batches:
                values |= committed_values(events)
                is_complete = values.keys() >= set(self.outputs) or has_failure(events)
                # Do not stop at the last event: reading the reply to its end lets httpx reuse the
                # connection.
                if is_complete and not has_last_event(events):
                    break
        return values

    def receipt(self) -> Receipt:
        """Wait for the program's end and return its receipt: calls, tokens, times."""
        status = self.status()
        if status.status not in ENDED:
            with contextlib.closing(self.events(types=())) as events:
                for _ in events:
                    pass
            status = self.status()
        return status.receipt or Receipt()

    def trace(self, *, token_ids: bool = False) -> list[dict[str, Json]]:
        """Return what the program and its calls have read and written so far, one span each.

        The first span is the program, the others are its children. Their attributes have the
        names of OpenInference. `training_examples` turns them into examples for fine-tuning.

        Args:
            token_ids: include the token ids of prompts and outputs.

        Raises:
            ConflictError: `trace.not_recorded` if the program was submitted without the option
                `trace`.
            NotFoundError: if the program was deleted.
        """
        return self._client._do(programs.trace(self.id, self._retry, token_ids=token_ids))

    def serve_client_steps(self, functions: Mapping[str, Function]) -> StepResult:
        """Run the program's client steps until it ends; see `Client.run`.

        A step that `functions` lacks fails if this client has submitted the program. On an attached
        program such a step waits for another client.
        """
        deduplicator = self._client._settings.deduplicator
        status = None if self._program is not None else self.status()
        session = deduplicator.open(
            self.id, self.outputs, status, self._program, is_attached=self._is_attached
        )
        try:
            with StepRunner() as runner:
                with contextlib.closing(self.events(types=STEP_EVENTS)) as events:
                    for event in events:
                        step = session.on_event(event, functions)
                        if step is not None:
                            runner.start(self._run_step, session, step)
                for name in session.missing_outputs():
                    with contextlib.suppress(ConureError):
                        session.add_value(name, self.get(name, wait_s=0))
                return session.result(self.status() if session.needs_status() else None)
        finally:
            session.close()
            deduplicator.close(self.id)

    def _run_step(self, session: ClientStepSession, step: StepRequest) -> None:
        session.begin(step)
        has_answer = False
        try:
            self._answer_step(session, step)
            has_answer = True
        except ConureError as problem:
            logger.warning(
                "the answer of client step %r of program %s was not sent: %r",
                step.name,
                self.id,
                problem,
            )
        finally:
            if not has_answer:
                session.release(step)

    def _answer_step(self, session: ClientStepSession, step: StepRequest) -> None:
        """Run the function of a step and send its answer."""
        # Every exception must reach the server, or the program waits for the step's timeout.
        try:
            answer = answer_of(step, call_function(step))
        except BaseException as problem:
            if is_interruption(problem):
                raise
            answer = session.failed(step, problem)
        refused = partial(session.failed, step)
        flow = programs.answer(self.id, step.output, answer, self._retry, refused=refused)
        # A conflict: the step was answered before, or the program has ended.
        with contextlib.suppress(ConflictError, NotFoundError):
            self._client._do(flow)
