"""Exports the traces of programs as lines of JSON."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import msgspec
from msgspec import Struct

from ...program.decoding.typed_json import decode_record
from ...program.errors import ConflictError, ConureError, NotFoundError
from ...program.ir import Json
from ...program.status import Problem, ProgramStatus
from ...store.journal import EventRecord
from ..persistence.program_directory import ProgramDirectory
from .spans import (
    Span,
    error_line,
    program_span,
    record_span,
    unfinished_spans,
)
from .trace_records import TracedCall, TraceRecord

PAGE = 16
"""Records read from the journal at a time. Each may have megabytes."""


class _TraceOptions(Struct, frozen=True):
    trace: bool = False
    session: str | None = None


class _TracedSubmission(Struct, frozen=True):
    """The parts of a stored submission or append that a trace shows."""

    options: _TraceOptions = _TraceOptions()
    inputs: dict[str, Json] = {}


class TraceExporter:
    """Implements `TraceService`."""

    def __init__(self, programs: ProgramDirectory) -> None:
        self._programs = programs

    async def export(
        self, program: str, *, tenant: str, token_ids: bool
    ) -> AsyncGenerator[bytes, None]:
        """Return the lines of a trace."""
        journal = self._programs.journal
        stored = await journal.load_program(tenant, program)
        if stored is None:
            raise NotFoundError(
                "program.not_found",
                f"there is no program {program}: it was never submitted, or it was deleted with "
                "its trace (`--keep-days` and `--keep-gb` of the server)",
            )
        body = decode_record(stored.body, _TracedSubmission)
        if not body.options.trace:
            raise ConflictError(
                "trace.not_recorded",
                f"program {program} was submitted without a trace, so its prompts were not "
                'recorded: submit it again with "options": {"trace": true}',
            )
        status = await self._programs.status(program, tenant)
        inputs = dict(body.inputs)
        for append in stored.appends:
            inputs |= decode_record(append, _TracedSubmission).inputs
        first = await journal.events(tenant, program, limit=PAGE, is_trace=True)
        root = program_span(status, inputs, body.options.session)
        return self._lines(status, tenant, root, first, token_ids=token_ids)

    async def _lines(
        self,
        status: ProgramStatus,
        tenant: str,
        root: Span,
        page: list[EventRecord],
        *,
        token_ids: bool,
    ) -> AsyncGenerator[bytes, None]:
        program = status.id
        failed: set[str] = set()
        yield _line(root)
        try:
            while page:
                for record in page:
                    traced = decode_record(record.data, TraceRecord)
                    if isinstance(traced, TracedCall) and traced.error is not None:
                        failed.add(traced.node)
                    yield _line(record_span(program, record.seq, traced, token_ids=token_ids))
                last = page[-1].seq
                journal = self._programs.journal
                page = await journal.events(tenant, program, last, PAGE, is_trace=True)
        except ConureError as error:
            # The status line is out: the last line is the place for the error.
            yield _line(error_line(Problem(code=error.code, message=error.message)))
            return
        for span in unfinished_spans(status, failed):
            yield _line(span)


def _line(span: Span) -> bytes:
    return msgspec.json.encode(span) + b"\n"
