"""KV memory of one model.

- `manager`: allocates, shares, preempts and releases the blocks of contexts.
- `prefix_sharing`: finds KV that already exists for a context's tokens.
- `eviction`: orders the contexts that lose KV when blocks run out.
- `block_cache`: combines `block_allocator` (reference counts) and `radix_tree` (prefix tree).
- `capacity`: derives the limits of an engine from its model and memory.
"""
