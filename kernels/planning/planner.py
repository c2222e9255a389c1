"""Plan the steps of one engine, and recognise steps that continue the previous one.

Between two decode steps of the same rows only lengths, positions and slots change, and now and
then a row starts a new block. The plan of such a step keeps the tree of the previous plan, if it
is equal, so that implementations may extend what they derived from it.

Block tables are compared with those of the previous step, so a replaced block is never missed.

`cpu.planner` does the same in C++.

Out of scope: contexts; the planner sees lengths and block tables.

Invariants: the plan of a step equals the plan that `build_plan` makes of the same rows, whatever
was planned before.

Shapes: R rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np

from .plan import Plan, build_plan
from .prefix_tree import MIN_SAVED_TOKENS, PARTIAL_TOKENS, SplitCost

BlockTable: TypeAlias = "list[int] | array[int]"
"""Blocks of a row in order. Arrays have type code `i` and are read several times as fast."""
SPARE_COLUMNS: Final = 8
"""Columns of a plan's `tables` after the blocks of the longest row, which work tables read."""


class Planner:
    """Makes the plan of each step. A plan is valid until the planner makes the next one."""

    def __init__(
        self,
        *,
        block_size: int,
        min_saved: int = MIN_SAVED_TOKENS,
        partial_tokens: float = PARTIAL_TOKENS,
        ridge: float = float("inf"),
    ) -> None:
        """Plan for one cache; see `build_plan` for the arguments."""
        self._block_size: Final = block_size
        self._cost: Final = SplitCost(min_saved, partial_tokens, ridge)
        self._last: Plan | None = None
        self.num_trees = 0
        """Number of plans whose tree is not that of the previous one."""

    def plan(
        self, num_new: Sequence[int], kv_len: Sequence[int], tables: Sequence[BlockTable]
    ) -> Plan:
        """Plan one step; see `build_plan` for the arguments and errors."""
        plan = build_plan(
            num_new,
            kv_len,
            tables,
            block_size=self._block_size,
            spare_columns=SPARE_COLUMNS,
            **self._cost._asdict(),
        )
        last, self._last = self._last, plan
        if last is not None and _is_continued(last, plan) and last.tree.equals(plan.tree):
            plan.tree = last.tree
        else:
            self.num_trees += 1
        return plan


def _is_continued(last: Plan, plan: Plan) -> bool:
    """Return whether each row has one more token in the same blocks and maybe a new one."""
    if not last.num_rows == last.num_queries == plan.num_rows == plan.num_queries:
        return False
    if (plan.kv_len != last.kv_len + 1).any():
        return False
    width = last.tables.shape[1] - SPARE_COLUMNS
    is_used = np.arange(width) * plan.block_size < last.kv_len[:, None]
    is_equal: bool = ((last.tables[:, :width] == plan.tables[:, :width]) | ~is_used).all()
    return bool(is_equal)
