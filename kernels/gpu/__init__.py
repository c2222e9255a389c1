"""Attention over shared, paged keys and values in Triton. Importing a file here loads triton."""
