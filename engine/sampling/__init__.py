"""Sampling of the next tokens.

- `batch`: turns the sampling parameters of a step's rows into arrays.
- `sampler`: applies these arrays to logits on the device, and samples.
- `token_counts`: token counts of a context, for penalties.
"""
