"""Compiles the Triton kernels for a Hopper GPU (sm_90) on a machine that has none.

    python tests/kernels/aot.py [NAME ...] [--json | --list]

Prints what the assembler made of each configuration: registers, stack (anything but 0 is a
spill), shared memory, which matrix instructions there are (HGMMA: a warp group multiplies 64
rows from shared memory; HMMA: a warp multiplies 16 from registers), and how keys and values
are loaded. Needs Triton with its assemblers and no driver. It is a process of its own, for a
process that interprets kernels (TRITON_INTERPRET=1) cannot compile them.

Knows how to compile and to read machine code. What is compiled, and for which arguments, the
kernels' own file lists; what is allowed, `test_compiled.py` says.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from conure.kernels.gpu.configuration import Configuration, configurations

CAPABILITY = 90
ELEMENT_BYTES = {"*bf16": 2, "*fp16": 2, "*fp32": 4}
MNEMONIC = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")


class Compiled(NamedTuple):
    """What became of one configuration."""

    name: str
    rows: int
    """Query rows of its tile; 0 where nothing is multiplied."""
    widest: int
    """Largest of its head sizes; 0 where it knows none."""
    is_16_bit: bool
    """Its products are of 16-bit numbers."""
    tile_bytes: int
    """What one round of its loop reads of the large tensors; keys and values, for example. 0
    where it finds addresses in memory, of which nothing is known."""
    num_warps: int
    registers: int
    """Of a thread."""
    stack_bytes: int
    """Of a thread: registers that went to memory."""
    shared_bytes: int
    """Of a block."""
    hgmma: int
    hmma: int
    tma_loads: int
    """Bulk copies into shared memory."""
    wide_loads: int
    """Loads of 16 bytes a thread."""
    narrow_loads: int
    """Loads of less: scalars, indices, or what ought to be wide."""
    local_accesses: int
    """Loads from and stores to the stack."""


def read_sass(sass: str) -> dict[str, int]:
    """Count the instructions that matter in a listing of machine code."""
    counts = dict.fromkeys(
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


def examine(configuration: Configuration) -> Compiled:
    """Compile one configuration for sm_90 and look at its machine code."""
    kernel = configuration.kernel
    source = ASTSource(
        fn=kernel,
        signature=configuration.signature,
        constexprs=configuration.constants,
        # What the launcher finds out from addresses and numbers that are multiples of 16.
        attrs={
            (kernel.arg_names.index(name),): [["tt.divisibility", 16]]
            for name in configuration.aligned
        },
    )
    target = GPUTarget("cuda", CAPABILITY, 32)
    made = triton.compile(source, target=target, options=configuration.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(made.asm["cubin"])
        cubin.flush()
        found = RESOURCES.search(_dump("--dump-resource-usage", cubin.name))
        counts = read_sass(_dump("-sass", cubin.name))
    assert found is not None, "cuobjdump names no registers"
    return Compiled(
        name=configuration.name,
        rows=max(configuration.constants.get(name, 0) for name in ("SMALL", "LARGE")),
        widest=max(configuration.constants.get(name, 0) for name in ("DIM", "VALUE_DIM")),
        is_16_bit=configuration.signature.get("query") in ("*bf16", "*fp16"),
        tile_bytes=_tile_bytes(configuration),
        num_warps=made.metadata.num_warps,
        registers=int(found[1]),
        stack_bytes=int(found[2]),
        shared_bytes=made.metadata.shared,
        **counts,
    )


def examine_named(name: str) -> Compiled:
    """Compile the configuration of that name."""
    (found,) = (known for known in configurations() if known.name == name)
    return examine(found)


def table(compiled: Sequence[Compiled]) -> str:
    """Return one line a configuration."""
    width = max(len(each.name) for each in compiled)
    lines = [f"{'configuration':{width}} warps  regs stack shared HGMMA HMMA  TMA  16B  less local"]
    lines += [
        f"{each.name:{width}} {each.num_warps:5} {each.registers:5} {each.stack_bytes:5}"
        f" {each.shared_bytes:6} {each.hgmma:5} {each.hmma:4} {each.tma_loads:4}"
        f" {each.wide_loads:4} {each.narrow_loads:5} {each.local_accesses:5}"
        for each in compiled
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    """Compile, as many at a time as there are cores, and print."""
    parser = argparse.ArgumentParser(description="Compile the Triton kernels for sm_90.")
    parser.add_argument("names", nargs="*", help="configurations; all where none is named")
    parser.add_argument("--list", action="store_true", help="print the names alone")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    names = [known.name for known in configurations()]
    if options.list:
        print("\n".join(names))
        return
    if unknown := set(options.names) - set(names):
        parser.error(f"no configuration is called {', '.join(sorted(unknown))}; see --list")
    wanted = options.names or names
    # Code of an earlier run must not stand for this one.
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
            compiled = list(pool.map(examine_named, wanted))
    if options.json:
        print(json.dumps([each._asdict() for each in compiled]))
    else:
        print(table(compiled))


def _tile_bytes(configuration: Configuration) -> int:
    constants, types = configuration.constants, configuration.signature
    kernel = configuration.name.partition("-")[0]
    if kernel == "attend":
        numbers = constants["SMALL_TILE"] * (constants["DIM"] + constants["VALUE_DIM"])
        return int(numbers * ELEMENT_BYTES[types["keys"]])
    if kernel == "merge":
        numbers = constants["PARTS"] * constants["HEAD_TILE"] * constants["VALUE_DIM"]
        return int(numbers * ELEMENT_BYTES[types["partials"]])
    if kernel == "store":
        numbers = constants["KV_HEADS"] * (constants["DIM"] + constants["VALUE_DIM"])
        return int(numbers * ELEMENT_BYTES[types["key"]])
    assert kernel == "move", f"{configuration.name}: what does it read?"
    return 0


def _dump(what: str, cubin: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    done = subprocess.run([tool, what, cubin], capture_output=True, text=True, check=True)
    return done.stdout


if __name__ == "__main__":
    main(sys.argv[1:])
