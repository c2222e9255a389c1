"""The seeds of several answers to one prompt.

Invariants: equal seeds and indices give equal seeds; different indices give independent ones.
"""

from __future__ import annotations

import hashlib


def seed_of_answer(seed: int, index: int) -> int:
    """Return the 56-bit seed of answer `index`, from 1; answer 0 uses the given seed."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=7).digest()
    return int.from_bytes(digest)
