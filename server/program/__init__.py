"""The language of programs, shared by server and clients: records, checks and analysis.

`ir` and `content` have the records of a submission, `nodes` one module per kind of node, `graph`
the checked graph, `expressions` the computations on values, `status` the records of a report;
`decode` reads all of them from JSON. msgspec is the only dependency, and nothing here does I/O.
"""
