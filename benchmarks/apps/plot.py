"""Bar charts of ratios as SVG text.

One bar per comparison, with a whisker from the smallest to the largest value. The output is
plain text, so that a changed figure is a changed line in a diff.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

LABEL, WIDTH, ROW, TOP, RIGHT = 330, 420, 26, 44, 60
"""Pixels: label width, longest bar, row height, space above the rows, space to the right."""


class Bar(NamedTuple):
    """One comparison."""

    label: str
    low: float
    middle: float
    high: float
    mark: float | None = None
    """A reference value: another system's result, or a prediction."""


def bars(title: str, rows: Sequence[Bar], *, mark: str = "") -> str:
    """Return an SVG of ratios: a line at 1, bars to the medians, whiskers from minimum to maximum.

    Args:
        title: The heading.
        rows: The bars, from top to bottom.
        mark: The meaning of the rows' marks; empty if the rows have no marks.
    """
    longest = max([1.2, *(max(row.high, row.mark or 0.0) for row in rows)])
    height = TOP + ROW * len(rows) + 10

    def x(value: float) -> float:
        return round(LABEL + WIDTH * value / longest, 1)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LABEL + WIDTH + RIGHT}" '
        f'height="{height}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="18" font-size="14" font-weight="bold">{escape(title)}</text>',
    ]
    if mark:
        lines += [
            f'<path d="M{LABEL},{TOP - 16} v10" stroke="#c22" stroke-width="3"/>',
            f'<text x="{LABEL + 8}" y="{TOP - 7}" fill="#555">{escape(mark)}</text>',
        ]
    for number, row in enumerate(rows):
        y = TOP + ROW * number
        middle = y + ROW // 2
        lines += [
            f'<text x="{LABEL - 8}" y="{middle + 4}" text-anchor="end">{escape(row.label)}</text>',
            f'<rect x="{LABEL}" y="{y + 5}" width="{x(row.middle) - LABEL:.1f}" '
            f'height="{ROW - 10}" fill="#7aa6c2"/>',
            f'<path d="M{x(row.low)},{middle} H{x(row.high)}" stroke="#234" stroke-width="2"/>',
            f'<text x="{x(max(row.high, row.mark or 0.0)) + 6}" y="{middle + 4}">'
            f"{row.middle:.2f}</text>",
        ]
        if row.mark is not None:
            lines.append(
                f'<path d="M{x(row.mark)},{y + 3} v{ROW - 6}" stroke="#c22" stroke-width="3"/>'
            )
    lines += [
        f'<path d="M{x(1)},{TOP} V{height - 10}" stroke="#555" stroke-dasharray="3 3"/>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"
