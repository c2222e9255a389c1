"""Reporting: status records, receipts and usage reports. Pure functions.

status    programs, nodes and variables as clients see them
receipt   tokens, critical path and cost of an ended program; usage of a tenant
activity  what engines hold and which calls wait, over all programs
"""
