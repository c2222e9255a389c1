"""What computes on a device: the one place where a CPU and an accelerator are told apart.

Knows implementations; refuses to know models. Kept true: everything in a `Backend` fits the
same device, and what it says can be recorded asks the device for no number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from conure.kernels import fused, ops

from .graphs import CudaGraphs, Record
from .step import Prepare


@dataclass(frozen=True, slots=True)
class Backend:
    """A device and who computes there."""

    device: torch.device
    operations: ops.Operations
    prepare: Prepare | None = None
    """Brings plans to the device, None where attention reads them on the host."""
    fused: fused.Fused | None = None
    """What lies between matrix products, None where `lean` knows better."""
    record: Record | None = None
    """Records decode steps, None where that saves nothing; needs `prepare`."""

    @property
    def kind(self) -> str:
        """Of the device: `cpu` or `cuda`."""
        return self.device.type


def of(device: torch.device) -> Backend:
    """Return what computes on a device that exists."""
    if device.type == "cpu":
        return Backend(device, ops.implementation("cpu"))
    # Loaded where they are wanted: a machine without an accelerator needs no triton.
    from conure.kernels.gpu.gpu import Gpu

    torch.cuda.set_device(device)
    gpu = Gpu()
    return Backend(
        device,
        ops.Operations("triton", gpu),
        prepare=gpu.prepare,
        fused=fused.implementation("triton"),
        record=CudaGraphs(device),
    )
