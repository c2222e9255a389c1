"""What was measured, as a table on a terminal, as JSON and as a page of Markdown.

A percentage of ideal compares with `Rates.ideal_s` at rates measured on the same device
just before; `x` compares a rival's median with ours in the same run. Knows figures, runs
nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from .checks import Check
from .clock import Timing
from .rows import Rates, Row

NOMINAL: Final = {
    "H200": Rates(4.8e12, 989e12),
    "H100": Rates(3.35e12, 989e12),
}
"""What a maker promises, by a part of the device's name; bf16 without sparsity."""

SHARE_OF_IDEAL: Final = {"memory": 0.70, "matrix": 0.45, "tree": 0.60, "unshared": 0.80}
"""What we promise of ideal on a GPU, by regime."""
LATENCY_S: Final = 15e-6
CASCADE_SPEEDUP: Final = 1.3
CPU_SPEEDUP: Final = 2.5
CPU_UNSHARED: Final = 0.95


@dataclass(slots=True)
class Measured:
    """One row on one dtype, and who took part."""

    row: Row
    dtype: str
    element: int
    ideal_s: float
    nominal_s: float | None
    timings: Mapping[str, Timing]
    checks: Mapping[str, Check]
    absent: Mapping[str, str] = field(default_factory=dict)
    """Why a contender took no part."""

    def ratio(self, name: str) -> float | None:
        """How many times as long as ours a contender takes."""
        if name not in self.timings:
            return None
        return self.timings[name].median_s / self.timings["shared"].median_s

    def best(self, prefix: str) -> tuple[str, float] | None:
        """Return the fastest contender whose name begins so, and its ratio to ours."""
        found = [name for name in self.timings if name.startswith(prefix)]
        if not found:
            return None
        name = min(found, key=lambda each: self.timings[each].median_s)
        return name, self.timings[name].median_s / self.timings["shared"].median_s

    def verdicts(self, *, is_gpu: bool) -> list[str]:
        """Name every promise that this row breaks."""
        ours = self.timings["shared"].median_s
        broken = []
        if is_gpu:
            share = SHARE_OF_IDEAL.get(self.row.regime)
            if share is not None and self.ideal_s / ours < share:
                broken.append(f"{share:.0%} of ideal")
            if self.row.regime == "latency" and ours > LATENCY_S:
                broken.append(f"{LATENCY_S * 1e6:g} us")
            cascade = self.best("flashinfer cascade")
            if self.row.regime == "tree" and cascade and cascade[1] < CASCADE_SPEEDUP:
                broken.append(f"{CASCADE_SPEEDUP}x of {cascade[0]}")
        elif (sdpa := self.best("sdpa")) and self.row.regime != "crossover":
            least = CPU_UNSHARED if self.row.regime == "unshared" else CPU_SPEEDUP
            if sdpa[1] < least:
                broken.append(f"{least}x of {sdpa[0]}")
        return broken

    def record(self) -> dict[str, Any]:
        """Everything as JSON."""
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
            "absent": dict(self.absent),
        }


@dataclass(slots=True)
class Report:
    """A whole run."""

    device: str
    is_gpu: bool
    versions: Mapping[str, str]
    threads: int
    rates: Mapping[str, Rates]
    """Measured, by dtype."""
    block_size: int
    checks: Sequence[Check]
    planning: Mapping[str, Timing]
    measured: list[Measured] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """Rows on which ours raised, and what."""
    notes: list[str] = field(default_factory=list)

    @property
    def slug(self) -> str:
        """The device as part of a file's name."""
        words = "".join(c if c.isalnum() else " " for c in self.device.lower()).split()
        return "-".join([*words, *([] if self.block_size == 16 else [f"blocks{self.block_size}"])])

    def write(self, folder: Path) -> list[Path]:
        """Write JSON and Markdown; return where they are."""
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
        """The run as a page of Markdown."""
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
            f"- {name}: {_spread(timing)} us on the host a step"
            for name, timing in self.planning.items()
        ]
        wrong = [check for check in self.checks if not check.is_right]
        lines.append(f"- {len(self.checks) - len(wrong)} of {len(self.checks)} variants right")
        lines += [
            f"- WRONG: {check.name}, error {check.error:.2g} {check.reason}" for check in wrong
        ]
        lines += [f"- FAILED: {row}" for row in self.failed]
        lines += [f"- {note}" for note in self.notes]
        names = sorted({name for each in self.measured for name in each.timings} - {"shared"})
        lines += [
            "",
            "Microseconds a layer: median (least-most). A rival's `x` is its time by ours.",
            "",
        ]
        lines.append(
            "| row | dtype | ideal | shared | of ideal | " + " | ".join(names) + " | missed |"
        )
        lines.append("| --- " * (6 + len(names)) + "|")
        lines += [self._page_line(measured, names) for measured in self.measured]
        absent = {
            (name, reason) for measured in self.measured for name, reason in measured.absent.items()
        }
        if absent:
            lines += ["", "Took no part:", ""]
            lines += [f"- {name}: {reason}" for name, reason in sorted(absent)]
        return "\n".join(lines) + "\n"

    def _page_line(self, measured: Measured, names: Sequence[str]) -> str:
        ours = measured.timings["shared"]
        cells = [
            measured.row.name,
            measured.dtype,
            _us(measured.ideal_s),
            _spread(ours),
            f"{measured.ideal_s / ours.median_s:.0%}",
        ]
        for name in names:
            ratio = measured.ratio(name)
            cells.append(
                "" if ratio is None else f"{_spread(measured.timings[name])}, {ratio:.2f}x"
            )
        cells.append("; ".join(measured.verdicts(is_gpu=self.is_gpu)))
        return "| " + " | ".join(cells) + " |"


def line(measured: Measured, *, is_gpu: bool) -> str:
    """Return one row for a terminal."""
    ours = measured.timings["shared"]
    rivals = "  ".join(
        f"{name} {measured.ratio(name):.2f}x" for name in measured.timings if name != "shared"
    )
    verdicts = measured.verdicts(is_gpu=is_gpu)
    return (
        f"{measured.row.name:46} {measured.dtype:8} {ours.median_s * 1e6:9.1f} us"
        f" {measured.ideal_s / ours.median_s:5.0%} of ideal"
        f"  error {measured.checks['shared'].error:.1e}  {rivals}"
        + (f"  MISSED: {'; '.join(verdicts)}" if verdicts else "")
    )


def _spread(timing: Timing) -> str:
    return f"{_us(timing.median_s)} ({_us(timing.min_s)}-{_us(timing.max_s)})"


def _us(seconds: float) -> str:
    """Return microseconds with three digits at least."""
    number = seconds * 1e6
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
