"""A set of row ids has the elements of a set."""

from __future__ import annotations

import random

from conure.server.store.damage.row_ids import CHUNK, RowIds


def test_row_ids_are_those_that_were_added() -> None:
    rng = random.Random(1)
    added = {-(2**63), -1, 0, 1, CHUNK - 1, CHUNK, 2**63 - 1}
    added |= {rng.randrange(5 * CHUNK) for _ in range(2_000)}
    rowids = RowIds()
    assert not rowids
    for rowid in added:
        rowids.add(rowid)
    assert rowids
    assert all(rowid in rowids for rowid in added)
    assert not any(rowid in rowids for rowid in range(6 * CHUNK) if rowid not in added)
    for low, high in [(-1, None), (-1, 0), (0, 2), (CHUNK, 3 * CHUNK + 7), (-(2**63) - 1, None)]:
        expected = [each for each in sorted(added) if low < each and (high is None or each < high)]
        assert list(rowids.between(low, high)) == expected
