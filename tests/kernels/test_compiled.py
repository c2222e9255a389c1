"""The Triton kernels compile for an sm_90 into what a Hopper GPU runs well.

`aot.py` compiles them in a process of its own; here its findings are held against budgets. An
sm_90 has 65,536 registers and 227 KB of shared memory for the blocks that run on it at once,
and a thread has 255 registers; what does not fit goes to memory and is slow.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from conure.kernels.gpu.configuration import configurations

from .aot import Compiled, read_sass

REGISTERS = 65_536
SHARED_BYTES = 227 * 1024
SMALL_BLOCKS = 3
"""Blocks of 16 rows that an sm_90 runs at once at least, for they wait for memory; 2 where heads
are wider than 128 and a block has twice as much on its way."""
LARGE_WARPS = 8
"""Warps that an sm_90 runs at once of blocks with 64 rows and more. Those multiply."""


@pytest.fixture(scope="session")
def machine_code(compiler: Callable[[], list[dict[str, Any]]]) -> list[Compiled]:
    """What became of every configuration."""
    return [Compiled(**each) for each in compiler()]


def keeps_in_registers(each: Compiled) -> bool:
    return each.stack_bytes == 0 and each.local_accesses == 0


def leaves_room_for_others(each: Compiled) -> bool:
    """Several blocks of it fit a multiprocessor, as many as its class is to have."""
    threads = 32 * each.num_warps
    fitting = min(
        REGISTERS // (-(-each.registers // 8) * 8 * threads),
        SHARED_BYTES // max(1, each.shared_bytes + 1024),
    )
    if each.rows < 64:
        return fitting >= SMALL_BLOCKS - (each.widest > 128)
    return fitting * each.num_warps >= LARGE_WARPS


def multiplies_by_warp_groups(each: Compiled) -> bool:
    """From 64 rows on; 16 rows are one warp's instruction, and float32 has none that is exact."""
    if not each.is_16_bit:
        return each.hgmma == each.hmma == 0
    return each.hgmma > 0 if each.rows >= 64 else each.hmma > 0


def loads_16_bytes_a_thread(each: Compiled) -> bool:
    """What it moves in one round comes in loads of 16 bytes, or in bulk."""
    return each.tma_loads > 0 or 16 * each.wide_loads * 32 * each.num_warps >= each.tile_bytes


DEMANDS = (
    keeps_in_registers,
    leaves_room_for_others,
    multiplies_by_warp_groups,
    loads_16_bytes_a_thread,
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("demand", DEMANDS, ids=lambda demand: demand.__name__)
def test_every_kernel(machine_code: list[Compiled], demand: Callable[[Compiled], bool]) -> None:
    assert [each for each in machine_code if not demand(each)] == []


def test_everything_that_models_launch_is_compiled(machine_code: list[Compiled]) -> None:
    assert [each.name for each in machine_code] == [each.name for each in configurations()]


def test_spills_narrow_loads_and_small_products_are_seen_in_machine_code() -> None:
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
