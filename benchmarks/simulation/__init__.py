"""A simulator of programs on thousands of engines in virtual time.

`simulation` runs programs with the server's own scheduler, `engine` models the duration of steps,
`clock` is the event queue, and `workload_profile` reduces a program to what its calls cost.
"""
