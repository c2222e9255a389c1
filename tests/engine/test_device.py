"""Devices by name, and what fits on them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from conure.engine import capacity, device
from conure.engine.api import EngineError
from conure.engine.capacity import Wanted
from conure.engine.local import LocalRunner

from . import shrunk


@pytest.fixture
def num_devices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Let torch see so many accelerators."""
    num: int = request.param
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num)
    return num


@pytest.mark.parametrize(
    ("num_devices", "name", "wanted"),
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
def test_a_device_is_picked_by_name(num_devices: int, name: str, wanted: str) -> None:
    pytest.importorskip("triton")
    assert device.pick(name) == torch.device(wanted)


@pytest.mark.parametrize(
    ("num_devices", "name", "said"),
    [
        (0, "cuda", "device is 'cuda', but torch sees no CUDA device"),
        (2, "cuda:2", "device is 'cuda:2', but torch sees 2 of them"),
        (2, "tpu", "device must be cpu, cuda, cuda:N or auto, got 'tpu'"),
        (2, "cuda:x", "device must be cpu, cuda, cuda:N or auto, got 'cuda:x'"),
        (2, "cuda:", "device must be cpu, cuda, cuda:N or auto, got 'cuda:'"),
        (2, "cpu:0", "device must be cpu, cuda, cuda:N or auto, got 'cpu:0'"),
    ],
    indirect=["num_devices"],
)
def test_a_device_that_is_not_there_is_refused(num_devices: int, name: str, said: str) -> None:
    with pytest.raises(EngineError) as refused:
        device.pick(name)
    assert refused.value.code == "engine.bad_option"
    assert refused.value.message == said


@pytest.mark.parametrize("num_devices", [0], indirect=True)
def test_a_missing_device_is_refused_before_the_model_is_looked_for(num_devices: int) -> None:
    with pytest.raises(EngineError, match="sees no CUDA device"):
        LocalRunner(model="/no/such/folder", device="cuda")


@pytest.mark.parametrize("num_devices", [1], indirect=True)
def test_an_accelerator_without_triton_is_refused(
    num_devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "find_spec", lambda _: None)
    with pytest.raises(EngineError, match="needs triton"):
        device.pick("cuda")


def test_half_precision_is_for_accelerators() -> None:
    device.check_dtype("float16", torch.device("cuda", 0))
    with pytest.raises(EngineError, match="dtype must be float32, bfloat16 or auto, got 'float16'"):
        device.check_dtype("float16", torch.device("cpu"))


def test_an_accelerator_gives_its_memory_to_blocks(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(shrunk.write(tmp_path, "llama"))
    found = {
        kind: capacity.limits(config, Wanted(), token_bytes=1000, free_bytes=10**9, kind=kind)
        for kind in ("cpu", "cuda")
    }
    assert found["cpu"].num_blocks == capacity.DEFAULT_CONTEXTS * 256 // 16
    assert found["cuda"].num_blocks == int(0.85 * 10**9) // 16_000
    assert found["cuda"].context_len == found["cpu"].context_len == 256
    assert found["cuda"].step_tokens > found["cpu"].step_tokens
    assert found["cuda"].max_sequences > found["cpu"].max_sequences


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "3,2"}, 3),
        ({"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "5"}, 5),
        ({"OMP_NUM_THREADS": "many"}, 2),
        ({"OMP_NUM_THREADS": "0"}, 2),
        ({}, 2),
    ],
)
def test_cores_are_those_of_the_process_unless_the_environment_names_a_number(
    environment: dict[str, str], wanted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Four processors, two of each core; another core is not for this process.
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 4, 5}, raising=False)
    for processor, siblings in enumerate(["0,4", "1,5", "2,6", "3,7"] * 2):
        folder = tmp_path / f"cpu{processor}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    assert device.num_cores(environment, tmp_path) == wanted


def test_processors_of_an_unknown_topology_are_cores_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 7, 8}, raising=False)
    assert device.num_cores({}, tmp_path) == 3


def test_a_large_model_after_a_small_one_gets_its_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shrunk.write(tmp_path, "llama")
    before = torch.get_num_threads()
    monkeypatch.setattr(device, "num_cores", lambda: 2)
    try:
        LocalRunner(model=str(folder), dtype="float32")
        assert torch.get_num_threads() == 1
        monkeypatch.setattr(capacity, "THREAD_BYTES", 1)
        LocalRunner(model=str(folder), dtype="float32")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
