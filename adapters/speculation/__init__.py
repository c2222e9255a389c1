"""Speculative execution of an application's model calls, for any framework.

- `planned_call`: a call that is expected, and the key by which the application's call finds it.
- `registry`: the calls of one run: which are planned, claimed, answered or failed.
- `siblings`: how long the first value of a stage waits for the others.
- `outbox`: the requests that bring these calls to the server, in open programs.
- `run`: the driver that sends the requests and reads the events, for threads and coroutines.
- `request_tasks`: the requests without an answer, and the end of those that get none.
- `answer_stream`: reads one answer from the events of its program.
- `active_run`: the context variable with the active run.
"""
