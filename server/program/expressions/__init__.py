"""Expressions: small pure computations on JSON values, written as JSON.

`evaluate` checks and evaluates them, `operators` has the operators, `regex` the one that matches
patterns, `regex_size` the size of a pattern, `budget` what they may cost, `values` what a JSON
value is, `paths` the places of its parts. `partial_values` handles values of unfinished texts,
`renaming` instances of bodies, `symbolic` the text of a prompt before its values are known.
"""
