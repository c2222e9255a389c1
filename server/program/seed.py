"""The seeds of several answers to one prompt, and of retries.

Invariants: equal seeds and indices give equal seeds; different indices give independent ones.
"""

from __future__ import annotations

import hashlib


def seed_of_answer(seed: int, index: int) -> int:
    """Return the 56-bit seed of answer `index`, from 1; answer 0 uses the given seed."""
    return _derived(f"{seed}/{index}")


def seed_of_retry(seed: int, index: int) -> int:
    """Return the 56-bit seed of retry `index` of a call, from 1; never that of another answer."""
    return _derived(f"{seed}/retry/{index}")


def _derived(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest())
