"""Limits of control groups of both versions."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from conure.engine.runner.control_groups import ControlGroups


def write(root: Path, files: dict[str, str]) -> ControlGroups:
    """Write a file system of groups, with the process's groups in `membership`."""
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return ControlGroups(root, root / "membership")


def test_nothing_is_limited_without_groups(tmp_path: Path) -> None:
    groups = ControlGroups(tmp_path, tmp_path / "membership")
    assert groups.num_processors() == groups.free_bytes() == math.inf


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", math.inf), ("150000 100000", 1.5), ("800000 200000", 4.0), ("", math.inf)],
)
def test_processors_of_version_2(quota: str, expected: float, tmp_path: Path) -> None:
    groups = write(tmp_path, {"membership": "0::/", "cpu.max": quota})
    assert groups.num_processors() == expected


@pytest.mark.parametrize(
    ("quota", "expected"), [("-1", math.inf), ("150000", 1.5), ("400000", 4.0)]
)
def test_processors_of_version_1(quota: str, expected: float, tmp_path: Path) -> None:
    files = {"cpu/pod/cpu.cfs_quota_us": quota, "cpu/pod/cpu.cfs_period_us": "100000"}
    groups = write(tmp_path, {"membership": "3:cpu,cpuacct:/pod\n2:pids:/\n0::/", **files})
    assert groups.num_processors() == expected


def test_the_smallest_limit_of_nested_groups_counts(tmp_path: Path) -> None:
    files = {
        "membership": "0::/user/app",
        "cpu.max": "900000 100000",
        "user/cpu.max": "200000 100000",
        "user/app/cpu.max": "300000 100000",
        "user/memory.max": "5000",
        "user/memory.current": "4000",
        "user/app/memory.max": "2000",
        "user/app/memory.current": "500",
    }
    groups = write(tmp_path, files)
    assert groups.num_processors() == 2.0
    assert groups.free_bytes() == 1000


def test_a_path_of_the_host_is_not_needed_in_a_container(tmp_path: Path) -> None:
    files = {"memory/memory.limit_in_bytes": "1000", "memory/memory.usage_in_bytes": "300"}
    groups = write(tmp_path, {"membership": "4:memory:/docker/5f3c", **files})
    assert groups.free_bytes() == 700


@pytest.mark.parametrize("version", [1, 2])
def test_cached_files_are_free_memory(version: int, tmp_path: Path) -> None:
    if version == 1:
        folder, names = "memory/", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        membership, cached = "4:memory:/", "inactive_file 1\ntotal_inactive_file 600"
    else:
        folder, names = "", ("memory.max", "memory.current")
        membership, cached = "0::/", "anon 100\ninactive_file 600"
    files = dict(zip((folder + name for name in names), ("1000", "700"), strict=True))
    groups = write(tmp_path, {"membership": membership, **files})
    assert groups.free_bytes() == 300
    write(tmp_path, {f"{folder}memory.stat": cached})
    assert groups.free_bytes() == 900


def test_memory_without_a_limit_is_infinite(tmp_path: Path) -> None:
    files = {"memory.max": "max", "memory.current": "700"}
    assert write(tmp_path, {"membership": "0::/", **files}).free_bytes() == math.inf
