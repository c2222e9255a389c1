"""Reporting: status records, receipts, usage reports and traces.

status          programs, nodes and variables as clients see them
receipt         tokens, critical path and cost of an ended program; usage of a tenant
trace_records   what calls read and wrote, as stored
spans           traces in the names of OpenInference
trace_exporter  reads traces from the journal

All but the last are pure functions and records.
"""
