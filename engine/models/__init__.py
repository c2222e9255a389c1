"""Transformers models: which ones can run, and how they are loaded and computed.

`registry` finds and loads models by name, from folders that `checkpoint` reads, with the weights of
`weights`; `builtin` is the model that ships with Conure. `inspection` tells why a folder cannot be
loaded. `attention_hook` connects models to paged attention, `probe` tests that a model is correct
with it, and `batch_invariance` that its results do not depend on the batch. `fused_decoder` is a
fused forward pass.
"""
