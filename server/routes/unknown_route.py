"""The error of a route that does not exist: what is wrong with the URL, and how to correct it.

Most such requests come from a wrong base URL. The message says how to correct it if the cause is
recognized.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_API = "/v1"
MAX_PATH_LENGTH = 512
"""Maximum length of a path in which a wrong base URL is searched for."""
MAX_BASE_PARTS = 8
"""Maximum number of path segments of a wrong base URL."""
_UNSERVED = ("audio", "images", "moderations", "files", "batches", "fine_tuning", "assistants")
"""First path segments of the OpenAI endpoints that this server does not have."""


def explain_unknown_route(path: str, routes: Iterable[str]) -> str:
    """Return why no route has this path, and what to do.

    Args:
        path: path of the request.
        routes: paths of the server's routes; a parameter is in braces, with its type.
    """
    known = list(routes)
    message = f"route {path} does not exist"
    if re.match(r"/v1/+v1(/|$)", path):
        return (
            f"{message}: the base URL has /v1, and the client adds it again; end the base URL with "
            "the port for Conure's and Parrot's clients, and with one /v1 for OpenAI's"
        )
    inner = path.find(f"{_API}/", 1)
    if inner > 0 and _is_known(path[inner:], known):
        return (
            f"{message}: the base URL has the path {path[:inner]}; remove it, or let the proxy "
            "remove it"
        )
    if not path.startswith(f"{_API}/"):
        if _is_known(_API + path, known):
            return f"{message}: add {_API} to the base URL, as in http://HOST:PORT{_API}"
        if (base := _wrong_base(path, known)) is not None:
            return f"{message}: the base URL ends with {base}; end it with {_API} instead"
        return message
    plain = [route for route in known if "{" not in route]
    for route in plain:
        # A base URL that ends with an endpoint, to which the client adds another one.
        is_base = route.startswith(f"{_API}/") and path.startswith(f"{route}/")
        if is_base and _is_known(_API + path.removeprefix(route), known):
            return f"{message}: end the base URL with {_API}, without {route.removeprefix(_API)}"
    if path.removeprefix(f"{_API}/").split("/")[0] in _UNSERVED:
        return f"{message}: this server generates text only and does not have this endpoint"
    near = difflib.get_close_matches(path, plain, 1, 0.8)
    return f"{message}: did you mean {near[0]}?" if near else f"{message}; /schema lists the routes"


def _wrong_base(path: str, known: Iterable[str]) -> str | None:
    """Return the part of the path that must be replaced by `/v1`.

    None if the rest is not a route.
    """
    if len(path) > MAX_PATH_LENGTH:
        return None
    # Here, a parameter of type path matches one segment only: `/assets/models/a/b.js` is not the
    # model `a/b.js`.
    routes = [route.replace(":path}", "}") for route in known]
    ends = [match.start() + 1 for match in re.finditer("/", path[1:])][:MAX_BASE_PARTS]
    return next((path[:end] for end in ends if _is_known(_API + path[end:], routes)), None)


def _is_known(path: str, routes: Iterable[str]) -> bool:
    return any(re.fullmatch(_pattern(route), path) for route in routes)


def _pattern(route: str) -> str:
    """Return the regular expression for the paths of a route."""
    with_paths = re.sub(r"\\\{\w+:path\\\}", ".+", re.escape(route))
    return re.sub(r"\\\{.*?\\\}", "[^/]+", with_paths)
