"""An engine: a process that runs one model, with fill, generate and free as its operations."""
