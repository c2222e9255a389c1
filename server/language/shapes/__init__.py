"""Statements of one shape, compiled once for all that a text has.

Long texts repeat their statements with other names and texts. `slots` splits a text into statements
and finds their shapes, `trees` parses one statement of each shape, `recording` compiles it with
markers in place of its slots, and `replay` fills in the slots of the others.

Invariant: a text gives the same program as if each of its statements were compiled alone. Where
that is not certain, `SharingError` is raised, and the caller compiles the text without sharing.
"""
