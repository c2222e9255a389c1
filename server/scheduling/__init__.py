"""Scheduling: which call runs next, and on which engine.

`request` holds the records that describe a call, `policy` ranks calls and costs engines,
`scheduler` keeps the wait queues and starts calls, `engine_index` finds the engines worth
considering, `reservations` accounts the tokens of one engine, `memory_forecast` predicts its peak,
`service_time` estimates durations, and `session_usage` lets the programs of one session share a
place in the queue.
"""
