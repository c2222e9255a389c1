"""Memory of caches on a CPU: huge pages, of which a step has to clear few.

The blocks of a row are scattered over a cache, and with small pages each of them costs a
page-table walk. New pages are zero and take no memory until they are written.

The first write to a huge page takes 0.1 ms, because the system clears the page. On a virtual
machine it takes several milliseconds if the host has not provided the memory yet. All heads of all
caches of a model fill at the same rate. If they began at the same place of a huge page, all of them
would reach the next page in the same step. So they begin at different places.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Final

import torch
from torch import Tensor

HUGE_PAGE: Final = 2**21
"""Bytes of a huge page of x86-64, and of AArch64 with pages of 4 KiB."""
ALIGNMENT: Final = 4096
"""Heads that do not fit into a huge page begin at multiples of this number of bytes."""
_GOLDEN_RATIO: Final = (5**0.5 - 1) / 2
"""The multiples of this number modulo 1 are far from each other, for any count of them."""


def zeros(heads: int, size: int, dtype: torch.dtype, *, number: int) -> Tensor:
    """Return zeros [heads, size] in huge pages, if the system has them.

    Args:
        heads: Heads of the cache.
        size: Elements of a head, which are contiguous.
        dtype: Type of the elements.
        number: Number of caches of the model before this one.
    """
    head_bytes = size * dtype.itemsize
    offset, stride = _placement(heads, head_bytes, number)
    num_bytes = (heads - 1) * stride + head_bytes
    spare = HUGE_PAGE if offset is not None else 0
    # Shared mappings never get huge pages.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, num_bytes + spare, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    start = 0
    if offset is not None:
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        start = (offset - address) % HUGE_PAGE
    count = num_bytes // dtype.itemsize
    elements = torch.frombuffer(memory, dtype=dtype, count=count, offset=start)
    return elements.as_strided((heads, size), (stride // dtype.itemsize, 1))


def _placement(heads: int, head_bytes: int, number: int) -> tuple[int | None, int]:
    """Return where in a huge page the first head begins, and the bytes from a head to the next.

    A huge page has as many parts as the cache has heads, rounded up to a power of two. Each head
    begins in another part, because the distance of two neighbours is an odd number of parts, and
    each cache begins at another place in its part. Heads that fit into a huge page are adjacent,
    at any place.
    """
    if head_bytes < HUGE_PAGE:
        return None, head_bytes
    part = max(ALIGNMENT, HUGE_PAGE >> (heads - 1).bit_length())
    offset = int(number * _GOLDEN_RATIO % 1 * part) // ALIGNMENT * ALIGNMENT
    if heads == 1:
        return offset, head_bytes
    num_parts = -(-head_bytes // part) | 1
    return offset, num_parts * part
