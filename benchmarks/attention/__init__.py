"""The parts of `kernels.py`: rows, scenes, contenders, clocks, checks and reports."""
