"""Stages of `benchmarks/first_gpu.py`: what is measured as soon as a GPU is there.

`record` keeps the rows of a stage and its time limit, `page` shows them. `smoke`, `suites` (the
stage `tests`), `micro`, `decode`, `grid`, `ours`, `vllm_side`, `programs` and `sweep` are the
stages; `ours` and `vllm_side` serve the same `serving_cases`. `shapes` has the models' shapes.
`pack` is for machines without a network.
"""
