"""What computes on a device: the one place where a CPU and an accelerator are told apart.

Knows implementations; refuses to know models. Kept true: everything in a `Backend` fits the
same device, and what it says can be recorded asks the device for no number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from conure.kernels import fused, ops

from .graphs import CudaGraphs, Record


@dataclass(frozen=True, slots=True)
class Backend:
    """A device and who computes there."""

    device: torch.device
    operations: ops.Operations
    fused: fused.Fused | None = None
    """What lies between matrix products, None where `lean` knows better."""
    record: Record | None = None
    """Records decode steps, None where that saves nothing."""

    @property
    def kind(self) -> str:
        """Of the device: `cpu` or `cuda`."""
        return self.device.type


def of(device: torch.device) -> Backend:
    """Return what computes on a device that exists."""
    if device.type == "cpu":
        return Backend(device, ops.implementation("cpu"))
    torch.cuda.set_device(device)
    return Backend(
        device,
        ops.implementation("triton"),
        fused=fused.implementation("triton"),
        record=CudaGraphs(device),
    )
