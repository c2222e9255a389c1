"""The shared library of the C++ kernels: which one is chosen, and what happens without it."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from conure.kernels import ops
from conure.kernels.cpu import library

PLAIN = library.find("plain")


def cpuinfo_with(tmp_path: Path, line: str) -> Path:
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor : 0\n{line}\n")
    return path


def flags_of(name: str) -> str:
    (found,) = [each for each in library.INSTRUCTION_SETS if each.name == name]
    return " ".join(sorted(found.flags))


def compiler(tmp_path: Path, script: str) -> dict[str, str]:
    """Return an environment whose C++ compiler is a script."""
    path = tmp_path / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return {"CXX": str(path), "XDG_CACHE_HOME": str(tmp_path / "cache")}


@pytest.mark.parametrize(
    ("machine", "line", "expected"),
    [
        ("x86_64", f"flags : {flags_of('avx512bf16')}", "avx512bf16 avx512 avx2 plain"),
        ("x86_64", f"flags : {flags_of('avx512')}", "avx512 avx2 plain"),
        ("x86_64", f"flags : {flags_of('avx2')} avx512f", "avx2 plain"),
        ("x86_64", "flags : fpu sse2", "plain"),
        ("aarch64", "Features : fp asimd bf16", "neonbf16 neon plain"),
        ("aarch64", "Features : fp asimd", "neon plain"),
        ("riscv64", "isa : rv64", "plain"),
    ],
)
def test_processor_gets_only_instructions_that_it_reports(
    machine: str, line: str, expected: str, tmp_path: Path
) -> None:
    found = library.supported(machine, cpuinfo_with(tmp_path, line))
    assert [each.name for each in found] == expected.split()


def test_without_cpuinfo_only_plain_is_supported(tmp_path: Path) -> None:
    assert [each.name for each in library.supported("x86_64", tmp_path / "none")] == ["plain"]


def test_processor_with_matrix_unit_is_recognised(tmp_path: Path) -> None:
    assert library.has_matrix_unit(cpuinfo_with(tmp_path, "flags : avx512f amx_bf16"))
    assert not library.has_matrix_unit(cpuinfo_with(tmp_path, "flags : avx512_bf16"))


def test_pairs_are_preferred_on_amd_only(tmp_path: Path) -> None:
    amd = cpuinfo_with(tmp_path, "vendor_id : AuthenticAMD")
    pairs, floats = (
        next(each for each in library.INSTRUCTION_SETS if each.name == name)
        for name in ("avx512bf16", "avx512")
    )
    assert library.prefers_pairs(pairs, amd)
    assert not library.prefers_pairs(floats, amd)
    intel = cpuinfo_with(tmp_path, "vendor_id : GenuineIntel")
    assert not library.prefers_pairs(pairs, intel)


def test_instructions_that_the_processor_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match="'sse9' is not an instruction set of this processor"):
        ops.implementation("cpu", "sse9")


def test_damaged_library_is_compiled_again(tmp_path: Path) -> None:
    environment = compiler(tmp_path, 'for last; do :; done; echo library > "$last"')
    folder = tmp_path / "cache" / "conure" / "kernels"
    path = library.build(PLAIN, folder, environment)
    good = path.read_bytes()
    assert good.startswith(b"library\n")
    for damaged in (good[:-1], b"", b"x" + good[1:], good + b"x"):
        path.write_bytes(damaged)
        # The script's library cannot be loaded, but it is written.
        with pytest.raises(library.LibraryUnavailableError, match="cannot be loaded"):
            library.load(PLAIN, environment)
        assert path.read_bytes() == good


def test_missing_compiler_is_reported_with_advice(tmp_path: Path) -> None:
    environment = {"CXX": "no-such-compiler", "XDG_CACHE_HOME": str(tmp_path)}
    with pytest.raises(library.LibraryUnavailableError, match="apt install"):
        library.load(PLAIN, environment)


def test_compiler_of_the_environment_may_have_arguments(tmp_path: Path) -> None:
    environment = compiler(tmp_path, """echo "error: $1" >&2; exit 1""")
    with pytest.raises(library.LibraryUnavailableError, match="error: --first"):
        library.load(PLAIN, {**environment, "CXX": f"{environment['CXX']} --first"})
    for wrong in ("missing g++", "g++ 'a", "'"):
        with pytest.raises(library.LibraryUnavailableError, match="does not start with a program"):
            library.load(PLAIN, {**environment, "CXX": wrong, "PATH": ""})


def test_path_of_the_compiler_may_have_blanks(tmp_path: Path) -> None:
    folder = tmp_path / "my tools"
    folder.mkdir()
    environment = compiler(folder, "echo 'error: found' >&2; exit 1")
    with pytest.raises(library.LibraryUnavailableError, match="error: found"):
        library.load(PLAIN, environment)


def test_failing_compiler_is_reported_with_its_error(tmp_path: Path) -> None:
    environment = compiler(tmp_path, "echo 'a.cpp:1: error: no such option' >&2; exit 1")
    with pytest.raises(library.LibraryUnavailableError, match="error: no such option; install"):
        library.load(PLAIN, environment)


def test_unwritable_cache_is_reported_with_advice(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    environment = {"XDG_CACHE_HOME": str(tmp_path / "file")}
    with pytest.raises(library.LibraryUnavailableError, match="set XDG_CACHE_HOME"):
        library.load(PLAIN, environment)


def test_file_name_depends_on_the_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = library.file_name(PLAIN)
    for path in library.SOURCES.glob("*.[ch]*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(library, "SOURCES", tmp_path)
    assert library.file_name(PLAIN) == before
    (tmp_path / "norm.cpp").write_text("// other\n")
    assert library.file_name(PLAIN) != before
