"""The endpoint that exports the trace of a program."""

from __future__ import annotations

from typing import Annotated, Any, Final

from litestar import Request, get
from litestar.openapi import ResponseSpec
from litestar.params import FromPath, QueryParameter

from ..openapi import error_responses
from ..request_context import GeneratorResponse, service_of, tenant_of

JSON_LINES: Final = "application/jsonl"

TokenIds = Annotated[
    bool,
    QueryParameter(name="token_ids", description="Include the token ids of prompts and outputs."),
]


@get(
    "/v1/programs/{program:str}/trace",
    responses={
        200: ResponseSpec(
            str,
            generate_examples=False,
            description="One span as JSON per line, the program first",
            media_type=JSON_LINES,
        ),
        **error_responses(404, 409),
    },
    tags=["programs"],
)
async def read_trace(
    request: Request[Any, Any, Any], program: FromPath[str], token_ids: TokenIds = False
) -> GeneratorResponse:
    """Export what the calls of a program read and wrote, for evaluation and fine-tuning.

    The program must have been submitted with the option `trace`. The spans have the attributes of
    OpenInference. A line `{"error": ...}` at the end means that the rest cannot be read.
    """
    lines = await service_of(request).traces.export(
        program, tenant=tenant_of(request), token_ids=token_ids
    )
    return GeneratorResponse(lines, media_type=JSON_LINES)


ROUTES = (read_trace,)
