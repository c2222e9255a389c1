"""One copy a step from main memory to the device.

What a step needs there (ids, positions, tables of the plan, parameters of sampling) are
small arrays. Each copy of its own would cost more to launch than to make, so they are laid
side by side in one buffer of pinned memory, copied at once, and looked at as slices of one
buffer on the device. That buffer never moves: arrays of the same shapes in the same order
come to lie at the same addresses, which is what a recorded graph reads from.

Knows arrays and a device; refuses to know what they mean. Kept true: a slice holds what was
put until the next `put`, and no copy that is still under way is written over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT: Final = 256
"""Slices begin at multiples of this many bytes, like allocations of their own."""
_NUM_HOSTS: Final = 2
"""Buffers in main memory: one is filled while the copy of the other may not have begun."""


class Staging:
    """A buffer on a device, and what it is filled from."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        """Allocate for `num_bytes` of arrays; for 0 arrays in main memory stay where they are."""
        self._device = device
        self._stays = device.type == "cpu" and not num_bytes
        self._target = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        pins = device.type == "cuda"
        self._hosts = [
            torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pins) for _ in range(_NUM_HOSTS)
        ]
        self._copied = [
            torch.cuda.Event() if pins else None  # type: ignore[no-untyped-call]  # torch's
            for _ in range(_NUM_HOSTS)
        ]
        self._turn = 0

    def holds(self, arrays: Sequence[NDArray[Any]]) -> bool:
        """Say whether there is room for all of these arrays."""
        return sum(array.nbytes + ALIGNMENT for array in arrays) <= len(self._target)

    def put(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        """Bring arrays to the device; return them there, in their order and shapes.

        Arrays for which no room is left come by a copy of their own.
        """
        if self._stays:
            return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
        self._turn = (self._turn + 1) % _NUM_HOSTS
        host, copied = self._hosts[self._turn], self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        memory = host.numpy()
        found: list[Tensor] = []
        end = 0
        for array in arrays:
            begin = -(-end // ALIGNMENT) * ALIGNMENT
            if begin + array.nbytes > len(memory):
                found.append(torch.from_numpy(np.ascontiguousarray(array)).to(self._device))
                continue
            end = begin + array.nbytes
            memory[begin:end].view(array.dtype).reshape(array.shape)[...] = array
            whole = self._target[begin:end].view(_DTYPES[array.dtype.char])
            found.append(whole.view(array.shape))
        self._target[:end].copy_(host[:end], non_blocking=True)
        if copied is not None:
            copied.record()
        return found


_DTYPES: Final = {
    np.dtype(of).char: torch.from_numpy(np.empty(0, dtype=of)).dtype
    for of in (np.int64, np.int32, np.uint8, np.float32, np.float64)
}
