"""Truncation of the distribution that a token is sampled from.

Shapes: C truncated rows.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Truncation(NamedTuple):
    """The tokens that some random rows may take: top-k first, then top-p, then min-p."""

    rows: Tensor
    """[C] int64, indices of random rows."""
    top_k: Tensor
    """[C] int64, at least 1."""
    top_p: Tensor
    """[C] float64."""
    min_p: Tensor
    """[C] float64."""
