"""Device backends: a device, and the operations that compute on it.

Only this module distinguishes a CPU from an accelerator.

Invariants: all parts of a `Backend` belong to the same device. Operations of a backend that can
record never synchronise with the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from conure.kernels import elementwise, ops, sampling
from conure.kernels.cpu import library
from conure.kernels.cpu.attention import NativeLibrary
from conure.kernels.cpu.decoder import NativeDecoder
from conure.kernels.cpu.linear import PackedLinear
from conure.kernels.cpu.planner import NativePlanner
from conure.kernels.planning.planner import Planner

from ..models.fused_decoder import MakeNativeDecoder
from ..models.projection import Multiply, Pack
from ..protocol import EngineError
from .cuda_graphs import CudaGraphs, Record

NO_LIBRARY: Final = "none"
"""The `instructions` that select torch operations."""

_REFERENCE_SAMPLING: Final = sampling.ReferenceSampling()

_log = logging.getLogger(__name__)

CopyToHostAsync: TypeAlias = Callable[[Tensor], Callable[[], Tensor]]
"""Starts a copy to main memory, ordered after all queued work. The returned function waits for the
copy and returns it."""


@dataclass(frozen=True, slots=True)
class Backend:
    """A device and its operations."""

    device: torch.device
    operations: ops.AttentionOperations
    fused: elementwise.ElementwiseOperations
    """Operations between matrix products."""
    sampling: sampling.SamplingOperations = _REFERENCE_SAMPLING
    """Samples the tokens of random rows."""
    pack: Pack | None = None
    """Packs weights for products that are faster than torch's."""
    multiply: Multiply = functional.linear
    """Multiplies with weights in torch's layout."""
    make_decoder: MakeNativeDecoder | None = None
    """Runs all layers with packed weights in one call; None where there is no such call."""
    make_planner: Callable[..., Planner] = Planner
    """Takes the options of `Planner`."""
    record: Record | None = None
    """Records decode steps; None where recording saves nothing."""
    copy_to_host: CopyToHostAsync | None = None
    """None where results are in main memory as soon as an operation returns."""
    synchronize: Callable[[], None] | None = None
    """Waits for all queued work; raises RuntimeError if the device is lost. None on a CPU."""

    @property
    def kind(self) -> str:
        """The type of the device: `cpu` or `cuda`."""
        return self.device.type


def create_backend(
    device: torch.device, *, batch_invariant: bool = False, instructions: str = library.AUTO
) -> Backend:
    """Return the backend of an existing device.

    Args:
        device: See `device.pick`.
        batch_invariant: Results of a context must not depend on the rest of the batch.
        instructions: Instruction set of the CPU kernels; see `EngineConfig.cpu_instructions`.

    Raises:
        EngineError: `engine.bad_option` if the device cannot be batch invariant, or the processor
            does not have the instruction set.
    """
    if device.type == "cpu":
        return _cpu_backend(device, "invariant" if batch_invariant else "cpu", instructions)
    if batch_invariant:
        raise EngineError(
            "engine.bad_option",
            "batch_invariant needs a CPU: on a GPU the matrix library chooses the order of "
            "additions by the size of the batch",
        )
    torch.cuda.set_device(device)
    return Backend(
        device,
        ops.implementation("triton"),
        fused=elementwise.implementation("triton"),
        sampling=sampling.implementation("triton"),
        multiply=_multiply_on_gpu(),
        make_planner=_planner_of_accelerator(),
        record=CudaGraphs(device),
        copy_to_host=_copy_to_host,
        synchronize=lambda: torch.cuda.synchronize(device),
    )


def _cpu_backend(device: torch.device, name: str, instructions: str) -> Backend:
    """Return the C++ kernels, or the reference operations if there is no library."""
    if instructions != NO_LIBRARY:
        try:
            found = library.find(instructions)
            native = NativeLibrary(found)
            make_decoder = partial(NativeDecoder, native, is_invariant=name == "invariant")
            return Backend(
                device,
                ops.implementation(name, found.name),
                fused=elementwise.implementation("cpu", found.name),
                pack=partial(_pack, native),
                sampling=sampling.implementation("cpu", found.name),
                make_decoder=make_decoder,
                make_planner=partial(NativePlanner, native),
            )
        except ValueError as error:
            raise EngineError("engine.bad_option", f"cpu_instructions: {error}") from error
        except library.LibraryUnavailableError as error:
            _log.warning("the CPU kernels are not available, so the engine is slow: %s", error)
    return Backend(
        device, ops.implementation("reference"), fused=elementwise.implementation("reference")
    )


def _pack(native: NativeLibrary, weight: Tensor, bias: Tensor | None) -> PackedLinear | None:
    """Pack a weight, unless torch's product is faster or the kernels do not have its type."""
    is_faster = {torch.float32: True, torch.bfloat16: not library.has_matrix_unit()}
    return PackedLinear(native, weight, bias) if is_faster.get(weight.dtype) else None


def _multiply_on_gpu() -> Multiply:
    # Imported on demand: a machine without a GPU does not need triton.
    from conure.kernels.gpu.linear import linear

    return linear


def _planner_of_accelerator() -> Callable[..., Planner]:
    """Return the planner of the C++ library, or the one in Python without a library."""
    try:
        return partial(NativePlanner, NativeLibrary(library.find()))
    except library.LibraryUnavailableError as error:
        _log.warning("steps are planned in Python, which takes up to 1 ms a step: %s", error)
        return Planner


def _copy_to_host(tensor: Tensor) -> Callable[[], Tensor]:
    """Start a copy to pinned memory; see `CopyToHostAsync`."""
    copy = tensor.to("cpu", non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
    copied.record()

    def wait() -> Tensor:
        copied.synchronize()
        return copy

    return wait
