"""Compilation of a LangChain chain to a program.

`compiler` compiles a chain (`to_program`), with `control_flow` for branches, maps and retries and
`prompts` for templates; `traversal` lists the parts of a chain. `values` are the symbolic values
between Runnables, and `value_steps` select from them; `chain_graph` and `bodies` collect nodes;
`compiled_chain` runs the program, and `deserializers` convert its outputs.
"""
