"""Work tables and launches on the device, and the conditions for captured graphs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from conure.kernels import ops
from conure.kernels.checks import UnsupportedShapeError
from conure.kernels.gpu import kv_cache, launcher
from conure.kernels.gpu.configuration import configurations
from conure.kernels.planning.planner import Planner
from tests.kernels.random_trees import device_of

TABLES = [[0, 1, 2, 3, 4 + row] for row in range(5)]


DEVICE = device_of(ops.implementation("triton"))


def caches(num_blocks: int = 32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, num_blocks, 16, 1, 32, generator=generator)
    return keys.to(DEVICE), values.to(DEVICE)


def test_decode_steps_share_a_launch() -> None:
    operations, planner = ops.implementation("triton"), Planner(block_size=16, min_saved=0)
    keys, values = caches()
    query = torch.randn(8, 4, 32, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    tables = [list(table) for table in TABLES]
    launches = set()
    for step in range(20):
        for row, table in enumerate(tables):
            if len(table) * 16 < 66 + step:
                table.append(10 + row)
        plan = planner.plan([1] * 5, [66 + step] * 5, tables)
        # The last three queries are padding.
        launches.add(operations.prepare(query, keys, values, plan))
        result = operations.attention(query[:5], keys, values, plan, scale=0.2)
        expected = ops.implementation("reference").attention(
            query[:5], keys, values, plan, scale=0.2
        )
        assert (result - expected).abs().max().item() <= 5e-6
    assert len(launches) == 1


def test_graph_key_depends_on_tiles_and_window() -> None:
    operations = ops.implementation("triton")
    keys, values = caches()
    query = torch.randn(5, 4, 32, device=DEVICE)
    planner = Planner(block_size=16, min_saved=0)
    shared = planner.plan([1] * 5, [66] * 5, TABLES)
    alone = planner.plan([1], [66], TABLES[:1])
    launches = {
        operations.prepare(query, keys, values, shared),
        operations.prepare(query, keys, values, shared, window=20),
        operations.prepare(query, keys, values, alone),
    }
    assert len(launches) == 3
    assert operations.prepare(query, keys, values, shared, window=66) == operations.prepare(
        query, keys, values, shared
    )


def test_steps_of_many_merges_can_be_recorded_with_places_of_their_own() -> None:
    operations = ops.implementation("triton")
    keys, values = caches()
    tables = [[0, 1, 2, 3, 4]] * 300
    planner = Planner(block_size=16, min_saved=0)
    query = torch.randn(300, 4, 32, device=DEVICE)
    few, many = (
        operations.prepare(query, keys, values, planner.plan([1] * num, [66] * num, tables[:num]))
        for num in (250, 300)
    )
    assert isinstance(few, launcher.GraphKey)
    assert isinstance(many, launcher.GraphKey)
    assert many.first_item == 2 * few.first_item


def test_query_must_cover_the_plan(
    operations: ops.AttentionOperations, device: torch.device
) -> None:
    keys, values = (cache.to(device) for cache in caches())
    plan = Planner(block_size=16).plan([1] * 5, [66] * 5, TABLES)
    with pytest.raises(ValueError, match="query has 4 tokens, the plan has 5"):
        operations.prepare(torch.zeros(4, 4, 32, device=keys.device), keys, values, plan)


def test_layers_share_table_and_partials() -> None:
    operations: Any = ops.implementation("triton")
    keys, values = caches()
    query = torch.randn(5, 4, 32, device=DEVICE)
    plan = Planner(block_size=16, min_saved=0).plan([1] * 5, [66] * 5, TABLES)
    first = operations.prepare(query, keys, values, plan)
    for _ in range(3):
        operations.attention(query, keys, values, plan, scale=0.2)
    assert operations.prepare(query, keys, values, plan) == first
    assert len(operations._kernels._tables) == 1


@pytest.mark.parametrize("num_processors", [1, 2, 64])
def test_each_launch_begins_with_the_first_unit(
    num_processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 64 processors there are more programs than units."""
    monkeypatch.setattr(launcher, "INTERPRETED_PROCESSORS", num_processors)
    kernels = launcher.TritonKernels()
    operations = ops.AttentionOperations("triton", kernels)
    keys, values = caches()
    query = torch.randn(5, 4, 32, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    plan = Planner(block_size=16, min_saved=0).plan([1] * 5, [66] * 5, TABLES)
    expected = ops.implementation("reference").attention(query, keys, values, plan, scale=0.2)
    for _ in range(3):
        result = operations.attention(query, keys, values, plan, scale=0.2)
        assert (result - expected).abs().max().item() <= 5e-6
        (device_table,) = kernels._tables.values()
        assert not device_table.current.counters.any()


def test_prompts_replace_no_buffer_of_recordings() -> None:
    operations, planner = ops.implementation("triton"), Planner(block_size=16, min_saved=0)
    keys, values = caches()
    query = torch.randn(5, 4, 32, device=DEVICE)
    recorded = operations.prepare(query, keys, values, planner.plan([1] * 5, [66] * 5, TABLES))
    prompt = planner.plan([40] * 5, [66] * 5, TABLES)
    many = torch.randn(200, 4, 32, device=DEVICE)
    operations.attention(many, keys, values, prompt, scale=0.2)
    again = planner.plan([1] * 5, [66] * 5, TABLES)
    assert operations.prepare(query, keys, values, again) == recorded
    result = operations.attention(query, keys, values, again, scale=0.2)
    expected = ops.implementation("reference").attention(query, keys, values, again, scale=0.2)
    assert (result - expected).abs().max().item() <= 5e-6


def test_partials_stay_where_they_are_if_memory_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = launcher._DeviceBuffers(DEVICE)
    buffers.reserve(4, 8)
    partials, lse = buffers.partials, buffers.lse
    allocate = Tensor.new_empty
    sizes: list[int] = []

    def refuse_second(tensor: Tensor, size: int) -> Tensor:
        sizes.append(size)
        if len(sizes) == 2:
            raise torch.OutOfMemoryError("out of memory")
        return allocate(tensor, size)

    monkeypatch.setattr(Tensor, "new_empty", refuse_second)
    with pytest.raises(torch.OutOfMemoryError):
        buffers.reserve(100, 8)
    assert buffers.partials is partials
    assert buffers.lse is lse
    assert buffers.memory == 1


def test_table_stays_where_it_is_if_its_copies_cannot_be_pinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*size: int, **options: Any) -> Tensor:
        raise RuntimeError("no memory can be pinned")

    buffers = launcher._DeviceBuffers(DEVICE)
    table = buffers.table
    buffers.device = torch.device("cuda")
    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(RuntimeError, match="no memory can be pinned"):
        buffers.copy(torch.arange(5, dtype=torch.int32))
    assert buffers.table is table
    assert buffers.memory == 0


@pytest.mark.parametrize(
    ("capability", "overlaps"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), True)]
)
def test_launches_overlap_where_the_device_is_capable_of_it(
    capability: tuple[int, int], overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert launcher.can_overlap(torch.device("cuda", 0)) == overlaps


@pytest.mark.parametrize(("shared_kib", "expected"), [(227, 256), (163, 256), (99, 128)])
def test_shared_memory_limits_the_head_size(
    shared_kib: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(shared_memory_per_block_optin=shared_kib * 1024)
    monkeypatch.setattr(launcher, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert launcher.max_dim(torch.device("cuda", 0)) == expected


@pytest.mark.parametrize(
    ("heads", "dim", "message"),
    [(1, 320, "query has head size 320, .* at most 256"), (160, 16, "query has 160 heads per KV")],
)
def test_unsupported_heads_have_an_error_of_their_own(heads: int, dim: int, message: str) -> None:
    cache = torch.zeros(2, 16, 1, dim, device=DEVICE)
    plan = Planner(block_size=16).plan([1], [5], [[0]])
    query = torch.zeros(1, heads, dim, device=DEVICE)
    with pytest.raises(UnsupportedShapeError, match=message):
        ops.implementation("triton").attention(query, cache, cache, plan, scale=1.0)


def test_an_eager_step_can_be_recorded_next() -> None:
    operations, planner = ops.implementation("triton"), Planner(block_size=16, min_saved=0)
    keys, values = caches()
    query = torch.randn(5, 4, 32, device=DEVICE)
    plan = planner.plan([1] * 5, [66] * 5, TABLES)
    eager = operations.attention(query, keys, values, plan, scale=0.2)
    operations.prepare(query, keys, values, plan)
    assert torch.equal(operations.attention(query, keys, values, plan, scale=0.2), eager)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [16, 7], ids=["whole-words", "odd"])
def test_copy_blocks_of_many_caches(dtype: torch.dtype, size: int) -> None:
    operations = ops.implementation("triton")
    all_caches = [torch.randn(6, 3, 1, size).to(DEVICE, dtype) for _ in range(3)]
    all_caches.append(torch.randn(6, 3, 2, size).to(DEVICE, dtype))
    all_caches.append(torch.randn(6, 2, 3, size).to(DEVICE, dtype).transpose(1, 2))
    before = [cache.clone() for cache in all_caches]
    source, destination = torch.tensor([[0, 1, 5], [1, 2, 3]], device=DEVICE)
    operations.copy_blocks(all_caches, source, destination)
    for cache, old in zip(all_caches, before, strict=True):
        expected = old[[0, 0, 1, 5, 4, 5]]
        assert torch.equal(cache, expected)


def test_kernels_skip_slots_outside_the_cache() -> None:
    """On a GPU slots are not checked on the host, so this calls the kernels directly."""
    kernels: Any = ops.implementation("triton")
    kernels = kernels._kernels
    # The cache is a slice, so that writes outside of it are noticed.
    memory = torch.zeros(6, 4, 1, 16, device=DEVICE)
    keys, values = memory[2:4], torch.zeros(2, 4, 1, 16, device=DEVICE)
    key = torch.arange(1.0, 6.0, device=DEVICE)[:, None, None].expand(5, 1, 16)
    slots = torch.tensor([-1, 8, 7, -4, 2**33], device=DEVICE)
    kernels.store_kv(key, key, keys, values, slots)
    assert memory[:, :, 0, 0].nonzero().tolist() == [[3, 3]]
    assert values[:, :, 0, 0].nonzero().tolist() == [[1, 3]]
    before = keys.clone()
    source, destination = torch.tensor([[1, 2, -1], [2, 0, 1]], device=DEVICE)
    kernels.copy_blocks([keys], source, destination)
    assert torch.equal(keys, before)
    assert memory[:, :, 0, 0].nonzero().tolist() == [[3, 3]]


def test_configurations_match_kernel_signatures() -> None:
    listed = configurations()
    assert len({each.name for each in listed}) == len(listed)
    assert {each.kernel for each in listed} >= {
        kv_cache.store_kv_kernel,
        kv_cache.move_blocks_kernel,
    }
    for each in listed:
        assert list(each.signature) == each.kernel.arg_names
        constants = {name for name, kind in each.signature.items() if kind == "constexpr"}
        assert constants == set(each.constants)
        assert set(each.aligned) <= set(each.signature) - constants
