"""Sessions of prompts with placeholders, as Parrot (OSDI'24) defines them, in two forms.

The form of the paper (section 4.1): `paper` holds submit, set and get; `placeholders` translates
their prompts. The form of Microsoft's client: `client_routes` holds the handlers, `client_calls`
translates its calls, `client_errors` defines its errors.

Both use `sessions`: a session is an open program, and the ids are derived from its own.
"""

from . import client_routes, paper
from .client_errors import error_response

PAPER_ROUTES = paper.ROUTES
CLIENT_ROUTES = client_routes.ROUTES
BODIES = (*paper.BODIES, *client_routes.BODIES)

__all__ = ["BODIES", "CLIENT_ROUTES", "PAPER_ROUTES", "error_response"]
