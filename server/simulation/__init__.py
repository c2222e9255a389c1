"""Programs on thousands of engines in virtual time: our decisions, and a model of the rest."""
