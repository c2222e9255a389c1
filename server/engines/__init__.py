"""Engines as the server sees them: processes, the fleet they form, and the queue before them."""
