"""Constrained output.

- `compiler`: compiles, caches and advances constraints without blocking the step loop.
- `state`: state of one constrained output: mask, forced tokens, completion.
- `grammar`: compiles llguidance grammars, with limits and readable errors.
- `validation`: validates finished texts against relaxed JSON schemas.
- `sandbox`: tries a grammar in a helper process before the engine compiles it.
"""
