"""One seed for several answers to one prompt.

Kept true: equal seeds and indices give equal seeds; every index has noise of its own.
"""

from __future__ import annotations

import hashlib


def seed_of_answer(seed: int, index: int) -> int:
    """The seed of answer `index` (from 1: the first answer keeps its own), 56 bits."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=7).digest()
    return int.from_bytes(digest)
