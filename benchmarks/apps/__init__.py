"""The six applications of the Parrot paper (OSDI'24, section 8), generated from lengths alone.

`programs` builds them, `workloads` compares systems in the simulator, `scaled_workloads` scales
them down for a real engine, `setting` and `tabulated_cost` hold the paper's machines as cost
models, `cost_fit` fits a cost model to a running server, `client` sends programs over HTTP.
"""
