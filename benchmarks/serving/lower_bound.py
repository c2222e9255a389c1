"""A lower bound for the time of a case: bytes by bandwidth, products by matrix rate.

Prefill counts the products with the weights only; decoding counts the bytes of the weights and
of every key and value once per step. Attention products and everything else are ignored, so
the bound is too low rather than too high.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from .cases import RequestBatch

_ROUNDS = 7


class MachineSpeed(NamedTuple):
    """Measured rates of this machine, with the number of threads that the systems use."""

    bytes_per_s: float
    """Memory read bandwidth."""
    products_per_s: float
    """Multiplications plus additions per second of a product of the model's shape, in float32 or,
    if the weights have 16 bits and it is faster, in bfloat16, which some processors convert."""


class ModelSizes(NamedTuple):
    """The sizes of a model that determine its time."""

    num_weights: int
    """Weights of the layers, with which each token is multiplied."""
    num_output_weights: int
    """Weights of the output layer, with which each token is multiplied that is followed by a
    generated one."""
    element_bytes: int
    kv_bytes: int
    """Keys and values of one token in all layers."""
    hidden: int
    intermediate: int


def read(folder: Path) -> ModelSizes:
    """Read the sizes of a Llama from its config."""
    config = json.loads((folder / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or hidden // heads
    layer = 2 * hidden * heads * dim + 2 * hidden * kv_heads * dim + 3 * hidden * inner
    layers = config["num_hidden_layers"]
    element = 4 if config.get("dtype") == "float32" else 2
    return ModelSizes(
        layers * layer,
        hidden * config["vocab_size"],
        element,
        layers * 2 * kv_heads * dim * element,
        hidden,
        inner,
    )


def measure(model: ModelSizes, threads: int) -> MachineSpeed:
    """Measure memory bandwidth and matrix rate of this machine, the best of several tries."""
    torch.set_num_threads(threads)
    memory = torch.ones(2**26)
    dtypes = [torch.float32] if model.element_bytes == 4 else [torch.float32, torch.bfloat16]
    read_s, product_s = _best(memory.sum), float("inf")
    for dtype in dtypes:
        left = torch.randn(512, model.hidden).to(dtype)
        right = torch.randn(2 * model.intermediate, model.hidden).to(dtype)
        product_s = min(product_s, _best(partial(torch.nn.functional.linear, left, right)))
    products = 2 * 512 * model.hidden * 2 * model.intermediate
    return MachineSpeed(memory.numel() * 4 / read_s, products / product_s)


def seconds(case: RequestBatch, model: ModelSizes, machine: MachineSpeed) -> float:
    """Return the lower bound of a case in seconds."""
    products = 2 * model.num_weights * case.num_distinct
    products += 2 * model.num_output_weights * len(case.prompts)
    prompt_s = products / machine.products_per_s
    num_kv = case.num_prefix + sum(len(p) - case.num_prefix for p in case.prompts)
    # The first token of an output is part of the prefill.
    steps = case.max_tokens - 1
    grown = len(case.prompts) * steps * (steps + 1) / 2
    num_weights = model.num_weights + model.num_output_weights
    num_bytes = float(steps * num_weights * model.element_bytes)
    num_bytes += (steps * num_kv + grown) * model.kv_bytes
    return prompt_s + num_bytes / machine.bytes_per_s


def _best(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begin)
    return best
