"""Runners: the forward pass of a step, from rows of tokens to sampled ids.

`base` is the interface, which the engine core uses; `torch_runner` implements it for the models of
`conure.engine.models`. `device` and `backend` choose the hardware, `step_inputs` and `staging` pack
the inputs of a step and copy them to the device, and `cuda_graphs` records decode steps. `openmp`
configures torch's threads before torch is loaded.

Runners are registered by name in `engine/config.py`.
"""
