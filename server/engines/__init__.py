"""Engines as the server sees them: processes, and the fleet they form."""
