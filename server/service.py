"""The service: the interface between the HTTP routes and the executor.

Routes use this protocol and the records of `program`; an implementation never sees a request, a
header or a status line.

Invariants: every call names a tenant, and programs of other tenants are not found. Rejections are
ConureErrors; any other exception is a bug. A waiting call (`get`, the next event) may be cancelled
at any await, which only ends the wait.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Iterator, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from conure.engine.protocol import ModelPurpose, StatusReport

from .program.explanation.records import ProgramExplanation
from .program.functions import FunctionSignature
from .program.ir import Append, Constraint, Json, Message, Objective, SourceSubmission, Submission
from .program.procedures import PutProcedure, RunProcedure, StoredProcedure
from .program.status import (
    Accepted,
    Event,
    Phase,
    Problem,
    ProgramPage,
    ProgramStatus,
    PutValue,
    UsageReport,
    VariableStatus,
)
from .prompts.model_notices import NO_CHAT_TEMPLATE, NOTICES
from .runtime.reporting.activity import ServerActivity
from .runtime.reporting.request_times import RequestTimeMeter


class ModelInfo(Struct, frozen=True, kw_only=True):
    """A model that programs can name."""

    id: str
    aliases: tuple[str, ...] = ()
    """Other names of the model, such as `owner/name` on the Hugging Face Hub."""
    context_len: int
    """Maximum tokens of one context, prompt and output together."""
    description: str = ""
    created: int = 0
    """Unix time in seconds at which the model was loaded."""
    capabilities: tuple[str, ...] = ()
    """Capabilities beyond text: `tools` if the chat template defines a format for calls,
    `embeddings` if the operator has switched them on."""
    purpose: ModelPurpose = "general"
    has_chat_template: bool = True

    @property
    def notice(self) -> str:
        """What a user must know before the first answer; empty for an ordinary model."""
        notices = (NOTICES[self.purpose], "" if self.has_chat_template else NO_CHAT_TEMPLATE)
        return " ".join(filter(None, notices))


class GrammarInfo(Struct, frozen=True, kw_only=True):
    """The result of checking a constraint."""

    is_supported: bool
    """Whether outputs can be restricted to the constraint."""
    is_relaxed: bool = False
    """Whether parts of the constraint are checked on the finished text only."""
    matches: bool | None = None
    """Whether the text matches; null if no text was sent."""
    error: Problem | None = None
    """Why the constraint is not supported."""


class TokenizedPrompt(Struct, frozen=True, kw_only=True):
    """The tokens of a prompt."""

    count: int
    max_model_len: int
    """Maximum tokens of one context, prompt and output together."""
    tokens: list[int]


class EmbeddingService(Protocol):
    """Embeds texts."""

    @property
    def is_supported(self) -> bool:
        """Whether the operator has switched embeddings on."""
        ...

    async def embed(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the mean of the last hidden states [H] over the tokens of each text.

        Raises:
            PromptError: `prompt.too_long`.
            UnavailableError: `engine.none` if no engine answers.
        """
        ...


class Readiness(Struct, frozen=True, kw_only=True):
    """Whether programs can run now. `reasons` is empty if so."""

    is_ready: bool
    reasons: list[str] = []


class EngineInfo(Struct, frozen=True, kw_only=True):
    """One engine with its own counters."""

    id: str
    epoch: int
    """Generation of the engine process."""
    model: str
    report: StatusReport
    """Blocks free, held and cached; tokens computed, shared, taken from cache and decoded."""


class ProcedureService(Protocol):
    """Stores procedures and runs them for tenants."""

    async def put(self, name: str, put: PutProcedure, *, tenant: str) -> StoredProcedure:
        """Check and store a version of a procedure; return once it is durable.

        Storing an equal program again gives the same version.

        Raises:
            ProgramError: if the program is invalid.
            ConflictError: `procedure.signature` if the alias names a version with another
                signature. Nothing is stored then.
        """
        ...

    async def put_alias(
        self, name: str, alias: str, version: str, *, tenant: str
    ) -> StoredProcedure:
        """Let an alias name another version with the same signature.

        Raises:
            NotFoundError: if there is no such version.
            ConflictError: `procedure.signature`.
        """
        ...

    async def remove(self, reference: str, *, tenant: str) -> None:
        """Remove one version, `name@version`, and its pin. Programs that run it keep it.

        Raises:
            NotFoundError: if there is no such version.
            ConflictError: `procedure.in_use` if an alias names it.
        """
        ...

    async def remove_alias(self, name: str, alias: str, *, tenant: str) -> None:
        """Remove an alias, not the version that it names.

        Raises:
            NotFoundError: if there is no such alias.
        """
        ...

    async def pin(self, reference: str, pin_s: float | None, *, tenant: str) -> StoredProcedure:
        """Keep the constant beginnings of a version's prompts on the engines for a time.

        Args:
            reference: the version.
            pin_s: seconds from now; None: remove the pin.
            tenant: owner of the procedure.

        Raises:
            NotFoundError: if there is no such version.
            ProgramError: `procedure.pin_time`, `procedure.pin_empty`.
            ConflictError: `procedure.pin_limit`.
        """
        ...

    async def find(self, reference: str, *, tenant: str) -> StoredProcedure:
        """Return one version of a procedure, by `name@version`, `name:alias` or `name`.

        Raises:
            NotFoundError: if it does not exist.
        """
        ...

    async def list_all(self, *, tenant: str) -> list[StoredProcedure]:
        """Return all versions of all procedures, without programs and signatures."""
        ...

    async def run(
        self, reference: str, run: RunProcedure, *, tenant: str, idempotency_key: str | None
    ) -> tuple[Accepted, bool]:
        """Submit a procedure as a program; see `Service.submit`.

        Raises:
            NotFoundError: if it does not exist.
        """
        ...


class ExplanationService(Protocol):
    """Explains programs for tenants."""

    async def explain(
        self, submission: Submission, *, body: bytes, tenant: str
    ) -> ProgramExplanation:
        """Explain what a submission would do. It is checked as by `submit`, and not run.

        Raises:
            ProgramError: if the program is invalid.
            UnavailableError: if the queue is full or the server drains.
        """
        ...

    async def explain_run(self, program: str, *, tenant: str) -> ProgramExplanation:
        """Explain a submitted program, with the figures of its run so far.

        Nodes that were appended later are not part of the explanation.

        Raises:
            NotFoundError: if the program does not exist.
        """
        ...


class TraceService(Protocol):
    """Exports what programs read and wrote."""

    async def export(
        self, program: str, *, tenant: str, token_ids: bool
    ) -> AsyncGenerator[bytes, None]:
        """Return the lines of a program's trace: one span as JSON per line, the program first.

        A program that runs has the calls that have ended so far. If the journal turns out to be
        damaged, the last line is `{"error": ...}`. The caller closes the generator.

        Args:
            program: id of the program.
            tenant: owner of the program.
            token_ids: include the token ids of prompts and outputs.

        Raises:
            NotFoundError: if the program does not exist, or no longer.
            ConflictError: `trace.not_recorded` if it was submitted without `options.trace`.
            JournalError: `store.damaged`.
        """
        ...


class ServiceLifecycle(Protocol):
    """Starts and stops a service."""

    @property
    def num_nodes(self) -> int:
        """Nodes of all programs in memory."""
        ...

    async def start(self) -> None:
        """Open the journal, start the engines, and resume unfinished programs.

        Raises:
            ConureError: if the data folder is locked, the model is missing or no engine starts.
        """
        ...

    async def stop(self) -> None:
        """Close everything. Unfinished programs resume after the next start."""
        ...

    async def drain(self) -> None:
        """Accept no more programs, send `server.draining` to event readers, and suspend running
        programs.
        """
        ...


class ModelService(Protocol):
    """The models of a server, their tokenizers and embeddings."""

    def models(self) -> list[ModelInfo]:
        """Return the models that programs can name, the default model first."""
        ...

    @property
    def embedder(self) -> EmbeddingService:
        """Embeddings of texts."""
        ...

    async def tokenize(
        self,
        model: str,
        prompt: str | list[Message],
        *,
        tools: list[dict[str, Json]],
        bos: bool = False,
        template_options: Mapping[str, Json] | None = None,
    ) -> TokenizedPrompt:
        """Return the token ids of a text, or of messages as a call would send them.

        Raises:
            ProgramError: for an unknown model, or tools that it cannot call.
            PromptError: if the prompt cannot be encoded.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids of the default model.

        Raises:
            ProgramError: if the model does not have an id.
        """
        ...


class Service(ServiceLifecycle, ModelService, Protocol):
    """Runs programs for tenants."""

    @property
    def procedures(self) -> ProcedureService:
        """Stored procedures."""
        ...

    @property
    def explainer(self) -> ExplanationService:
        """Explanations of programs."""
        ...

    @property
    def request_times(self) -> RequestTimeMeter:
        """Measures requests with one call."""
        ...

    @property
    def traces(self) -> TraceService:
        """Traces of programs."""
        ...

    async def compile(self, source: SourceSubmission) -> tuple[Submission, bytes]:
        """Return the submission that a text describes, and its JSON. Nothing is stored or run.

        Raises:
            ProgramError: with line and column, if the text is invalid.
        """
        ...

    async def submit(
        self,
        submission: Submission,
        *,
        body: bytes,
        tenant: str,
        idempotency_key: str | None = None,
    ) -> tuple[Accepted, bool]:
        """Accept a program; return once it is durable.

        Args:
            submission: the decoded body.
            body: the bytes it was decoded from (or an encoding of it).
            tenant: owner of the program.
            idempotency_key: a repeated submission under the same key returns the first result.

        Returns:
            The accepted program, and whether the result repeats an earlier submission's.

        Raises:
            ProgramError: if the program is invalid.
            ConflictError: if the key was used with another body.
            UnavailableError: if the queue is full or the server drains.
        """
        ...

    async def append(
        self, program: str, append: Append, *, body: bytes, tenant: str, wait_s: float = 0.0
    ) -> ProgramStatus:
        """Append nodes to an open program, or close it: all changes or none.

        Args:
            program: id of the program.
            append: the changes.
            body: the request as JSON.
            tenant: owner of the program.
            wait_s: how long to wait for the submission of a program that does not exist yet.

        Returns:
            The program, restricted to the appended nodes and variables.

        Raises:
            NotFoundError: if the program does not exist.
            ConflictError: if it is closed or has ended.
            ProgramError: if the resulting program is invalid.
            UnavailableError: if the append is not durable within 5 s; it may still become so.
        """
        ...

    async def cancel(self, program: str, *, tenant: str) -> None:
        """Cancel a program; return once its end is durable. An ended program does not change.

        Raises:
            NotFoundError: if the program does not exist.
            UnavailableError: if its end is not durable within 5 s; the program stops anyway.
        """
        ...

    async def find(self, program: str, *, tenant: str) -> Phase:
        """Return the phase of a program.

        Raises:
            NotFoundError: if the program does not exist.
        """
        ...

    async def find_submitted(self, idempotency_key: str, *, tenant: str) -> str | None:
        """Return the id of the program that was submitted under a key; None if there is none."""
        ...

    @property
    def last_seq(self) -> int:
        """The last sequence number of an event of any program. Later events have higher ones."""
        ...

    async def status(
        self, program: str, *, tenant: str, nodes: Sequence[str] | None = None
    ) -> ProgramStatus:
        """Return the status of a program.

        Args:
            program: id of the program.
            tenant: owner of the program.
            nodes: ids of the nodes to show, without variables; None: all nodes and variables.

        Raises:
            NotFoundError: if the program does not exist.
        """
        ...

    async def status_parts(self, program: str, *, tenant: str) -> Iterator[bytes]:
        """Return the JSON of the status of a program in parts, each made when it is read.

        A program may have 100,000 nodes. What changes meanwhile is shown as it is when its part is
        made.

        Raises:
            NotFoundError: if the program does not exist.
        """
        ...

    async def list_programs(
        self, *, tenant: str, status: str | None, cursor: int | None, limit: int, search: str = ""
    ) -> ProgramPage:
        """Return a page of a tenant's programs, newest first.

        Args:
            tenant: owner of the programs.
            status: a final status, or `running` for the programs that have not ended.
            cursor: the `next` of the page before.
            limit: programs per page.
            search: text that the name or the id contains, in any case.
        """
        ...

    async def get(
        self,
        program: str,
        variable: str,
        *,
        tenant: str,
        wait_s: float,
        objective: Objective | None = None,
    ) -> VariableStatus:
        """Wait up to `wait_s` seconds for a variable to end, and return its status.

        A variable that failed, was killed or was skipped is returned with its `error`, an open one
        with its current status. An `objective` (latency, throughput, ttft, tpot) upgrades the
        objective of the variable's producers. A wait without one counts as `latency` if the
        variable has no objective: it is not an output, and no other client waits for it.

        Raises:
            NotFoundError: if the program or the variable does not exist.
        """
        ...

    async def erase(self, program: str, *, tenant: str) -> None:
        """Cancel a program that has not ended, and delete it with its content for good.

        Its cost stays in the usage report. Afterwards the program does not exist.

        Raises:
            NotFoundError: if there is no such program.
            UnavailableError: if the deletion is not durable in time.
        """
        ...

    async def put(
        self, program: str, variable: str, body: PutValue, *, tenant: str
    ) -> VariableStatus:
        """Commit a value or an error that a client sent; return once it is durable.

        Raises:
            NotFoundError: if the program or the variable does not exist.
            ConflictError: if the variable has another value, or an engine produces it.
        """
        ...

    def events(
        self,
        program: str,
        *,
        tenant: str,
        after: int,
        is_durable: bool = False,
        texts: Collection[str] | None = None,
        follow: bool = True,
    ) -> AsyncGenerator[Event, None]:
        """Yield the journaled events after sequence number `after`, then new events.

        Deltas have no sequence number. Ends after `program.finished` or `server.draining`. The
        caller closes the generator.

        Args:
            program: id of the program.
            tenant: owner of the program.
            after: the last sequence number that the reader has.
            is_durable: omit events without a sequence number, and do not wake up for them.
            texts: variables whose deltas are wanted; partial values of `yield` nodes are omitted.
                None: all of both.
            follow: wait for new events until the program ends.

        Raises:
            NotFoundError: if the program does not exist (at the first iteration).
        """
        ...

    async def check_grammar(self, constraint: Constraint, text: str | None) -> GrammarInfo:
        """Check whether outputs can be restricted to a constraint, and whether a text matches it.

        Raises:
            UnavailableError: if no engine responds.
        """
        ...

    async def usage(self, *, tenant: str, since: str | None, until: str | None) -> UsageReport:
        """Sum the receipts of a tenant's programs that ended between two days (UTC), both
        inclusive.
        """
        ...

    async def metrics(self) -> bytes:
        """Return the metrics in Prometheus text format.

        No label names a tenant, program or model, so the number of series is bounded.
        """
        ...

    def activity(self, *, tenant: str) -> ServerActivity:
        """Return what the engines hold and which calls wait. Only programs of the tenant are
        named.
        """
        ...

    def functions(self) -> list[FunctionSignature]:
        """Return the functions that `call` nodes may name, by name."""
        ...

    async def engines(self) -> list[EngineInfo]:
        """Return each engine with its own counters."""
        ...

    async def ready(self) -> Readiness:
        """Return whether the store is writable and the engines responded within the last 5 s."""
        ...
