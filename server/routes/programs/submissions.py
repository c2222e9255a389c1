"""Submissions: the body of a request, whose program is a graph or a text that describes one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from ...language.compiler import locate
from ...program.decoding.bodies import decode_json, decode_submission
from ...program.decoding.typed_json import decode_record
from ...program.errors import NotFoundError, ProgramError
from ...program.ir import SourceSubmission, Submission
from ..request_context import AnyRequest, decode_body, read_json, service_of


class ReceivedSubmission(Struct, frozen=True):
    """A decoded submission."""

    submission: Submission
    body: bytes
    """Its JSON; of a text, that of the program that it describes."""
    is_compiled: bool

    @contextmanager
    def source_positions(self) -> Iterator[None]:
        """Replace the path of an error in the graph by the line of the text."""
        try:
            yield
        except (ProgramError, NotFoundError) as error:
            if not self.is_compiled:
                raise
            raise locate(error, self.submission.program) from None


class _Keys(Struct, frozen=True):
    program: Raw | UnsetType = UNSET
    source: Raw | UnsetType = UNSET


async def read_submission(request: AnyRequest) -> ReceivedSubmission:
    """Read the body of a request, and compile its program if it is a text.

    Raises:
        ProgramError: if the body or the text is invalid.
        RequestError: as in `read_json`.
    """
    body = await read_json(request)
    if not _has_source(body):
        submission = await decode_body(request, body, decode_submission)
        return ReceivedSubmission(submission, body, False)
    source = await decode_body(request, body, _decode_source)
    submission, body = await service_of(request).compile(source)
    return ReceivedSubmission(submission, body, True)


def _decode_source(body: bytes) -> SourceSubmission:
    source: SourceSubmission = decode_json(body, SourceSubmission)
    return source


def _has_source(body: bytes) -> bool:
    """Whether a body has a text instead of a graph.

    Raises:
        ProgramError: `program.invalid` if it has both.
    """
    if b'"source"' not in body:
        return False
    try:
        keys = decode_record(body, _Keys)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False  # the decoder of the whole body reports the fault
    if keys.source is not UNSET and keys.program is not UNSET:
        message = "a submission has both `program` and `source`: leave one of them out"
        raise ProgramError("program.invalid", message, path="source")
    return keys.source is not UNSET
