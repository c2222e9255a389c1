"""The server: HTTP routes, programs, scheduling, prompts, the journal and its engines.

`cli` and `commands` start it, `app` builds the ASGI application, `service` is the interface that
the routes use, and `executor` implements it.
"""
