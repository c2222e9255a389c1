"""The kinds of nodes with bodies, one module per kind.

`base` has the records that these kinds extend.
"""
