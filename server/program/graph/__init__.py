"""The graph of a program: nodes, slots and edges, and what can be derived from them.

`graph` is the graph itself, `tables` its data, `extension` the checks of new nodes (with
`name_resolution` and `edges`), `instances` the expansion of bodies, `toposort` the order of slots.
`objectives` and `critical_path` derive what each call is worth and when it must start, from a
`slot_graph` of the nodes that have not ended.
"""
