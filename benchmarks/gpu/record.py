"""The rows of one stage: measured within a time limit, and written after each row.

Invariants: a row that raises does not end the stage, unless the device is lost. No row starts
after the deadline; rows that did not start are listed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Figures = Mapping[str, Any]
"""Numbers, words and None by name; what JSON can hold."""


class StageStoppedError(RuntimeError):
    """No later row of this process can be measured."""


@dataclass
class StageRecord:
    """One stage of a run."""

    stage: str
    folder: Path
    deadline_s: float
    """Time of `clock` after which no row starts."""
    about: dict[str, Any] = field(default_factory=dict)
    """The device and the versions of libraries."""
    clock: Callable[[], float] = time.monotonic
    synchronize: Callable[[], None] | None = None
    """Waits for the device; raises if it is lost."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def path(self) -> Path:
        """The JSON file of the stage."""
        return self.folder / f"{self.stage}.json"

    @property
    def is_over(self) -> bool:
        """Whether the time for new rows has passed."""
        return self.clock() >= self.deadline_s

    def measure(self, name: str, run: Callable[[], Figures]) -> Figures | None:
        """Measure one row and write the record; return None if the row failed or did not start.

        Raises:
            DeviceLostError: if the device answers nothing after a failure.
        """
        if self.is_over:
            self.left_out.append(name)
            self.write()
            return None
        try:
            figures = run()
        except Exception as error:  # measure the other rows
            self.fail(name, error)
            return None
        self.add(name, figures)
        return figures

    def add(self, name: str, figures: Figures) -> None:
        """Append a measured row."""
        self.rows.append({"name": name, **figures})
        print(line(name, figures), flush=True)
        self.write()

    def fail(self, name: str, error: Exception) -> None:
        """Append a failed row.

        Raises:
            DeviceLostError: if the device answers nothing any more.
        """
        reason = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
        self.failed[name] = reason
        print(f"{name}: FAILED {reason}", flush=True)
        self.write()
        if self.synchronize is not None:
            try:
                self.synchronize()
            except RuntimeError as lost:
                self.note(f"the device is lost after {name!r}")
                raise StageStoppedError(str(lost)) from error

    def note(self, text: str) -> None:
        """Append a sentence."""
        self.notes.append(text)
        print(text, flush=True)
        self.write()

    def write(self) -> None:
        """Write the record."""
        record = {
            "stage": self.stage,
            **self.about,
            "rows": self.rows,
            "failed": self.failed,
            "left_out": self.left_out,
            "notes": self.notes,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        # A stage may be killed at any time: the previous record stays until this one is complete.
        written = self.path.with_suffix(".part")
        written.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
        written.replace(self.path)


def line(name: str, figures: Figures) -> str:
    """Return a row as one line."""
    return f"{name:44} " + "  ".join(f"{key} {shown(value)}" for key, value in figures.items())


def shown(value: Any) -> str:
    """Return a figure with three digits at least."""
    if not isinstance(value, float):
        return "-" if value is None else str(value)
    if value and abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
