"""The endpoint that checks a constraint: whether an engine supports it, and whether a text matches.

An engine does the check, and bounds the work that a hostile constraint can cause.
"""

from __future__ import annotations

from typing import Annotated, Any

from litestar import Request, post
from msgspec import Meta, Struct

from ..program.checks import check_constraint
from ..program.ir import Constraint
from ..service import GrammarInfo
from .openapi import error_responses, json_body
from .request_context import read_record, service_of, while_connected


class GrammarQuestion(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /v1/grammar/check`."""

    constraint: Constraint
    text: Annotated[str, Meta(max_length=65_536)] | None = None
    """A text to match against the constraint as a whole."""


@post(
    "/v1/grammar/check",
    status_code=200,
    operation_class=json_body(GrammarQuestion),
    responses=error_responses(),
    tags=["programs"],
)
async def check_grammar(request: Request[Any, Any, Any]) -> GrammarInfo:
    """Check whether a constraint is supported, and whether a text matches it."""
    question: GrammarQuestion = await read_record(request, GrammarQuestion)
    check_constraint(question.constraint, "constraint")
    work = service_of(request).check_grammar(question.constraint, question.text)
    return await while_connected(request, work)


ROUTES = (check_grammar,)
BODIES = (GrammarQuestion,)
