"""The Triton kernels compile for sm_90 to machine code that suits a Hopper GPU, and for sm_80.

`aot.py` compiles them in a separate process; the tests here compare its results with budgets. An
sm_90 multiprocessor has 65,536 registers and 228 KB of shared memory for all programs that it runs
at once. A thread has up to 255 registers; further values spill to memory, which is slow.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from typing import Any

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from conure.kernels.gpu.configuration import (
    MAX_SHARED_BYTES,
    SMALL_DEVICE_DIM,
    SMALL_SHARED_BYTES,
    configurations,
    programs_per_processor,
)
from tests.kernels.gpu.aot import AMPERE, CompiledKernel, read_copies_in_flight, read_sass

BYTES_IN_FLIGHT = 29_400
"""Bytes that a multiprocessor must wait for at once: 4.3 TB/s for 0.9 us, over 132 processors."""
OTHER_SHAPES = re.compile(
    r"group(2|5|7|16|48)-|page64|(80x80|96x96|192x192)-page|-window-"
    r"|fp16-group4-(64|256)|group1-128x128-page16-rows(64|128)|64x64-page16-rows\d+-merges"
)
"""Configurations that differ from compiled ones in a size or in a pair of variants only."""
ALL = [each.name for each in configurations()]
COMMON = [name for name in ALL if not OTHER_SHAPES.search(name)]
WITHOUT_OVERLAP = [name for name in ALL if not name.endswith("-overlaps")]
LLAMA = [f"attend-bf16-group4-128x128-page16-rows{rows}" for rows in (16, 128)]
pytestmark = pytest.mark.timeout(1800)  # compiling takes minutes of CPU time


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(COMMON, id="common"),
        pytest.param(ALL, id="all", marks=pytest.mark.slow),
    ],
)
def machine_code(
    request: pytest.FixtureRequest, compiler: Callable[[list[str]], list[dict[str, Any]]]
) -> list[CompiledKernel]:
    """The compilations of some configurations."""
    return [
        CompiledKernel(**{**each, "copies_in_flight": tuple(each["copies_in_flight"])})
        for each in compiler(request.param)
    ]


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(LLAMA, id="llama"),
        pytest.param(WITHOUT_OVERLAP, id="all", marks=pytest.mark.slow),
    ],
)
def ampere_code(
    request: pytest.FixtureRequest, compiler: Callable[..., list[dict[str, Any]]]
) -> list[CompiledKernel]:
    """What devices of compute capability 8 run: they have no programmatic dependent launch."""
    return [CompiledKernel(**each) for each in compiler(request.param, AMPERE)]


def does_not_spill(each: CompiledKernel) -> bool:
    return each.stack_bytes == 0 and each.local_accesses == 0


def keeps_copies_in_flight(each: CompiledKernel) -> bool:
    """Whether tensor cores never wait for a load that was issued immediately before."""
    return not each.is_16_bit or min(each.copies_in_flight) > 0


def multiplies_by_warp_groups(each: CompiledKernel) -> bool:
    """Whether 64 rows or more use HGMMA and 16 rows HMMA; exact float32 has no instruction."""
    if not each.is_16_bit:
        return each.hgmma == each.hmma == 0
    return each.hgmma > 0 if each.rows >= 64 else each.hmma > 0


def loads_16_bytes_per_thread(each: CompiledKernel) -> bool:
    """Whether one iteration loads its data by 16 bytes per thread, or in bulk."""
    return each.tma_loads > 0 or 16 * each.wide_loads * 32 * each.num_warps >= each.tile_bytes


def merges_in_registers(each: CompiledKernel) -> bool:
    """Whether a merge adds partials up without exchanging them between threads."""
    return not each.name.startswith("merge") or each.shared_bytes <= 64


def fits_shared_memory(each: CompiledKernel) -> bool:
    return each.shared_bytes <= MAX_SHARED_BYTES


REQUIREMENTS = (
    does_not_spill,
    fits_shared_memory,
    merges_in_registers,
    keeps_copies_in_flight,
    multiplies_by_warp_groups,
    loads_16_bytes_per_thread,
)


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=lambda requirement: requirement.__name__)
def test_every_kernel_meets(
    machine_code: list[CompiledKernel], requirement: Callable[[CompiledKernel], bool]
) -> None:
    assert [each for each in machine_code if not requirement(each)] == []


def test_kernels_compile_for_devices_without_overlapping_launches(
    ampere_code: list[CompiledKernel],
) -> None:
    assert [each.name for each in ampere_code] in (LLAMA, WITHOUT_OVERLAP)
    assert [each for each in ampere_code if not fits_shared_memory(each)] == []
    small = [each for each in ampere_code if each.widest <= SMALL_DEVICE_DIM]
    assert [each for each in small if each.shared_bytes > SMALL_SHARED_BYTES] == []


def test_programs_of_a_launch_run_at_once(machine_code: list[CompiledKernel]) -> None:
    """If the last programs start when others end, the step takes twice as long."""
    launched = {
        each.name: programs_per_processor(each.shape, each.large)
        for each in configurations()
        if each.shape is not None
    }
    resident = {each.name: each.resident for each in machine_code if each.name in launched}
    assert {name: num for name, num in resident.items() if num < launched[name]} == {}


def test_programs_of_a_processor_read_enough_at_once(machine_code: list[CompiledKernel]) -> None:
    """Items of few queries use the bandwidth of a device if the copies in flight cover its latency.

    They are in the last loop of a kernel.
    """
    copies = {each.name: each.copies_in_flight for each in machine_code}
    num_bytes = {
        each.name: programs_per_processor(each.shape, 0)
        * copies[each.name][-1]
        * each.constants["TILE"]
        * (each.constants["DIM"] + each.constants["VALUE_DIM"])  # keys or values, 2 bytes each
        for each in configurations()
        if each.name in copies
        and each.shape is not None
        and each.shape.dtype.itemsize == 2
        and not each.large
    }
    assert {name: num for name, num in num_bytes.items() if num < BYTES_IN_FLIGHT} == {}


def test_all_configurations_are_compiled(machine_code: list[CompiledKernel]) -> None:
    assert [each.name for each in machine_code] in (COMMON, ALL)


def test_every_kind_of_kernel_is_common() -> None:
    kinds = {name.partition("-")[0] for name in ALL}
    assert {name.partition("-")[0] for name in COMMON} == kinds


def test_copies_in_flight_are_those_of_the_first_wait_in_a_loop_with_products() -> None:
    ttgir = """
  scf.for %arg0 = %c0 to %c1 {
    %a:2 = scf.for %arg1 = %c0 to %c1 iter_args(%x = %y) -> (f32) {
      %w = ttg.async_wait %t {num = 3 : i32}
      %d = ttng.warp_group_dot %w, %k, %acc {isAsync = true} : tensor
      %v = ttg.async_wait %u {num = 1 : i32}
    }
    %b = scf.for %arg1 = %c0 to %c1 {
      %d = tt.dot %w, %k, %acc : tensor
    }
    %c = scf.for %arg1 = %c0 to %c1 {
      %l = tt.load %p : tensor
    }
  }
"""
    assert read_copies_in_flight(ttgir) == (3, 0)


def test_sass_instructions_are_counted() -> None:
    sass = """
        /*0100*/              @!P0 LDG.E.128 R4, desc[UR8][R2.64] ;   /* 0x0 */
        /*0110*/                   LDGSTS.E.BYPASS.LTC128B.128 [R9], desc[UR8][R2.64], P1 ;
        /*0120*/                   LDGSTS.E.LTC128B.64 [R9+0x8], desc[UR8][R2.64] ;
        /*0130*/                   LDG.E R4, desc[UR8][R2.64] ;
        /*0140*/              @UP1 UTMALDG.2D [UR4], [UR6] ;
        /*0150*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0160*/                   HMMA.16816.F32.BF16 R4, R8, R10, R4 ;
        /*0170*/                   STL.64 [R1+0x8], R4 ;
        /*0180*/                   IMAD.MOV.U32 R1, RZ, RZ, c[0x0][0x28] ;
    """
    assert read_sass(sass) == {
        "hgmma": 1,
        "hmma": 1,
        "tma_loads": 1,
        "wide_loads": 2,
        "narrow_loads": 2,
        "local_accesses": 1,
    }
