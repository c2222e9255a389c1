"""Admission: whether a program is accepted, and how many LLM calls may be open.

intake       accepts submissions, once per idempotency key
preparation  completes submissions: procedure calls, and the defaults of inputs
procedure_library  stores and finds procedures
checks       options, models, functions, constraints and prompt lengths
load         the bounds on open programs and on the estimated wait of a new one
backlog      the open calls that a new program would wait for
call_quota   the limit on open LLM calls, and the map items that wait for it
"""
