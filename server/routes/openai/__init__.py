"""The OpenAI API: chat completions, completions, responses and models.

Requests: `request_fields` has the fields that all share; `chat`, `completions` and
`response_request` translate to calls; `session` appends calls to a session. `execution` follows the
calls. Responses: `chat_answers`, `completion_answers`, `response_answers`, `errors`; `streaming`
has the form of streams. Handlers: `routes`, `response_routes`, `embeddings`.
"""

from . import embeddings, response_routes, routes
from .errors import error_response

ROUTES = (*routes.ROUTES, *response_routes.ROUTES, *embeddings.ROUTES)
BODIES = (*routes.BODIES, *response_routes.BODIES, *embeddings.BODIES)

__all__ = ["BODIES", "ROUTES", "error_response"]
