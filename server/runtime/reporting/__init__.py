"""Reporting: status records, receipts, usage reports and traces.

status           programs, nodes and variables as clients see them
receipt          tokens, critical path and cost of an ended program; usage of a tenant
single_requests  how long a parallel client would have taken for the same calls
request_times    the time of single requests outside the engines
activity         what engines hold and which calls wait, over all programs
trace_records    what calls read and wrote, as stored
spans            traces in the names of OpenInference
trace_exporter   reads traces from the journal

All but `activity`, `request_times` and `trace_exporter` are pure functions and records.
"""
