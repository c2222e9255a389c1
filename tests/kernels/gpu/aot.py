"""Compile the Triton kernels for a Hopper GPU (sm_90) on a machine without one.

    python tests/kernels/gpu/aot.py [NAME ...] [--capability 80] [--json | --list]

Prints for each configuration: registers, stack (anything but 0 is a spill), shared memory, the
number of matrix instructions (HGMMA: a warp group multiplies 64 rows from shared memory; HMMA: a
warp multiplies 16 rows from registers), how keys and values are loaded, how many programs run on
a multiprocessor at once, and how many copies are under way while each loop multiplies. Needs
Triton with its assemblers, but no driver. This is a separate process, because one that interprets
kernels (TRITON_INTERPRET=1) cannot compile them.

The configurations are listed in `conure.kernels.gpu.configuration`; the budgets are in
`test_machine_code.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import accumulate
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from conure.kernels.gpu.configuration import KernelConfiguration, configurations

HOPPER, AMPERE = 90, 80
"""Compute capabilities times 10, as of an H200 and of an A100."""
ELEMENT_BYTES = {"*bf16": 2, "*fp16": 2, "*fp32": 4}
MNEMONIC = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
ADDRESS = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/")
REGISTERS, THREADS = 65_536, 2_048
"""Registers and threads of an sm_90 multiprocessor."""
SHARED_BYTES, RESERVED_SHARED_BYTES = 228 * 1024, 1024
"""Its shared memory, and the part that each program takes for itself."""
PRODUCT = re.compile(r"\b(tt\.dot|ttng\.warp_group_dot) ")
WAIT = re.compile(r"\bttg\.async_wait\b.*\bnum = (\d+)")
RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")


class CompiledKernel(NamedTuple):
    """The machine code of one configuration."""

    name: str
    rows: int
    """Query rows of a tile; 0 without products."""
    widest: int
    """Largest head size; 0 if not applicable."""
    is_16_bit: bool
    """Whether its products are of 16-bit numbers."""
    tile_bytes: int
    """Bytes of the large tensors (keys and values) that one iteration reads; 0 if the kernel
    reads addresses from memory, whose alignment is unknown."""
    num_warps: int
    registers: int
    """Registers per thread."""
    stack_bytes: int
    """Stack per thread: spilled registers."""
    shared_bytes: int
    """Shared memory per block."""
    hgmma: int
    hmma: int
    tma_loads: int
    """Bulk copies into shared memory."""
    wide_loads: int
    """Loads of 16 bytes per thread."""
    narrow_loads: int
    """Smaller loads: scalars, indices, or loads that should be wide."""
    local_accesses: int
    """Loads from and stores to the stack."""
    copies_in_flight: tuple[int, ...]
    """Groups of copies that are still under way when the products of a tile begin, for each loop
    with products. With 0, nothing is read while a tile is multiplied."""

    @property
    def resident(self) -> int:
        """Programs that a multiprocessor runs at once."""
        threads = 32 * self.num_warps
        return min(
            REGISTERS // (-(-self.registers // 8) * 8 * threads),
            SHARED_BYTES // (self.shared_bytes + RESERVED_SHARED_BYTES),
            THREADS // threads,
        )


def read_sass(sass: str) -> dict[str, int]:
    """Count the relevant instructions in a listing of machine code."""
    counts: dict[str, int] = dict.fromkeys(
        ("hgmma", "hmma", "tma_loads", "wide_loads", "narrow_loads", "local_accesses"), 0
    )
    for mnemonic in MNEMONIC.findall(sass):
        parts = mnemonic.split(".")
        if parts[0] == "HGMMA":
            counts["hgmma"] += 1
        elif parts[0] == "HMMA":
            counts["hmma"] += 1
        elif parts[0] == "UTMALDG":
            counts["tma_loads"] += 1
        elif parts[0] in ("LDG", "LDGSTS"):
            counts["wide_loads" if "128" in parts else "narrow_loads"] += 1
        elif parts[0] in ("LDL", "STL"):
            counts["local_accesses"] += 1
    return counts


def read_copies_in_flight(ttgir: str) -> tuple[int, ...]:
    """Return how many groups of copies the first wait of each loop with products leaves."""
    lines = ttgir.splitlines()
    found = []
    for index, line in enumerate(lines):
        if "scf.for" not in line:
            continue
        end = line[: len(line) - len(line.lstrip())] + "}"
        length = next(i for i, each in enumerate(lines[index + 1 :]) if each.startswith(end))
        body = lines[index + 1 : index + 1 + length]
        if any("scf.for" in each for each in body) or not any(map(PRODUCT.search, body)):
            continue
        waits = [int(match[1]) for match in map(WAIT.search, body) if match]
        found.append(waits[0] if waits else 0)
    return tuple(found)


def code_of(cubin: bytes) -> bytes:
    """Return the instructions of an ELF file: the contents of its sections `.text.*`."""
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    heads = [struct.unpack_from("<IIQQQQ", cubin, start + i * size) for i in range(count)]
    first = heads[names][4]
    code = [
        cubin[offset : offset + length]
        for name, _, _, _, offset, length in heads
        if cubin.startswith(b".text.", first + name)
    ]
    assert code, "the kernel has instructions"
    return b"".join(code)


def disassemble(codes: Sequence[bytes], capability: int) -> list[str]:
    """Return a listing of each of some codes. One process lists all: its start takes 0.6 s."""
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(codes))
        file.flush()
        # From Hopper on, Triton compiles for one architecture and not for later ones.
        kind = f"SM{capability}{'a' if capability >= HOPPER else ''}"
        whole = _run("nvdisasm", "--binary", kind, file.name)
    ends = list(accumulate(map(len, codes)))
    listings: list[list[str]] = [[] for _ in codes]
    for line in whole.splitlines():
        if found := ADDRESS.match(line):
            listings[bisect_right(ends, int(found[1], 16))].append(line)
    assert all(listings), "every kernel has instructions"
    return ["\n".join(lines) for lines in listings]


def compile_kernel(
    configuration: KernelConfiguration, capability: int
) -> tuple[dict[str, Any], bytes]:
    """Compile one configuration.

    Returns:
        The fields of `CompiledKernel` that no instruction decides, and the instructions.
    """
    kernel = configuration.kernel
    source = ASTSource(
        fn=kernel,
        signature=configuration.signature,
        constexprs=configuration.constants,
        # The launcher specialises arguments that are multiples of 16.
        attrs={
            (kernel.arg_names.index(name),): [["tt.divisibility", 16]]
            for name in configuration.aligned
        },
    )
    target = GPUTarget("cuda", capability, 32)
    kernel_binary = triton.compile(source, target=target, options=configuration.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel_binary.asm["cubin"])
        cubin.flush()
        match = RESOURCES.search(_run("cuobjdump", "--dump-resource-usage", cubin.name))
    assert match is not None, "cuobjdump prints the registers"
    fields: dict[str, Any] = {
        "name": configuration.name,
        "rows": configuration.constants.get("ROWS", 0),
        "widest": max(configuration.constants.get(name, 0) for name in ("DIM", "VALUE_DIM")),
        "is_16_bit": configuration.signature.get("query") in ("*bf16", "*fp16"),
        "tile_bytes": _tile_bytes(configuration),
        "num_warps": kernel_binary.metadata.num_warps,
        "registers": int(match[1]),
        "stack_bytes": int(match[2]),
        "shared_bytes": kernel_binary.metadata.shared,
        "copies_in_flight": read_copies_in_flight(kernel_binary.asm["ttgir"]),
    }
    return fields, code_of(kernel_binary.asm["cubin"])


def compile_named(name: str, capability: int) -> tuple[dict[str, Any], bytes]:
    """Compile the configuration with a name."""
    (match,) = (known for known in configurations() if known.name == name)
    return compile_kernel(match, capability)


def compile_all(names: Sequence[str], capability: int) -> list[CompiledKernel]:
    """Compile the configurations with some names, on all cores."""
    # Do not reuse code that an earlier run compiled.
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
            compiled = list(pool.map(partial(compile_named, capability=capability), names))
    listings = disassemble([code for _, code in compiled], capability)
    return [
        CompiledKernel(**{**fields, **read_sass(listing)})
        for (fields, _), listing in zip(compiled, listings, strict=True)
    ]


def table(compiled: Sequence[CompiledKernel]) -> str:
    """Return a table with one line per configuration."""
    width = max(len(each.name) for each in compiled)
    heads = "warps  regs stack shared HGMMA HMMA  TMA  16B  less local resident in flight"
    lines = [f"{'configuration':{width}} {heads}"]
    lines += [
        f"{each.name:{width}} {each.num_warps:5} {each.registers:5} {each.stack_bytes:5}"
        f" {each.shared_bytes:6} {each.hgmma:5} {each.hmma:4} {each.tma_loads:4}"
        f" {each.wide_loads:4} {each.narrow_loads:5} {each.local_accesses:5}"
        f" {each.resident:8} {' '.join(map(str, each.copies_in_flight)):>9}"
        for each in compiled
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    """Compile on all cores and print the results."""
    parser = argparse.ArgumentParser(description="Compile the Triton kernels for a GPU.")
    parser.add_argument("names", nargs="*", help="configurations (default: all)")
    parser.add_argument("--capability", type=int, default=HOPPER)
    parser.add_argument("--list", action="store_true", help="print only the names")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    names = [known.name for known in configurations()]
    if options.list:
        print("\n".join(names))
        return
    if unknown := set(options.names) - set(names):
        parser.error(f"unknown configurations: {', '.join(sorted(unknown))}; see --list")
    compiled = compile_all(options.names or names, options.capability)
    if options.json:
        print(json.dumps([each._asdict() for each in compiled]))
    else:
        print(table(compiled))


def _tile_bytes(configuration: KernelConfiguration) -> int:
    constants, types = configuration.constants, configuration.signature
    kernel = configuration.name.partition("-")[0]
    if kernel == "attend":
        elements = constants["TILE"] * (constants["DIM"] + constants["VALUE_DIM"])
        return int(elements * ELEMENT_BYTES[types["keys"]])
    if kernel == "merge":
        elements = 4 * constants["HEAD_TILE"] * constants["VALUE_DIM"]  # of four partials
        return int(elements * ELEMENT_BYTES[types["partials"]])
    if kernel == "store":
        elements = constants["KV_HEADS"] * (constants["DIM"] + constants["VALUE_DIM"])
        return int(elements * ELEMENT_BYTES[types["key"]])
    # Logits are read again and again from the L2 cache; other loads there are narrow, too.
    assert kernel in ("move", "truncate", "sample"), f"unknown kernel: {configuration.name}"
    return 0


def _run(name: str, *arguments: str) -> str:
    """Return what one of Triton's tools prints."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


if __name__ == "__main__":
    main(sys.argv[1:])
