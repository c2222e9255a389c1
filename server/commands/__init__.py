"""What the command line does: serve, and run a file."""
