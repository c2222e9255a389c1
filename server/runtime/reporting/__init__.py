"""Reporting: status records, receipts and usage reports. Pure functions.

status    programs, nodes and variables as clients see them
receipt   tokens, critical path and cost of an ended program; usage of a tenant
single_requests  how long a parallel client would have taken for the same calls
"""
