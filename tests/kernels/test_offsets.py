"""Caches of more than 2**31 numbers: an offset in 32 bits would read and write somewhere else.

Such a cache is 6 GiB of addresses here, of which a few pages are ever touched.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from conure.kernels import ops
from conure.kernels.plan import build

BLOCK, HEADS, DIM, VALUE_DIM = 16, 3, 64, 32
NUM_BLOCKS = 2**30 // (BLOCK * DIM) + 2  # the third of three heads lies beyond, too
LAST = NUM_BLOCKS - 1


@pytest.fixture(autouse=True)
def arguments_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter copies every argument back to where it is, all 6 GiB of it."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *arguments: None)


@pytest.fixture(params=["blocks apart", "heads apart"])
def cache(request: pytest.FixtureRequest) -> Tensor:
    """Keys [N, B, K, D] in the layout of a GPU or of a CPU."""
    if request.param == "blocks apart":
        return torch.empty(NUM_BLOCKS, BLOCK, HEADS, DIM, dtype=torch.bfloat16)
    return torch.empty(HEADS, NUM_BLOCKS, BLOCK, DIM, dtype=torch.bfloat16).permute(1, 2, 0, 3)


def test_the_last_block_of_a_large_cache_is_written_read_and_copied(
    operations: ops.Operations, cache: Tensor
) -> None:
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    tables = [[0, LAST], [0, LAST - 1, 1]]
    plan = build([1, 1], [BLOCK + 7, 2 * BLOCK + 3], tables, block_size=BLOCK, min_saved=1)
    blocks = torch.tensor([0, 1, LAST - 1, LAST])
    slots = (blocks[:, None] * BLOCK + torch.arange(BLOCK)).view(-1)
    key = numbers(len(slots), HEADS, DIM)
    # Values are the first part of the keys: one memory is large enough.
    value, values = key[..., :VALUE_DIM], cache[..., :VALUE_DIM]
    operations.store_kv(key, value, cache, values, slots)
    assert torch.equal(cache[blocks].flatten(0, 1), key)

    query = numbers(2, 6, DIM)
    wanted = ops.implementation("reference").attention(query, cache, values, plan, scale=0.125)
    got = operations.attention(query, cache, values, plan, scale=0.125)
    assert (got.float() - wanted.float()).abs().max() <= 3e-2, "two roundings of results up to 4"

    operations.copy_blocks([cache], torch.tensor([LAST, 0]), torch.tensor([2, LAST]))
    assert torch.equal(cache[[2, LAST]], key.view(4, BLOCK, HEADS, DIM)[[3, 0]])
