"""The decoder language: a program as one text, compiled to the records of `program.ir`.

`compiler` is the entrance: text in, `Program` out, without I/O. Two front ends share it. A text in
Python's syntax is parsed and checked by `syntax`, and lowered by the modules of `lowering`. A
template, one growing context with slots, is parsed by `template`. `options` has the options of an
LLM call in both. `submission` compiles what clients send.

Nothing of a text is executed: its syntax tree is translated node by node, from a list of allowed
constructs.
"""
