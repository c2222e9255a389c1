"""Chains whose model calls run ahead of them.

`accelerate` is the entry point. `planner` makes the `plan` of a chain; `instrument` copies the
chain with `probes`. `chain_run` answers the calls of one run and fills its `run_stats`;
`active_run` is the run of the caller's context. Matching and sending of calls is in
`adapters/speculation`.
"""
