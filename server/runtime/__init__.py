"""The runtime: runs accepted programs.

program_run     the run of one program, from acceptance to its end
program_state   its values and nodes, without I/O; slot_readiness, node_state
node_context    what node executors may do to their program; node_registry finds them
services        the parts of the server that all programs share; timers, timed_jobs

Subpackages: `admission`, `calls`, `control_flow`, `steps`, `persistence`, `reporting`.
"""
