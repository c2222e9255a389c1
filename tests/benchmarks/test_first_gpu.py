"""The stages of the first contact with a GPU: records, limits, pages, and rehearsals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import first_gpu
from gpu import page, serving_cases
from gpu.pack import fatbin, packed
from gpu.record import StageRecord, StageStoppedError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
OTHERS = ("grid", "vllm")
"""Stages that other tests rehearse."""
ABOUT = {"device": "a device", "versions": {"python": "3.12"}}
VLLM = """
__version__ = "double"

class SamplingParams:
    def __init__(self, *, temperature, max_tokens, ignore_eos, detokenize):
        assert temperature == 0 and ignore_eos and not detokenize
        self.max_tokens = max_tokens

class _Output:
    def __init__(self, num):
        self.token_ids = [7] * num

class _Answer:
    def __init__(self, num):
        self.outputs = [_Output(num)]

class LLM:
    def __init__(self, model, **options):
        assert options["load_format"] == "dummy" and options["skip_tokenizer_init"]

    def generate(self, prompts, sampling, use_tqdm):
        assert not use_tqdm and all(prompt["prompt_token_ids"] for prompt in prompts)
        return [_Answer(sampling.max_tokens) for _ in prompts]
"""
"""The part of vLLM's interface that the stage uses."""


def record_of(folder: Path, *, times: list[float] | None = None, **options: object) -> StageRecord:
    """Return a record whose clock shows `times`, then the last time forever."""
    shown = iter(times or [])
    last = [0.0]

    def clock() -> float:
        last[0] = next(shown, last[0])
        return last[0]

    return StageRecord("smoke", folder, 10.0, about=dict(ABOUT), clock=clock, **options)  # type: ignore[arg-type]


def stored(folder: Path, stage: str = "smoke") -> dict[str, object]:
    record: dict[str, object] = json.loads((folder / f"{stage}.json").read_text())
    return record


def fail() -> dict[str, float]:
    raise ValueError("no such kernel\nwith details")


def test_failing_row_does_not_end_the_stage(tmp_path: Path) -> None:
    record = record_of(tmp_path)
    assert record.measure("first", fail) is None
    assert record.measure("second", lambda: {"us": 2.5}) == {"us": 2.5}
    assert stored(tmp_path)["failed"] == {"first": "ValueError: no such kernel"}
    assert stored(tmp_path)["rows"] == [{"name": "second", "us": 2.5}]


def test_no_row_starts_after_the_deadline(tmp_path: Path) -> None:
    record = record_of(tmp_path, times=[1.0, 10.0])
    assert record.measure("in time", lambda: {"us": 1}) is not None
    assert record.measure("late", lambda: pytest.fail("a late row was measured")) is None
    assert stored(tmp_path)["left_out"] == ["late"]


def test_lost_device_ends_the_stage(tmp_path: Path) -> None:
    def lost() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    record = record_of(tmp_path, synchronize=lost)
    with pytest.raises(StageStoppedError, match="illegal memory access"):
        record.measure("first", fail)
    assert stored(tmp_path)["failed"] == {"first": "ValueError: no such kernel"}
    assert "lost" in str(stored(tmp_path)["notes"])


def test_rows_are_written_as_they_are_measured(tmp_path: Path) -> None:
    record = record_of(tmp_path)
    for number in range(3):
        record.measure(str(number), lambda number=number: {"us": number})  # type: ignore[misc]
        assert len(stored(tmp_path)["rows"]) == number + 1  # type: ignore[arg-type]
    assert [each.name for each in tmp_path.iterdir()] == ["smoke.json"]


def test_page_compares_both_engines(tmp_path: Path) -> None:
    for stage, rate in (("ours", 300.0), ("vllm", 200.0)):
        record = StageRecord(stage, tmp_path, 1.0, about=dict(ABOUT), clock=lambda: 0.0)
        record.add("1 request", {"tokens_per_s": rate})
    text = page.write(tmp_path).read_text()
    assert "| 1 request | 300 | 200 | 1.50 |" in text


def test_page_shows_failures_and_what_did_not_run(tmp_path: Path) -> None:
    record = record_of(tmp_path, times=[0.0, 20.0])
    record.measure("broken", fail)
    record.measure("late", fail)
    text = page.write(tmp_path).read_text()
    assert "- FAILED: broken: ValueError: no such kernel" in text
    assert "- not run, the time was over: late" in text


def test_rounds_have_no_prompt_in_common() -> None:
    prompts = [
        tuple(prompt)
        for number in range(3)
        for case in serving_cases.cases(number, is_tiny=True)
        for prompt in case.prompts
    ]
    assert len(set(prompts)) == len(prompts)


def test_serving_record_has_the_median_of_the_counted_rounds(tmp_path: Path) -> None:
    seconds = iter([99.0] * 5 + [1.0] * 5 + [3.0] * 5 + [2.0] * 5)
    record = record_of(tmp_path)
    serving_cases.record_rounds(
        record, lambda *_: serving_cases.Served(next(seconds), 0.5), rounds=3, is_tiny=True
    )
    first = record.rows[0]
    assert first["tokens_per_s"] == 16 / 2.0
    assert (first["min"], first["max"], first["rounds"]) == (16 / 3.0, 16 / 1.0, 3)


def test_pieces_are_unpacked_once(tmp_path: Path) -> None:
    root, here = tmp_path / "root", tmp_path / "here"
    (root / ".gpu").mkdir(parents=True)
    with zipfile.ZipFile(root / ".gpu" / "pkg-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("pkg/__init__.py", "")
    (tmp_path / "lib.so").write_text("binary")
    for number in (1, 2):
        with tarfile.open(root / ".gpu" / f"vllm-{number}.tar.xz", "w:xz") as archive:
            archive.add(tmp_path / "lib.so", f"part{number}.so")
    assert len(packed.unpack(root, here)) == 3
    assert (here / "site" / "pkg" / "__init__.py").is_file()
    assert sorted(each.name for each in (here / "vllm").iterdir()) == ["part1.so", "part2.so"]
    assert packed.unpack(root, here) == []
    assert set(packed.sizes(root)) == {".gpu"}
    assert str(here / "site") in packed.environment(root, here, uses_vllm=False)["PYTHONPATH"]


def test_pieces_for_another_python_are_not_used(tmp_path: Path) -> None:
    (tmp_path / "root" / ".gpu").mkdir(parents=True)
    with zipfile.ZipFile(tmp_path / "root" / ".gpu" / "pkg-1.0-cp312-cp312.whl", "w") as wheel:
        wheel.writestr("pkg.py", "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONURE_GPU", str(tmp_path / "here"))
        patch.setattr(sys, "version_info", (3, 11, 0))
        patch.setattr(first_gpu, "start", lambda *_: True)
        arguments = ("--out", str(tmp_path / "out"), "--packed", str(tmp_path / "root"))
        assert first_gpu.main(["micro", *arguments]) == 0
    assert not (tmp_path / "here").exists()
    given = packed.environment(tmp_path, None, uses_vllm=False)["PYTHONPATH"]
    assert str(tmp_path / "here") not in given


def run(*arguments: str, paths: tuple[str, ...] = (), here: Path) -> tuple[int, str]:
    """Run the command; return its status and output."""
    process = subprocess.run(
        [
            sys.executable,
            str(BENCHMARKS / "first_gpu.py"),
            *arguments,
            *("--packed", str(here.parent)),
        ],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join((*paths, str(BENCHMARKS.parent))),
            "CONURE_GPU": str(here),
            "TRITON_INTERPRET": "0",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    return process.returncode, process.stdout + process.stderr


@pytest.fixture
def rehearse(tmp_path: Path) -> Callable[..., dict[str, object]]:
    """Rehearse one stage; return its record."""

    def rehearsed(
        stage: str, paths: tuple[str, ...] = (), flag: str = "--rehearse"
    ) -> dict[str, object]:
        out = tmp_path / "out"
        arguments = (stage, flag, "--tiny", "--rounds", "1", "--out", str(out))
        # A loaded machine takes longer than a GPU.
        status, output = run(*arguments, "--limit-s", "1200", paths=paths, here=tmp_path / "here")
        assert status == 0, output + (out / "first_gpu.log").read_text()[-3000:]
        assert ("A rehearsal" in (out / page.NAME).read_text()) == (flag == "--rehearse")
        record = stored(out, stage)
        assert record["rows"]
        assert record["failed"] == {}
        return record

    return rehearsed


def test_both_engines_serve_every_case(
    rehearse: Callable[..., dict[str, object]], tmp_path: Path
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(VLLM)
    (tmp_path / "vllm" / "inputs.py").write_text("TokensPrompt = dict\n")
    theirs = rehearse("vllm", paths=(str(tmp_path),), flag="--cpu")
    ours = rehearse("ours", flag="--cpu")
    names = [case.name for case in serving_cases.cases(0, is_tiny=True)]
    for record in (theirs, ours):
        rows: list[dict[str, object]] = record["rows"]  # type: ignore[assignment]
        assert [row["name"] for row in rows] == names
        assert set(rows[0]) == {
            *("name", "tokens_per_s", "min", "max", "rounds", "last_first_token_s", "step_ms")
        }


def test_code_of_other_architectures_is_erased() -> None:
    def entry(kind: int, architecture: int, code: bytes) -> bytes:
        return fatbin.ENTRY.pack(kind, 0, 64, len(code), architecture).ljust(64, b"\0") + code

    def container(*entries: bytes) -> bytes:
        body = b"".join(entries)
        return fatbin.CONTAINER.pack(fatbin.MAGIC, fatbin.VERSION, 16, len(body)) + body

    old, ours, text = b"sm_80 code", b"sm_90 code", b"ptx for sm_90"
    library = bytearray(
        b"elf"
        + container(entry(fatbin.MACHINE_CODE, 80, old), entry(fatbin.MACHINE_CODE, 90, ours))
        + container(entry(fatbin.MACHINE_CODE, 80, old), entry(fatbin.PTX, 90, text))
        + fatbin.MAGIC.to_bytes(4, "little")  # not a container
    )
    size = len(library)
    assert fatbin.erase(library, fatbin.unused(library, 90)) == 2 * len(old)
    assert len(library) == size
    assert old not in library
    assert ours in library
    assert text in library


def test_grid_stage_is_rehearsed(rehearse: Callable[..., dict[str, object]]) -> None:
    pytest.importorskip("triton")
    record = rehearse("grid")
    assert [row["name"] for row in record["rows"]] == ["ceilings", "tiny"]  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("stage", [each for each in first_gpu.STAGES if each not in OTHERS])
def test_stage_is_rehearsed(rehearse: Callable[..., dict[str, object]], stage: str) -> None:
    pytest.importorskip("triton")
    rehearse(stage)


def test_stage_that_cannot_start_is_on_the_page(tmp_path: Path) -> None:
    out = tmp_path / "out"
    status, _ = run("vllm", "--rehearse", "--tiny", "--out", str(out), here=tmp_path / "here")
    assert status == 1
    assert "the stage ended with status 1" in (out / page.NAME).read_text()


def test_every_stage_ends_within_ten_minutes() -> None:
    assert all(stage.limit_s < 590 for stage in first_gpu.STAGES.values())
    assert tuple(page.ORDER) == tuple(first_gpu.STAGES)
