"""Models and runners for tests and benchmarks.

`scripted_runner` is the fake engine's runner, which checks its KV memory in `token_memory`.
`random_model` creates the model `seeded`, and `dummy_checkpoint` writes a model with random weights
for any config. `fake_cuda` is a CUDA device that checks its calls and computes nothing.
"""
