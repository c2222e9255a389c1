"""Parts of `benchmarks/engine.py`: cases, those who serve them, and the floor beneath."""
