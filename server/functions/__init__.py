"""Functions that `call` nodes may name.

registry       which functions a server has, with their signatures and capabilities
threads        runs synchronous functions off the event loop, bounded by their timeouts
plugins        functions of installed packages (entry points) and of the operator's modules
json_, lists, text, calc, vote    the functions that every server has
retrieve       full-text search in a folder that the operator names
sandboxed_python    Python code in a sandbox, an optional extra
"""
