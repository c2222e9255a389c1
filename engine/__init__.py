"""Tokens and KV memory of one model: fill, generate, free."""
