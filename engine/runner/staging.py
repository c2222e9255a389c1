"""Staging buffer: one copy per step from main memory to the device.

A step needs small arrays on the device: ids, positions, the plan's tables, sampling parameters.
Launching a copy for each would cost more than the copies themselves, so the arrays are packed into
one pinned buffer, copied at once, and read as slices of one device buffer. The device buffer never
moves: arrays of the same shapes in the same order get the same addresses, which a recorded graph
reads from.

Invariants: a slice is valid until the next `put`. A host buffer is not overwritten while it is
being copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT: Final = 256
"""Slices start at multiples of this many bytes, like separate allocations."""
_NUM_HOST_BUFFERS: Final = 2
"""One is filled while the copy of the other may not have started."""


class Staging:
    """A device buffer and the host buffers that fill it."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        """Allocate `num_bytes` on both sides. With 0 on a CPU, arrays are used in place."""
        self._device = device
        self._is_in_place = device.type == "cpu" and not num_bytes
        self._target = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        is_pinned = device.type == "cuda"
        self._hosts = [
            torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
            for _ in range(_NUM_HOST_BUFFERS)
        ]
        self._copied = [
            torch.cuda.Event() if is_pinned else None  # type: ignore[no-untyped-call]  # torch's
            for _ in range(_NUM_HOST_BUFFERS)
        ]
        self._turn = 0

    def fits(self, arrays: Sequence[NDArray[Any]]) -> bool:
        """Return whether all arrays fit into the buffer."""
        return sum(array.nbytes + ALIGNMENT for array in arrays) <= len(self._target)

    def put(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        """Copy arrays to the device; return them in the same order and shapes.

        An array that does not fit into the rest of the buffer is copied separately.
        """
        if self._is_in_place:
            return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
        self._turn = (self._turn + 1) % _NUM_HOST_BUFFERS
        host, copied = self._hosts[self._turn], self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        memory = host.numpy()
        staged: list[Tensor] = []
        end = 0
        for array in arrays:
            begin = -(-end // ALIGNMENT) * ALIGNMENT
            if begin + array.nbytes > len(memory):
                staged.append(torch.from_numpy(np.ascontiguousarray(array)).to(self._device))
                continue
            end = begin + array.nbytes
            memory[begin:end].view(array.dtype).reshape(array.shape)[...] = array
            flat = self._target[begin:end].view(_DTYPES[array.dtype.char])
            staged.append(flat.view(array.shape))
        self._target[:end].copy_(host[:end], non_blocking=True)
        if copied is not None:
            copied.record()
        return staged


_DTYPES: Final = {
    np.dtype(of).char: torch.from_numpy(np.empty(0, dtype=of)).dtype
    for of in (np.int64, np.int32, np.uint8, np.float32, np.float64)
}
