"""Constraints by themselves: can outputs be held to one, and does a text keep it?

Knows paths and bodies; an engine has the answer, and takes care of what is hostile.
"""

from __future__ import annotations

from typing import Annotated, Any

from litestar import Request, post
from msgspec import Meta, Struct

from ..program.decode import decode_json
from ..program.ir import Constraint
from ..program.validation import check_constraint
from ..service import GrammarInfo
from .connection import read_json, service_of, while_connected
from .document import problems, reads


class GrammarQuestion(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /v1/grammar/check`."""

    constraint: Constraint
    text: Annotated[str, Meta(max_length=65_536)] | None = None
    """Is it, whole, a text of the constraint's language?"""


@post(
    "/v1/grammar/check",
    status_code=200,
    operation_class=reads(GrammarQuestion),
    responses=problems(),
    tags=["programs"],
)
async def check_grammar(request: Request[Any, Any, Any]) -> GrammarInfo:
    """Says whether a constraint is supported, and whether a text matches it."""
    question: GrammarQuestion = decode_json(await read_json(request), GrammarQuestion)
    check_constraint(question.constraint, "constraint")
    work = service_of(request).check_grammar(question.constraint, question.text)
    return await while_connected(request, work)


ROUTES = (check_grammar,)
BODIES = (GrammarQuestion,)
