"""Seeds of outputs that are derived: of several answers to one prompt, of retries, of instances.

Invariants: equal names, or seeds and indices, give equal seeds; different ones independent seeds.
"""

from __future__ import annotations

import hashlib


def seed_of_name(name: str) -> int:
    """Return the 56-bit seed of a name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest())


def seed_of_answer(seed: int, index: int) -> int:
    """Return the 56-bit seed of answer `index`, from 1; answer 0 uses the given seed."""
    return seed_of_name(f"{seed}/{index}")


def seed_of_retry(seed: int, index: int) -> int:
    """Return the 56-bit seed of retry `index` of a call, from 1; never that of another answer."""
    return seed_of_name(f"{seed}/retry/{index}")
