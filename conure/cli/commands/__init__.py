"""One module per command, named like the command.

A module defines `add_arguments(parser)` and `run(arguments)`, which returns the exit code.
"""
