"""Devices by name, and what fits on them."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from conure.engine.config import EngineConfig
from conure.engine.kv import capacity
from conure.engine.kv.capacity import RequestedLimits
from conure.engine.models import checkpoint
from conure.engine.protocol import EngineError
from conure.engine.runner import device
from conure.engine.runner.control_groups import ControlGroups
from conure.engine.runner.torch_runner import TorchModelRunner

from .. import shrunk

UNLIMITED = ControlGroups(Path("missing"), Path("missing"))


GPU = {"name": "a GPU", "total_memory": 141 * 2**30, "major": 9, "minor": 0}


@pytest.fixture
def num_devices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Let torch see so many accelerators."""
    num: int = request.param
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(**GPU))
    return num


@pytest.mark.parametrize(
    ("num_devices", "name", "expected"),
    [
        (0, "cpu", "cpu"),
        (0, "auto", "cpu"),
        (2, "auto", "cuda:0"),
        (2, "cpu", "cpu"),
        (2, "cuda", "cuda:0"),
        (2, "cuda:1", "cuda:1"),
    ],
    indirect=["num_devices"],
)
def test_device_is_picked_by_name(num_devices: int, name: str, expected: str) -> None:
    pytest.importorskip("triton")
    assert device.pick(name) == torch.device(expected)


@pytest.mark.parametrize(
    ("num_devices", "name", "message"),
    [
        (0, "cuda", "device is 'cuda', but torch finds no CUDA device"),
        (2, "cuda:2", "device is 'cuda:2', but torch finds 2 CUDA devices"),
        (2, "tpu", "device must be cpu, cuda, cuda:N or auto, got 'tpu'"),
        (2, "cuda:x", "device must be cpu, cuda, cuda:N or auto, got 'cuda:x'"),
        (2, "cuda:", "device must be cpu, cuda, cuda:N or auto, got 'cuda:'"),
        (2, "cpu:0", "device must be cpu, cuda, cuda:N or auto, got 'cpu:0'"),
    ],
    indirect=["num_devices"],
)
def test_unknown_device_is_rejected(num_devices: int, name: str, message: str) -> None:
    with pytest.raises(EngineError) as refused:
        device.pick(name)
    assert refused.value.code == "engine.bad_option"
    assert refused.value.message == message


@pytest.mark.parametrize("num_devices", [0], indirect=True)
def test_missing_device_fails_before_model_lookup(num_devices: int) -> None:
    with pytest.raises(EngineError, match="finds no CUDA device"):
        TorchModelRunner(EngineConfig(model="/no/such/folder", device="cuda"))


@pytest.mark.parametrize("num_devices", [1], indirect=True)
def test_accelerator_needs_triton(num_devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "find_spec", lambda _: None)
    with pytest.raises(EngineError, match="needs triton"):
        device.pick("cuda")


@pytest.mark.parametrize(
    ("num_devices", "name", "needs_cpu", "expected"),
    [
        (0, "auto", False, "device=cpu, because torch finds no CUDA device"),
        (1, "cpu", False, "device=cpu"),
        (
            1,
            "auto",
            True,
            "device=cpu, because batch_invariant needs it; turn it off to use the GPU",
        ),
        (1, "auto", False, "device=cuda:0 (a GPU, 141 GiB), found by device=auto"),
        (1, "cuda", False, "device=cuda:0 (a GPU, 141 GiB)"),
    ],
    indirect=["num_devices"],
)
def test_choice_of_the_device_is_described(
    num_devices: int, name: str, needs_cpu: bool, expected: str
) -> None:
    pytest.importorskip("triton")
    picked = device.pick(name, needs_cpu=needs_cpu)
    assert device.describe(name, picked, needs_cpu=needs_cpu) == expected


@pytest.mark.parametrize("num_devices", [1], indirect=True)
def test_device_that_cannot_run_the_kernels_is_refused_or_left_out(
    num_devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    reason = "Tesla T4 has compute capability 7.5, and the kernels need 8.0"
    properties = SimpleNamespace(**{**GPU, "name": "Tesla T4", "major": 7, "minor": 5})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    with pytest.raises(EngineError) as refused:
        device.pick("cuda")
    assert refused.value.message == (
        f"device is 'cuda', but {reason}; use another GPU, or device=cpu"
    )
    assert device.pick("auto") == torch.device("cpu")
    assert device.describe("auto", torch.device("cpu")) == f"device=cpu, because {reason}"


@pytest.mark.parametrize(
    ("configured", "kind", "expected"),
    [
        ("float16", "cpu", "float32"),
        ("float16", "cuda:0", "float16"),
        ("bfloat16", "cpu", "bfloat16"),
        ("bfloat16", "cuda:0", "bfloat16"),
        ("float32", "cuda:0", "float32"),
        (None, "cuda:0", "float32"),
    ],
)
def test_auto_keeps_the_checkpoints_16_bits_where_the_device_has_them(
    configured: str | None, kind: str, expected: str
) -> None:
    assert checkpoint.dtype_name({"dtype": configured}, "auto", kind) == expected


def test_float16_needs_an_accelerator() -> None:
    device.check_dtype("float16", torch.device("cuda", 0))
    with pytest.raises(EngineError, match="dtype on cpu must be float32, bfloat16 or auto"):
        device.check_dtype("float16", torch.device("cpu"))


def test_accelerator_memory_goes_to_blocks(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(shrunk.write(tmp_path, "llama"))
    found = {
        kind: capacity.limits(
            config, RequestedLimits(), token_bytes=1000, free_bytes=10**9, kind=kind
        )
        for kind in ("cpu", "cuda")
    }
    assert found["cpu"].num_blocks == capacity.DEFAULT_CONTEXTS * 256 // 16
    assert found["cuda"].num_blocks == int(0.85 * 10**9) // 16_000
    assert found["cuda"].context_len == found["cpu"].context_len == 256
    assert found["cuda"].step_tokens > found["cpu"].step_tokens
    assert found["cuda"].max_sequences > found["cpu"].max_sequences


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_engines_divide_memory(tmp_path: Path, kind: str) -> None:
    config = AutoConfig.from_pretrained(shrunk.write(tmp_path, "llama"))
    num_blocks = [
        capacity.limits(
            config,
            RequestedLimits(),
            token_bytes=1000,
            free_bytes=4 * 10**6,
            kind=kind,
            num_engines=num_engines,
        ).num_blocks
        for num_engines in (1, 2)
    ]
    assert num_blocks[1] == num_blocks[0] // 2 > 0


@pytest.mark.parametrize(
    ("free_bytes", "context_len"), [(-1, None), (0, None), (30_000, None), (10**5, 200)]
)
def test_too_little_memory_for_a_context_is_an_error(
    free_bytes: int, context_len: int | None, tmp_path: Path
) -> None:
    config = AutoConfig.from_pretrained(shrunk.write(tmp_path, "llama"))
    requested = RequestedLimits(context_len=context_len)
    with pytest.raises(EngineError, match="free some memory, lower context_len") as caught:
        capacity.limits(config, requested, token_bytes=1000, free_bytes=free_bytes, kind="cpu")
    assert caught.value.code == "engine.bad_option"


def test_recorded_steps_leave_most_of_a_small_memory_to_blocks(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(shrunk.write(tmp_path, "llama"))
    sizes = {"token_bytes": 1000, "free_bytes": 1_200_000_000, "recorded_bytes": 1_300_000_000}
    found = capacity.limits(config, RequestedLimits(), kind="cuda", **sizes)
    assert found.num_blocks == int(0.85 * 900_000_000) // 16_000
    requested = RequestedLimits(num_blocks=8)
    assert capacity.limits(config, requested, kind="cuda", **sizes).num_blocks == 8


@pytest.mark.parametrize(
    "requested", [RequestedLimits(num_blocks=100_000), RequestedLimits(context_len=200)]
)
def test_free_memory_in_errors_includes_what_recorded_steps_take(
    requested: RequestedLimits, tmp_path: Path
) -> None:
    config = AutoConfig.from_pretrained(shrunk.write(tmp_path, "llama"))
    with pytest.raises(EngineError, match=r"2\.00 GiB are free, of which 0\.50 are left"):
        capacity.limits(
            config,
            requested,
            token_bytes=100_000_000,
            free_bytes=2 * 2**30,
            recorded_bytes=2**30,
            kind="cuda",
        )


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "3,2"}, 3),
        ({"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "5"}, 5),
        ({"OMP_NUM_THREADS": "many"}, 2),
        ({"OMP_NUM_THREADS": "0"}, 2),
        ({}, 2),
    ],
)
def test_environment_overrides_number_of_cores(
    environment: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Four processors, two of each core; another core is not for this process.
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 4, 5})
    for processor, siblings in enumerate(["0,4", "1,5", "2,6", "3,7"] * 2):
        folder = tmp_path / f"cpu{processor}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    assert device.num_cores(environment, tmp_path, UNLIMITED) == expected


def test_processors_count_as_cores_without_topology(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 7, 8})
    assert device.num_cores({}, tmp_path, UNLIMITED) == 3
    assert device.num_cores({}, tmp_path, UNLIMITED, num_engines=2) == 1
    assert device.num_cores({}, tmp_path, UNLIMITED, num_engines=4) == 1
    assert device.num_cores({"OMP_NUM_THREADS": "3"}, tmp_path, UNLIMITED, num_engines=2) == 3


def test_threads_are_set_per_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shrunk.write(tmp_path, "llama")
    before = torch.get_num_threads()
    monkeypatch.setattr(device, "num_cores", lambda num_engines: 2 // num_engines)
    try:
        TorchModelRunner(EngineConfig(model=str(folder), dtype="float32"))
        assert torch.get_num_threads() == 1
        monkeypatch.setattr(capacity, "THREAD_BYTES", 1)
        TorchModelRunner(EngineConfig(model=str(folder), dtype="float32"))
        assert torch.get_num_threads() == 2
        TorchModelRunner(EngineConfig(model=str(folder), dtype="float32", num_engines=2))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_a_container_limits_memory_and_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    groups = ControlGroups(tmp_path, tmp_path / "membership")
    (tmp_path / "membership").write_text("0::/\n")
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    assert device.free_bytes(torch.device("cpu"), groups) == 300
    assert device.num_cores({}, tmp_path, groups) == 2
    assert device.num_cores({"OMP_NUM_THREADS": "4"}, tmp_path, groups) == 4
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert device.num_cores({}, tmp_path, groups) == 1
