"""The endpoints that explain programs, before and after their runs."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

import msgspec
from litestar import MediaType, Request, get, post
from litestar.params import FromPath, QueryParameter
from litestar.response.base import ASGIResponse

from ...program.explanation.records import ProgramExplanation
from ...program.explanation.rendering import to_mermaid, to_text
from ...program.ir import SourceSubmission, Submission
from ..openapi import error_responses, json_body, success_response
from ..request_context import service_of, tenant_of
from .submissions import read_submission

Format = Annotated[
    Literal["json", "text", "mermaid"],
    QueryParameter(
        name="as",
        description="`json`; `text` for a terminal; `mermaid`: a flowchart of the graph.",
    ),
]


@post(
    "/v1/programs/explain",
    status_code=200,
    operation_class=json_body(Submission, SourceSubmission, texts=200),
    responses={
        200: success_response(ProgramExplanation, "What the program would do"),
        **error_responses(404),
    },
    tags=["programs"],
)
async def explain_program(request: Request[Any, Any, Any], form: Format = "json") -> ASGIResponse:
    """Explain what a program would do, without running it.

    The explanation contains the graph, task groups, shared prompt beginnings, the greatest number
    of calls and tokens, and advice. The body is a submission, and is checked like one.
    """
    received = await read_submission(request)
    with received.source_positions():
        explanation = await service_of(request).explainer.explain(
            received.submission, body=received.body, tenant=tenant_of(request)
        )
    return await asyncio.to_thread(_response, explanation, form)


@get(
    "/v1/programs/{program:str}/explain",
    operation_class=json_body(texts=200),
    responses={
        200: success_response(ProgramExplanation, "What the program did"),
        **error_responses(404),
    },
    tags=["programs"],
)
async def explain_run(
    request: Request[Any, Any, Any], program: FromPath[str], form: Format = "json"
) -> ASGIResponse:
    """Explain a submitted program, with the tokens of its calls so far."""
    explanation = await service_of(request).explainer.explain_run(
        program, tenant=tenant_of(request)
    )
    return await asyncio.to_thread(_response, explanation, form)


def _response(explanation: ProgramExplanation, form: str) -> ASGIResponse:
    if form == "json":
        return ASGIResponse(
            body=msgspec.json.encode(explanation), status_code=200, media_type="application/json"
        )
    text = to_text(explanation) if form == "text" else to_mermaid(explanation)
    return ASGIResponse(body=text.encode(), status_code=200, media_type=MediaType.TEXT)


ROUTES = (explain_program, explain_run)
