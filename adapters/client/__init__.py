"""Clients of a Conure server, for threads and for asyncio.

`async_client` holds `AsyncClient` and `AsyncRun`; `sync_client` is generated from it. What the two
do differently is in `async_io` and `sync_io`. `exchange` describes requests, replies and retries
without I/O, `json_encoding` encodes their bodies, `connection` holds settings and the state of
event streams, `sse` parses event streams, `local_app` runs a server in this process, and
`io_thread` sends requests that no caller waits for. `client_steps` runs the functions that a
program requests from its client, and `failures` finds the failure to report. `cancellation` and
`client_cache` serve the LangChain and LlamaIndex adapters.
"""

from .async_client import AsyncClient, AsyncRun
from .client_steps import StepResult
from .exchange.problems import NotReadyError, ServerUnreachableError
from .exchange.retry import Retry
from .sync_client import Client, Run

__all__ = [
    "AsyncClient",
    "AsyncRun",
    "Client",
    "NotReadyError",
    "Retry",
    "Run",
    "ServerUnreachableError",
    "StepResult",
]
