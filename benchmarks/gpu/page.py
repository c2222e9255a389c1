"""One page of results: the rows of all stages in a folder as Markdown tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from .record import shown

NAME: Final = "first_gpu.md"
ORDER: Final = ("smoke", "tests", "micro", "decode", "grid", "ours", "vllm", "programs", "sweep")


def write(folder: Path) -> Path:
    """Write the page of the records in a folder; return its path."""
    records = read(folder)
    path = folder / NAME
    path.write_text(page(records), "utf-8")
    return path


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the records in a folder, in the order of the stages."""
    paths = [folder / f"{stage}.json" for stage in ORDER]
    return [json.loads(path.read_text("utf-8")) for path in paths if path.is_file()]


def page(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the page."""
    lines = ["# First contact with a GPU", ""]
    if any(record.get("is_rehearsal") for record in records):
        lines += ["**A rehearsal on a fake device: no figure on this page means anything.**", ""]
    for record in records:
        lines += _section(record)
    lines += _comparison({record["stage"]: record for record in records})
    return "\n".join(lines)


def section(record: Mapping[str, Any]) -> str:
    """Return one stage as Markdown."""
    return "\n".join(_section(record))


def _section(record: Mapping[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    lines = [f"## {record['stage']}", "", f"{record['device']}; {versions}.", ""]
    lines += _table(record["rows"])
    lines += [f"- FAILED: {name}: {reason}" for name, reason in record["failed"].items()]
    if record["left_out"]:
        lines.append(f"- not run, the time was over: {', '.join(record['left_out'])}")
    lines += [f"- {note}" for note in record["notes"]]
    return [*lines, ""]


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row if name != "name"))
    if not rows:
        return []
    lines = ["| | " + " | ".join(names) + " |", "| --- |" + " --- |" * len(names)]
    for row in rows:
        cells = (shown(row[name]) if name in row else "" for name in names)
        lines.append(f"| {row['name']} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _comparison(records: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the rows of both engines side by side, if both have run."""
    if not {"ours", "vllm"} <= set(records):
        return []
    ours, theirs = (
        {row["name"]: row for row in records[stage]["rows"]} for stage in ("ours", "vllm")
    )
    lines = ["## Conure and vLLM, output tokens per second", ""]
    lines += ["| | ours | vLLM | ours / vLLM |", "| --- | --- | --- | --- |"]
    for name in ours:
        if name in theirs:
            pair = [float(side[name]["tokens_per_s"]) for side in (ours, theirs)]
            lines.append(f"| {name} | {pair[0]:.0f} | {pair[1]:.0f} | {pair[0] / pair[1]:.2f} |")
    return [*lines, ""]
