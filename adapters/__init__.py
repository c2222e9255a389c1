"""Clients of a Conure server, and adapters for other libraries.

`client` holds `Client` and `AsyncClient`, `authoring` sends Python functions as programs,
and `training` makes examples for fine-tuning from traces.
`langchain` and `llamaindex` turn programs of these libraries into Conure programs. `names` makes
unique names for generated nodes and variables, and `nodes` iterates over the nodes of a program.
`call_errors` converts errors of the server to those of one call.
"""
