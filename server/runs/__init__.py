"""Programs at work: from a checked graph to values, events and a receipt."""
