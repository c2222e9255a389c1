"""Benchmarks of the decoder language."""
