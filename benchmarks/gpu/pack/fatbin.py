"""Erase GPU code that another architecture runs from a shared library, so that it compresses well.

    python benchmarks/gpu/pack/fatbin.py LIBRARY... [--without half_t --but Combine]

A library contains fat binaries: lists of machine code and PTX, each for one architecture. The
driver reads the entry of its device only. The bytes of the others become zeros; sizes and offsets
stay. PTX is kept in a fat binary that has no machine code for the architecture, where it can run.
With `--without`, machine code that contains one of these names is erased, too, unless it contains
a name of `--but`: kernels of data types that are not used. This needs cuobjdump (`CUOBJDUMP`).
"""

from __future__ import annotations

import argparse
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

CONTAINER: Final = struct.Struct("<IHHQ")
"""Magic number, version, bytes of the header, bytes of all entries."""
MAGIC: Final = 0xBA55ED50
VERSION: Final = 1
PTX, MACHINE_CODE = 1, 2
ENTRY: Final = struct.Struct("<HHIQ12xI")
"""Kind, version, bytes of the header, bytes of the code; the architecture follows."""


class Entry(NamedTuple):
    """Code for one architecture."""

    kind: int
    architecture: int
    begin: int
    """Offset of the code in the library."""
    end: int


def containers(library: bytes | bytearray) -> Iterator[list[Entry]]:
    """Yield the entries of each fat binary in a library."""
    magic = MAGIC.to_bytes(4, "little")
    at = library.find(magic)
    while 0 <= at <= len(library) - CONTAINER.size:
        _, version, header_size, size = CONTAINER.unpack_from(library, at)
        end = at + CONTAINER.size + size
        is_container = version == VERSION and header_size == CONTAINER.size
        if is_container and end <= len(library):
            yield list(_entries(library, at + CONTAINER.size, end))
        else:  # the same four bytes in other data
            end = at + len(magic)
        at = library.find(magic, end)


def _entries(library: bytes | bytearray, at: int, end: int) -> Iterator[Entry]:
    while at < end:
        kind, _, header_size, size, architecture = ENTRY.unpack_from(library, at)
        yield Entry(kind, architecture, at + header_size, at + header_size + size)
        at += header_size + size


def erase(library: bytearray, entries: Sequence[Entry]) -> int:
    """Erase the code of entries; return the number of bytes."""
    for entry in entries:
        library[entry.begin : entry.end] = bytes(entry.end - entry.begin)
    return sum(entry.end - entry.begin for entry in entries)


def unused(library: bytes | bytearray, architecture: int) -> list[Entry]:
    """Return the entries that `architecture` does not run."""
    result = []
    for entries in containers(library):
        codes = {entry.architecture for entry in entries if entry.kind == MACHINE_CODE}
        for entry in entries:
            if entry.kind == PTX:
                is_used = architecture not in codes and entry.architecture <= architecture
            else:
                is_used = entry.architecture == architecture
            if not is_used:
                result.append(entry)
    return result


def named(path: Path, without: Sequence[str], but: Sequence[str]) -> list[Entry]:
    """Return the machine code that contains one of the names `without` and none of `but`.

    cuobjdump decompresses the code. It numbers files in the order of the library.
    """
    codes = [
        entry
        for entries in containers(path.read_bytes())
        for entry in entries
        if entry.kind == MACHINE_CODE
    ]
    with tempfile.TemporaryDirectory() as folder:
        command = [os.environ.get("CUOBJDUMP", "cuobjdump"), "-xelf", "all", str(path.resolve())]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        files = {int(each.name.split(".")[-3]): each for each in Path(folder).iterdir()}
        assert sorted(files) == list(range(1, len(codes) + 1)), "cuobjdump lists other code"
        result = []
        for number, entry in enumerate(codes, 1):
            code = files[number].read_bytes()
            is_named, is_kept = (
                any(name.encode() in code for name in names) for names in (without, but)
            )
            if is_named and not is_kept:
                result.append(entry)
    return result


def main(arguments: Sequence[str]) -> None:
    """Rewrite libraries in place."""
    parser = argparse.ArgumentParser(description="Keep the GPU code of one architecture.")
    parser.add_argument("libraries", type=Path, nargs="+", metavar="LIBRARY")
    parser.add_argument("--architecture", type=int, default=90, help="compute capability (90)")
    parser.add_argument("--without", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--but", nargs="*", default=[], metavar="NAME")
    options = parser.parse_args(arguments)
    for path in options.libraries:
        library = bytearray(path.read_bytes())
        erased = 0
        if options.without:
            erased += erase(library, named(path, options.without, options.but))
        erased += erase(library, unused(library, options.architecture))
        path.write_bytes(library)
        print(f"{path}: {erased / 1e6:.1f} of {len(library) / 1e6:.1f} MB erased")


if __name__ == "__main__":
    main(sys.argv[1:])
