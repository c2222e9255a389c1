"""The schema of the journal: one SQL file per step, applied in order of their numbers."""
