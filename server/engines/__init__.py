"""The server's side of engines.

`protocol` is the interface that the rest of the server uses; `connection` implements it for an
engine process, started by `command_line` and kept running by `fleet`. `reports` merges the reports
of several steps, `step_costs` fits what a step costs. `heartbeat` detects a stopped process.
`constraint_validator` lets engines check whether they can enforce a constraint.
"""
