"""Are results right on this device? Kernels, the operations between products, sampling, a model.

Each row holds the largest relative error and its bound. A wrong row fails the stage.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

import decode_step
from attention import checks, configuration_checks
from conure.engine.protocol import SamplingParams
from conure.engine.runner.base import ScheduledSequence
from conure.engine.sampling import batch, sampler
from conure.kernels import elementwise, ops, sampling

from .record import Figures, StageRecord

ELEMENTWISE_BOUND: Final = 1e-2
"""Relative error in bfloat16: one rounding of the result and one of the sum."""
VOCABULARY: Final = 128_256


class WrongError(AssertionError):
    """A result is not accurate."""


def run(record: StageRecord, device: torch.device, *, is_tiny: bool) -> None:
    """Check everything; the rows that matter most come first."""
    operations = ops.implementation("triton")
    kept = configuration_checks.attention_configurations()
    configurations = kept[:: len(kept) // 3] if is_tiny else kept
    for variant in checks.VARIANTS[:2] if is_tiny else checks.VARIANTS:
        record.measure(
            f"attention, {variant.name}",
            lambda variant=variant: _judged(  # type: ignore[misc]  # the loop's own value
                checks.variant_error(variant, operations, device), checks.BOUNDS[variant.dtype]
            ),
        )
    for configuration, shape in configurations:
        record.measure(
            configuration.name,
            lambda configuration=configuration, shape=shape: _judged(  # type: ignore[misc]
                configuration_checks.configuration_error(configuration, shape, device),
                checks.BOUNDS[shape.dtype],
            ),
        )
    for name, check in _elementwise_checks(device):
        record.measure(f"elementwise, {name}", lambda check=check: check())  # type: ignore[misc]
    record.measure("sampling, as on the CPU", lambda: _sampling(device, is_tiny=is_tiny))


def run_model(record: StageRecord, device: torch.device) -> None:
    """Compare a small model with the CPU."""
    record.measure("a small model, as on the CPU", lambda: _small_model(str(device)))


def _judged(error: float, bound: float) -> Figures:
    if not error <= bound:
        raise WrongError(f"relative error {error:.2g} above {bound:g}")
    return {"error": error, "bound": bound}


def _elementwise_checks(device: torch.device) -> Iterator[tuple[str, Callable[[], Figures]]]:
    """Yield the checks of a Llama 3 8B's shapes, with 1 and 65 tokens."""
    ours, reference = (elementwise.implementation(name) for name in ("triton", "reference"))
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, torch.bfloat16)

    def compared(run: Callable[[elementwise.ElementwiseOperations], Tensor]) -> Figures:
        found, expected = run(ours).float(), run(reference).float()
        return _judged(float((found - expected).norm() / expected.norm()), ELEMENTWISE_BOUND)

    for tokens in (1, 65):
        hidden, delta, weight = random(tokens, 4096), random(tokens, 4096), random(4096)
        gate_up = random(tokens, 28_672)
        mixed, angles = random(tokens, 48 * 128), (random(512, 128), random(512, 128))
        at = torch.arange(tokens, device=device)
        caches = (random(8, 16, 8, 128), random(8, 16, 8, 128))
        yield (
            f"add_norm {tokens}",
            lambda hidden=hidden, delta=delta, weight=weight: compared(  # type: ignore[misc]
                lambda each: each.add_norm(hidden.clone(), delta, weight, 1e-5)
            ),
        )
        yield (
            f"silu_mul {tokens}",
            lambda gate_up=gate_up: compared(lambda each: each.silu_mul(gate_up)),  # type: ignore[misc]
        )
        yield (
            f"rotate_store {tokens}",
            lambda mixed=mixed, at=at, angles=angles, caches=caches: compared(  # type: ignore[misc]
                lambda each: _rotated(each, mixed, at, angles, caches)
            ),
        )


def _rotated(
    operations: elementwise.ElementwiseOperations,
    mixed: Tensor,
    at: Tensor,
    angles: tuple[Tensor, Tensor],
    caches: tuple[Tensor, Tensor],
) -> Tensor:
    """Return queries, keys and values of a rotation as one vector."""
    keys, values = (cache.clone() for cache in caches)
    query = operations.rotate_store(mixed, at, at, angles, None, 1e-5, (keys, values))
    return torch.cat([query.flatten(), keys.flatten(), values.flatten()])


def _sampling(device: torch.device, *, is_tiny: bool) -> Figures:
    """Sample rows with all kinds of parameters on the device and on the CPU."""
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 0.8},
        {"temperature": 1.1, "top_p": 0.9, "top_k": 40},
        {"temperature": 0.7, "min_p": 0.05},
        {"repetition_penalty": 1.2, "logit_bias": ((3, 1.0),)},
    )
    width = 512 if is_tiny else VOCABULARY
    rows = [
        ScheduledSequence(
            index,
            [1, 2, 3],
            2,
            1,
            [0],
            SamplingParams(max_tokens=9, seed=index, **kinds[index % len(kinds)]),
            2,
        )
        for index in range(40)
    ]
    logits = 3 * torch.randn(40, width, generator=torch.Generator().manual_seed(1))
    expected = batch.sample(logits.clone(), rows, (5,))
    made = batch.make_batch(rows, (5,), width)
    assert made is not None
    there: sampler.LogitOpsBatch[Tensor] = sampler.LogitOpsBatch(
        *(torch.from_numpy(array).to(device) for array in made.ops)
    )
    operations = sampling.implementation("triton")
    found = sampler.sample_tokens(logits.to(device), there, made.num_top, operations)
    different = int((found.cpu() != torch.tensor(expected, dtype=found.dtype)).sum())
    # Two tokens whose sums differ by rounding may change places.
    if different > 1:
        raise WrongError(f"{different} of 40 tokens differ from the CPU's")
    return {"different": different}


def _small_model(device: str) -> Figures:
    with tempfile.TemporaryDirectory() as scratch:
        return {"tokens": decode_step.check(Path(scratch), device)}
