"""What computes on a device: the one place where a CPU and an accelerator are told apart.

Knows implementations; refuses to know models. Kept true: everything in a `Backend` fits the
same device, and what it says can be recorded asks the device for no number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from conure.kernels import fused, ops

from .api import EngineError
from .graphs import CudaGraphs, Record

Bring: TypeAlias = Callable[[Tensor], Callable[[], Tensor]]
"""Begins to bring a tensor to main memory, behind all that was queued before; what it returns
waits for it."""


@dataclass(frozen=True, slots=True)
class Backend:
    """A device and who computes there."""

    device: torch.device
    operations: ops.Operations
    fused: fused.Fused | None = None
    """What lies between matrix products, None where `lean` knows better."""
    record: Record | None = None
    """Records decode steps, None where that saves nothing."""
    bring: Bring | None = None
    """None where results are in main memory when the call that makes them returns."""

    @property
    def kind(self) -> str:
        """Of the device: `cpu` or `cuda`."""
        return self.device.type


def of(device: torch.device, *, batch_invariant: bool = False) -> Backend:
    """Return what computes on a device that exists.

    Args:
        device: See `device.pick`.
        batch_invariant: What a context gets is to be the same bits in any batch.

    Raises:
        EngineError: `engine.bad_option` where that cannot be.
    """
    if device.type == "cpu":
        return Backend(device, ops.implementation("invariant" if batch_invariant else "cpu"))
    if batch_invariant:
        raise EngineError(
            "engine.bad_option",
            "batch_invariant is for the CPU: on a GPU the matrix library sums in an order that "
            "depends on the batch",
        )
    torch.cuda.set_device(device)
    return Backend(
        device,
        ops.implementation("triton"),
        fused=fused.implementation("triton"),
        record=CudaGraphs(device),
        bring=_bring,
    )


def _bring(found: Tensor) -> Callable[[], Tensor]:
    """Copy to pinned memory behind the work that is queued; see `Bring`."""
    home = found.to("cpu", non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
    copied.record()

    def wait() -> Tensor:
        copied.synchronize()
        return home

    return wait
