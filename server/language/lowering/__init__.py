"""Lowering of a syntax tree to nodes and expressions.

`statements` and `loops` lower statements, `blocks` merges their branches. `expressions`,
`comprehensions` and `methods` lower values, `calls` and `generation` calls, `functions` inlines
the functions of the text. `emitter` makes the nodes, `scope` resolves names, `values` has what is
known about a value. `interfaces` has what these modules offer each other.
"""
