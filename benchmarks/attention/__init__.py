"""The parts of `kernels.py`: rows, cases, contenders, clocks, checks and reports."""
