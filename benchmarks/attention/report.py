"""Report of a run: a table for the terminal, JSON, and a Markdown page.

A percentage of ideal compares with `DeviceRates.ideal_s` at the rates measured on the same device
in the same run. `x` is a competitor's median time divided by ours.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from .checks import AccuracyCheck
from .clock import Timing
from .rows import BenchmarkRow, DeviceRates

NOMINAL: Final = {
    "H200": DeviceRates(4.8e12, 989e12),
    "H100": DeviceRates(3.35e12, 989e12),
}
"""Nominal rates by a part of the device's name; bfloat16 without sparsity."""

SHARE_OF_IDEAL: Final = {"memory": 0.70, "matrix": 0.45, "tree": 0.60, "unshared": 0.80}
"""Target shares of the ideal on a GPU, by regime."""
LATENCY_S: Final = 15e-6
CASCADE_SPEEDUP: Final = 1.3
CPU_SPEEDUP: Final = 2.5
CPU_UNSHARED: Final = 0.95


@dataclass(slots=True)
class RowResult:
    """The results of one row with one dtype."""

    row: BenchmarkRow
    dtype: str
    element: int
    ideal_s: float
    nominal_s: float | None
    timings: Mapping[str, Timing]
    checks: Mapping[str, AccuracyCheck]
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Contenders that did not run, and the reason."""

    def ratio(self, name: str) -> float | None:
        """Return a contender's time divided by ours."""
        if name not in self.timings:
            return None
        return self.timings[name].median_s / self.timings["shared"].median_s

    def best(self, prefix: str) -> tuple[str, float] | None:
        """Return the fastest contender with a name prefix, and its ratio to ours."""
        result = [name for name in self.timings if name.startswith(prefix)]
        if not result:
            return None
        name = min(result, key=lambda each: self.timings[each].median_s)
        return name, self.timings[name].median_s / self.timings["shared"].median_s

    def missed_targets(self, *, is_gpu: bool) -> list[str]:
        """Return the targets that this row misses."""
        shared_s = self.timings["shared"].median_s
        missed = []
        if is_gpu:
            share = SHARE_OF_IDEAL.get(self.row.regime)
            if share is not None and self.ideal_s / shared_s < share:
                missed.append(f"{share:.0%} of ideal")
            if self.row.regime == "latency" and shared_s > LATENCY_S:
                missed.append(f"{LATENCY_S * 1e6:g} us")
            cascade = self.best("flashinfer cascade")
            if self.row.regime == "tree" and cascade and cascade[1] < CASCADE_SPEEDUP:
                missed.append(f"{CASCADE_SPEEDUP}x of {cascade[0]}")
        elif (sdpa := self.best("sdpa")) and self.row.regime != "crossover":
            least = CPU_UNSHARED if self.row.regime == "unshared" else CPU_SPEEDUP
            if sdpa[1] < least:
                missed.append(f"{least}x of {sdpa[0]}")
        return missed

    def record(self) -> dict[str, Any]:
        """Return the results as JSON."""
        return {
            "row": self.row.name,
            "regime": self.row.regime,
            "nodes": self.row.nodes,
            "tokens": self.row.tokens,
            "heads": [self.row.heads, self.row.kv_heads, self.row.head_dim],
            "dtype": self.dtype,
            "shared_bytes": self.row.shared_bytes(self.element),
            "unshared_bytes": self.row.unshared_bytes(self.element),
            "operations": self.row.operations,
            "ideal_us": self.ideal_s * 1e6,
            "nominal_us": None if self.nominal_s is None else self.nominal_s * 1e6,
            "contenders": {
                name: {
                    "median_us": timing.median_s * 1e6,
                    "min_us": timing.min_s * 1e6,
                    "max_us": timing.max_s * 1e6,
                    "samples": len(timing.samples_s),
                    "is_graph": timing.is_graph,
                    "percent_of_ideal": 100 * self.ideal_s / timing.median_s,
                    "times_ours": self.ratio(name),
                    "relative_error": self.checks[name].error,
                }
                for name, timing in self.timings.items()
            },
            "absent": dict(self.skipped),
        }


@dataclass(slots=True)
class KernelReport:
    """The results of a run."""

    device: str
    is_gpu: bool
    versions: Mapping[str, str]
    threads: int
    rates: Mapping[str, DeviceRates]
    """Measured rates, by dtype."""
    block_size: int
    checks: Sequence[AccuracyCheck]
    planning: Mapping[str, Timing]
    measured: list[RowResult] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """Rows on which our implementation failed, and the exception."""
    notes: list[str] = field(default_factory=list)

    @property
    def slug(self) -> str:
        """The device as part of a file name."""
        words = "".join(c if c.isalnum() else " " for c in self.device.lower()).split()
        return "-".join([*words, *([] if self.block_size == 16 else [f"blocks{self.block_size}"])])

    def write(self, folder: Path) -> list[Path]:
        """Write JSON and Markdown; return the paths."""
        folder.mkdir(parents=True, exist_ok=True)
        record = {
            "device": self.device,
            "versions": dict(self.versions),
            "threads": self.threads,
            "block_size": self.block_size,
            "rates": {name: rates._asdict() for name, rates in self.rates.items()},
            "checks": [check._asdict() for check in self.checks],
            "planning_us": {
                name: {
                    "median": timing.median_s * 1e6,
                    "min": timing.min_s * 1e6,
                    "max": timing.max_s * 1e6,
                }
                for name, timing in self.planning.items()
            },
            "rows": [measured.record() for measured in self.measured],
            "failed": self.failed,
            "notes": self.notes,
        }
        files = {
            folder / f"kernels-{self.slug}.json": json.dumps(record, indent=1) + "\n",
            folder / f"kernels-{self.slug}.md": self.page(),
        }
        for path, text in files.items():
            path.write_text(text, "utf-8")
        return list(files)

    def page(self) -> str:
        """Return the report as Markdown."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        lines = [
            f"# Attention on {self.device}",
            "",
            f"With {versions}; {self.threads} threads, blocks of {self.block_size} tokens.",
            "",
        ]
        lines += [
            f"- {name}: copies {rates.bytes_per_s / 1e12:.3g} TB/s (read and written),"
            f" multiplies {rates.operations_per_s / 1e12:.3g} TFLOP/s"
            for name, rates in self.rates.items()
        ]
        lines += [
            f"- {name}: {_spread(timing)} us per step on the host"
            for name, timing in self.planning.items()
        ]
        wrong = [check for check in self.checks if not check.is_accurate]
        lines.append(f"- {len(self.checks) - len(wrong)} of {len(self.checks)} variants accurate")
        lines += [
            f"- WRONG: {check.name}, error {check.error:.2g} {check.reason}" for check in wrong
        ]
        lines += [f"- FAILED: {row}" for row in self.failed]
        lines += [f"- {note}" for note in self.notes]
        names = sorted({name for each in self.measured for name in each.timings} - {"shared"})
        lines += [
            "",
            "Microseconds per layer: median (minimum-maximum). `x` is a contender's time by ours.",
            "",
        ]
        lines.append(
            "| row | dtype | ideal | shared | of ideal | " + " | ".join(names) + " | missed |"
        )
        lines.append("| --- " * (6 + len(names)) + "|")
        lines += [self._page_line(measured, names) for measured in self.measured]
        skipped = {
            (name, reason)
            for measured in self.measured
            for name, reason in measured.skipped.items()
        }
        if skipped:
            lines += ["", "Did not run:", ""]
            lines += [f"- {name}: {reason}" for name, reason in sorted(skipped)]
        return "\n".join(lines) + "\n"

    def _page_line(self, measured: RowResult, names: Sequence[str]) -> str:
        shared_s = measured.timings["shared"]
        cells = [
            measured.row.name,
            measured.dtype,
            _us(measured.ideal_s),
            _spread(shared_s),
            f"{measured.ideal_s / shared_s.median_s:.0%}",
        ]
        for name in names:
            ratio = measured.ratio(name)
            cells.append(
                "" if ratio is None else f"{_spread(measured.timings[name])}, {ratio:.2f}x"
            )
        cells.append("; ".join(measured.missed_targets(is_gpu=self.is_gpu)))
        return "| " + " | ".join(cells) + " |"


def line(measured: RowResult, *, is_gpu: bool) -> str:
    """Return one row for a terminal."""
    shared_s = measured.timings["shared"]
    competitors = "  ".join(
        f"{name} {measured.ratio(name):.2f}x" for name in measured.timings if name != "shared"
    )
    missed_targets = measured.missed_targets(is_gpu=is_gpu)
    return (
        f"{measured.row.name:46} {measured.dtype:8} {shared_s.median_s * 1e6:9.1f} us"
        f" {measured.ideal_s / shared_s.median_s:5.0%} of ideal"
        f"  error {measured.checks['shared'].error:.1e}  {competitors}"
        + (f"  MISSED: {'; '.join(missed_targets)}" if missed_targets else "")
    )


def _spread(timing: Timing) -> str:
    return f"{_us(timing.median_s)} ({_us(timing.min_s)}-{_us(timing.max_s)})"


def _us(seconds: float) -> str:
    """Return microseconds with at least three digits."""
    number = seconds * 1e6
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
