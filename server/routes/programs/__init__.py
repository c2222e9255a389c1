"""The endpoints of programs.

programs       submit, list, read, append, cancel; variables
submissions    the body of a submission: a graph, or a text that is compiled
waiting        requests that wait while their client is connected
events         the event stream
explain        what a program would do, and what it did
procedures     stored procedures
functions      the functions that programs may call
"""
