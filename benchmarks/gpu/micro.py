"""Ceilings of the device, and each part of a decode step of Llama 3 8B by itself.

Device times are those of a recorded graph between two events. `of_copy` compares the bytes that
a row must read with the bandwidth of a copy, measured first.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from conure.engine.protocol import SamplingParams
from conure.engine.runner.base import ScheduledSequence
from conure.engine.sampling import batch, sampler
from conure.kernels import elementwise, ops, sampling
from conure.kernels.gpu import linear
from conure.kernels.planning.planner import Planner

from .record import Figures, StageRecord

PRODUCTS: Final = (
    ("qkv", 6144, 4096),
    ("o", 4096, 4096),
    ("gate_up", 28_672, 4096),
    ("down", 4096, 14_336),
    ("lm_head", 128_256, 4096),
)
"""Name, outputs and inputs of each product of a layer."""
ATTENTION: Final = ((1, 1024), (1, 1019), (8, 1019), (64, 1024), (64, 1019))
"""Contexts and tokens of each; 1,019 ends inside a tile of keys."""
SAMPLING: Final[dict[str, dict[str, Any] | None]] = {
    "greedy": None,
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
}
HEADS, KV_HEADS, DIM, WIDTH, INNER = 32, 8, 128, 4096, 14_336
OUTPUTS: Final = (1, 2, 4)
"""Outputs of a program of our product, compared."""
PRODUCT_ERROR: Final = 5e-3
"""Relative error of a product that rounding to bfloat16 explains."""
REPLAYS: Final = 5
CACHED_BYTES: Final = 300 * 10**6
"""Weights of a product are repeated until they exceed the caches by far."""


class Micro:
    """Measures parts on one device."""

    def __init__(self, record: StageRecord, device: torch.device, *, is_tiny: bool) -> None:
        self._record, self._device = record, device
        self._scale = 64 if is_tiny else 1
        self._rounds = 3 if is_tiny else 15
        self._copy_rate = 1.0

    def run(self) -> None:
        """Measure all parts in the order in which they explain a step."""
        self._ceilings()
        self._launches()
        for name, num_out, num_in in PRODUCTS:
            self._product(name, num_out // self._scale, num_in // self._scale)
        for num_tokens in (1, 64, 4096 // self._scale):
            self._elementwise(num_tokens)
        for num_rows, length in ATTENTION:
            self._record.measure(
                f"attention B{num_rows} S{length}",
                lambda num_rows=num_rows, length=length: self._attention(num_rows, length),  # type: ignore[misc]
            )
        for name, chosen in SAMPLING.items():
            self._record.measure(
                f"sampling 64 rows, {name}",
                lambda chosen=chosen: self._sampling(chosen),  # type: ignore[misc]
            )

    def _us(self, run: Callable[[], object], parts: int = 1) -> float:
        """Return microseconds of one of `parts` equal parts of a recorded function."""
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        samples = []
        for _ in range(self._rounds):
            begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            begin.record()
            for _ in range(REPLAYS):
                graph.replay()
            end.record()
            end.synchronize()
            samples.append(float(begin.elapsed_time(end)) * 1e3 / REPLAYS / parts)
        return statistics.median(samples)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self._device, dtype=torch.bfloat16)

    def _ceilings(self) -> None:
        size = 2**31 // self._scale**2

        def copy() -> Figures:
            source, target = (
                torch.zeros(size, dtype=torch.uint8, device=self._device) for _ in range(2)
            )
            us = self._us(lambda: target.copy_(source))
            self._copy_rate = 2 * size / us
            return {"us": us, "TB_per_s": self._copy_rate / 1e6}

        def read(num_bytes: int) -> Figures:
            numbers = torch.zeros(num_bytes // 4, dtype=torch.float32, device=self._device)
            us = self._us(lambda: numbers.sum())
            return {"us": us, "TB_per_s": num_bytes / us / 1e6}

        def product() -> Figures:
            side = 8192 // self._scale
            left, right = self._random(side, side), self._random(side, side)
            us = self._us(lambda: left @ right)
            return {"us": us, "TFLOP_per_s": 2 * side**3 / us / 1e6}

        self._record.measure("copy of 2 GiB", copy)
        self._record.measure("read 2 GiB", lambda: read(size))
        self._record.measure("read 32 MiB in the L2 cache", lambda: read(2**25 // self._scale))
        self._record.measure("product 8192 x 8192", product)

    def _launches(self) -> None:
        number = torch.zeros(1, device=self._device)

        def chain() -> None:
            for _ in range(200):
                number.add_(1)

        def launch() -> Figures:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                chain()
            torch.cuda.synchronize()
            us = self._host_us(graph.replay, 30)
            torch.cuda.synchronize()
            return {"us": us}

        self._record.measure("a tiny kernel in a graph", lambda: {"us": self._us(chain, 200)})
        self._record.measure("host: launch a graph of 200 kernels", launch)

    def _product(self, name: str, num_out: int, num_in: int) -> None:
        num_bytes = num_out * num_in * 2
        count = max(2, CACHED_BYTES // self._scale**2 // num_bytes + 1)
        weights = [self._random(num_out, num_in) for _ in range(count)]
        for num_tokens in (1, 8, 64, 128, 4096):
            if name == "lm_head" and num_tokens == 4096:
                continue  # only rows that sample reach it

            def product(num_tokens: int = num_tokens) -> Figures:
                inputs = self._random(num_tokens, num_in)
                us = self._us(lambda: [functional.linear(inputs, w) for w in weights], count)
                flops = 2 * num_tokens * num_out * num_in
                share = num_bytes / us / self._copy_rate
                figures = {"us": us, "of_copy": share, "TFLOP_per_s": flops / us / 1e6}
                if num_tokens == 1:
                    figures |= {
                        f"ours_{outputs}_us": self._ours(inputs, weights, outputs)
                        for outputs in OUTPUTS
                    }
                return figures

            self._record.measure(f"product {name}, {num_tokens} tokens", product)

    def _ours(self, inputs: Tensor, weights: list[Tensor], outputs: int) -> float:
        """Return the microseconds of a product of our own.

        Raises:
            AssertionError: if its result differs from torch's.
        """
        expected = functional.linear(inputs.float(), weights[0].float())
        found = linear.linear_of_one(inputs, weights[0], None, outputs=outputs).float()
        error = float((found - expected).norm() / expected.norm())
        assert error < PRODUCT_ERROR, f"relative error {error:.2g}"
        return self._us(
            lambda: [linear.linear_of_one(inputs, w, None, outputs=outputs) for w in weights],
            len(weights),
        )

    def _elementwise(self, num_tokens: int) -> None:
        operations = elementwise.implementation("triton")
        hidden, delta = self._random(num_tokens, WIDTH), self._random(num_tokens, WIDTH)
        weight = self._random(WIDTH)
        gate_up = self._random(num_tokens, 2 * INNER)
        mixed = self._random(num_tokens, (HEADS + 2 * KV_HEADS) * DIM)
        at = torch.arange(num_tokens, device=self._device)
        angles = self._random(4096, DIM), self._random(4096, DIM)
        caches = self._random(260, 16, KV_HEADS, DIM), self._random(260, 16, KV_HEADS, DIM)
        runs: dict[str, Callable[[], object]] = {
            "add_norm": lambda: operations.add_norm(hidden, delta, weight, 1e-5),
            "rotate_store": lambda: operations.rotate_store(
                mixed, at, at, angles, None, 1e-5, caches
            ),
            "silu_mul": lambda: operations.silu_mul(gate_up),
        }
        for name, run in runs.items():
            self._record.measure(
                f"{name}, {num_tokens} tokens",
                lambda run=run: {  # type: ignore[misc]
                    "us": self._us(lambda: [run() for _ in range(20)], 20),
                    "host_us": self._host_us(run, 50),
                },
            )
            torch.cuda.synchronize()

    def _attention(self, num_rows: int, length: int) -> Figures:
        operations = ops.implementation("triton")
        layers, width = (2 if self._scale > 1 else 8), -(-length // 16)
        caches = [
            (
                self._random(num_rows * width, 16, KV_HEADS, DIM),
                self._random(num_rows * width, 16, KV_HEADS, DIM),
            )
            for _ in range(layers)
        ]
        blocks = random.Random(num_rows).sample(range(num_rows * width), num_rows * width)
        tables = [blocks[row * width : (row + 1) * width] for row in range(num_rows)]
        plan = Planner(block_size=16).plan([1] * num_rows, [length] * num_rows, tables)
        query = self._random(num_rows, HEADS, DIM)
        out = torch.empty_like(query)

        def attend() -> None:
            for keys, values in caches:
                operations.attention(query, keys, values, plan, scale=DIM**-0.5, out=out)

        us = self._us(attend, layers)
        num_bytes = num_rows * length * 2 * KV_HEADS * DIM * 2
        host_us = self._host_us(attend, 20) / layers
        torch.cuda.synchronize()
        return {"us": us, "of_copy": num_bytes / us / self._copy_rate, "host_us": host_us}

    def _sampling(self, chosen: dict[str, Any] | None) -> Figures:
        vocabulary = 128_256 // self._scale
        logits = self._random(64, vocabulary)
        made = batch.make_batch(list(_rows(64, chosen or {})), (2,), vocabulary)
        edits: sampler.LogitOpsBatch[Tensor] | None = None
        if made is not None:
            edits = sampler.LogitOpsBatch(
                *(torch.from_numpy(array).to(self._device) for array in made.ops)
            )
        ours, torch_only = (
            self._us(lambda each=each: sampler.sample_tokens(logits, edits, 0, each))  # type: ignore[misc]
            for each in map(sampling.implementation, ("triton", "reference"))
        )
        return {"us": ours, "reference_us": torch_only}

    def _host_us(self, run: Callable[[], object], repeats: int) -> float:
        """Return microseconds that the host needs to start a function."""
        for _ in range(3):
            run()
        begin = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - begin) / repeats * 1e6


def _rows(num: int, chosen: dict[str, Any]) -> Iterator[ScheduledSequence]:
    for index in range(num):
        params = SamplingParams(max_tokens=9, seed=index, **chosen)
        yield ScheduledSequence(index, [1] * 9, 8, 1, [0], params, 4)
