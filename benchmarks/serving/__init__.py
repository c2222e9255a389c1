"""Parts of `benchmarks/engine.py`: cases, the systems that serve them, a lower bound of time."""
