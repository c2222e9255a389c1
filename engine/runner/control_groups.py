"""Limits of the Linux control groups that contain this process.

A container has a control group, and so has a service of systemd. Groups are nested, and each limits
all processes inside. Version 2 has one tree of groups, version 1 a tree for each controller.

Invariants: a limit that is missing or cannot be read is infinite.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

Controller: TypeAlias = Literal["cpu", "memory"]


@dataclass(frozen=True, slots=True)
class ControlGroups:
    """The control groups that contain this process."""

    root: Path = Path("/sys/fs/cgroup")
    """Where the trees of groups are mounted."""
    membership: Path = Path("/proc/self/cgroup")
    """The groups of the process, one line for each tree."""

    def num_processors(self) -> float:
        """Return how many processors the process may use on average; infinity without a limit."""
        quotas = [math.inf]
        for folder in self._folders("cpu"):
            quota, _, period = _read(folder, "cpu", "max").partition(" ")  # version 2
            if not quota:
                quota = _read(folder, "cpu", "cfs_quota_us")  # version 1; -1: no limit
                period = _read(folder, "cpu", "cfs_period_us")
            if quota.isdecimal() and period.isdecimal() and int(period):
                quotas.append(int(quota) / int(period))
        return min(quotas)

    def free_bytes(self) -> float:
        """Return how much memory the process may still allocate; infinity without a limit.

        Files that a group caches, such as a checkpoint, are free memory: the system drops them
        first.
        """
        free = [math.inf]
        for folder in self._folders("memory"):
            limit, used = _read(folder, "memory", "max"), _read(folder, "memory", "current")
            cached = "inactive_file"
            if not limit:
                limit = _read(folder, "memory", "limit_in_bytes")
                used = _read(folder, "memory", "usage_in_bytes")
                cached = "total_inactive_file"
            if limit.isdecimal() and used.isdecimal():
                lines = (line.split() for line in _read(folder, "memory", "stat").splitlines())
                reclaimable = next((int(each[1]) for each in lines if each[0] == cached), 0)
                free.append(int(limit) - int(used) + reclaimable)
        return min(free)

    def _folders(self, controller: Controller) -> Iterator[Path]:
        """Yield the folders of the groups, innermost first.

        A container may see its own group as the root of a tree, but its path on the host in
        `membership`. Folders that do not exist are left out.
        """
        for line in _text_of(self.membership).splitlines():
            number, names, path = line.split(":", 2)
            if number != "0" and controller not in names.split(","):
                continue
            mount, group = self.root, Path(path.lstrip("/"))
            if number != "0":  # version 1; a link has the name of each controller of a tree
                mount /= controller
            yield from (mount / each for each in (group, *group.parents) if (mount / each).is_dir())


OWN_GROUPS: Final = ControlGroups()
"""The groups of this process on this system."""


def _read(folder: Path, controller: Controller, name: str) -> str:
    """Return the text of a controller's file; empty if it cannot be read."""
    return _text_of(folder / f"{controller}.{name}")


def _text_of(file: Path) -> str:
    """Return the text of a file without the last line break; empty if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape").strip()
    except OSError:
        return ""
