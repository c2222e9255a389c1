"""A fake CUDA device: tensors without memory, kernels that are checked and never launched.

Inside `fake_cuda()` torch reports one GPU. Its tensors have shapes, dtypes and devices but no
numbers (`FakeTensorMode`), so a model of any size loads in no time, and an operator that mixes
devices raises as on a GPU. Triton kernels check their arguments: the names and the device of
tensors, and what the device must be capable of; with `compiles`, Triton also compiles each launch
for sm_90, which fills its cache. A read of a number on the host returns 0 or False and is counted.
It raises during a capture, as in CUDA, and where torch refuses to wait (`set_sync_debug_mode`).

Out of scope: what a kernel computes, and time. Two functions that judge numbers are replaced:
`probe.probe` by the layers given by the caller, and `fused_decoder.logits_match` by True.

Invariants: everything is restored when the block ends, and no driver is needed. A torch without
CUDA needs a C++ compiler, for two seconds (`fake_cuda.cpp`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import itertools
import subprocess
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves, tree_map_only

from ..models import fused_decoder, probe
from ..runner import backend

NAME: Final = "NVIDIA H100 (fake)"
MEMORY_BYTES: Final = 80 * 10**9
PROCESSORS: Final = 132
SHARED_BYTES: Final = 232_448
"""Maximum shared memory of a program on sm_90."""
COMPILER: Final = ("c++", "-O0", "-std=c++20", "-shared", "-fPIC")
GUARD: Final = Path(__file__).with_suffix(".cpp")
_OPTIONS: Final = frozenset({"num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl"})
"""Keywords of a launch that are not arguments of the kernel."""
_MAX_INT32: Final = 2**31
_OVERLAPS: Final = ("LEADS", "FOLLOWS")
"""Constants of kernels that need programmatic dependent launch, and so sm_90."""
_SYNC_MODES: Final = {"default": 0, "warn": 1, "error": 2}


class _Stream:
    cuda_stream = 0

    def wait_stream(self, other: _Stream) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""


@dataclass
class FakeCuda:
    """What happened on a fake device."""

    num_processors: int = PROCESSORS
    compiles: bool = False
    capability: tuple[int, int] = (9, 0)
    shared_bytes: int = SHARED_BYTES
    launches: Counter[str] = field(default_factory=Counter)
    """Launches of each kernel by name."""
    num_reads: int = 0
    """Numbers that the host read outside captures."""
    num_captures: int = 0
    num_replays: int = 0
    num_streams: int = 0
    """Streams besides the default one."""
    is_capturing: bool = False
    sync_debug_mode: int | None = None
    """As an argument of `torch.cuda.set_sync_debug_mode`, None before its first call."""
    stream: _Stream = field(default_factory=_Stream)
    """The current stream."""

    def read(self, operation: str) -> None:
        """Count a number that the host waits for; raise where it must not wait."""
        self.refuse_while_capturing(operation)
        if self.sync_debug_mode == _SYNC_MODES["error"]:
            raise RuntimeError("called a synchronizing CUDA operation")
        self.num_reads += 1

    def refuse_while_capturing(self, operation: str) -> None:
        """Raise as CUDA does for an operation that waits during a capture."""
        if self.is_capturing:
            raise RuntimeError(f"operation not permitted when stream is capturing: {operation}")


@contextlib.contextmanager
def fake_cuda(
    layers: Sequence[probe.LayerKVSpec] | None = None,
    *,
    compiles: bool = False,
    capability: tuple[int, int] = (9, 0),
    shared_bytes: int = SHARED_BYTES,
) -> Iterator[FakeCuda]:
    """Give torch one fake GPU.

    Args:
        layers: What `probe.probe` returns for any model; None keeps the function.
        compiles: Compile each launch for sm_90. Slow: seconds for each new configuration.
        capability: Compute capability of the GPU.
        shared_bytes: Shared memory that a program can have.
    """
    device = FakeCuda(compiles=compiles, capability=capability, shared_bytes=shared_bytes)
    # The classes of transformers name types of torch that are replaced below.
    import_module("transformers.modeling_utils")
    # `torch.device(...)` as a context remembers the constructors when it is first entered.
    _device_constructors()
    with contextlib.ExitStack() as stack:
        for name, value in _cuda_functions(device).items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(fake_tensor, "init_gpu_context", lambda device: None))
        stack.enter_context(
            mock.patch.object(FakeTensorMode, "avoid_device_init", property(lambda mode: True))
        )
        stack.enter_context(mock.patch.object(torch, "empty", _pinned_or(torch.empty, device)))
        stack.enter_context(mock.patch.object(torch, "Generator", _Generator))
        stack.enter_context(mock.patch.object(FakeTensor, "data_ptr", lambda each: 16 * id(each)))
        stack.enter_context(mock.patch.object(backend, "_copy_to_host", _copy_to_host(device)))
        stack.enter_context(
            mock.patch.object(fused_decoder, "logits_match", lambda logits, expected: True)
        )
        if layers is not None:
            stack.enter_context(mock.patch.object(probe, "probe", lambda model, name: [*layers]))
        if torch.version.cuda is None:
            stack.enter_context(_device_guard())
        if compiles:
            stack.enter_context(_triton_driver())
        _replace_kernels(stack, device)
        stack.enter_context(_ReadableMode(device))
        yield device


class _ReadableMode(FakeTensorMode):
    """Fake tensors whose numbers read as 0."""

    def __init__(self, device: FakeCuda) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            self._device.read("reading a number")
            dtype = args[0].dtype
            return False if dtype == torch.bool else 0.0 if dtype.is_floating_point else 0
        if func is torch.ops.aten.equal.default:
            self._device.read("comparing tensors")
            return True
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        is_on_host = tensors and not any(isinstance(each, FakeTensor) for each in tensors)
        if is_on_host and torch.device((kwargs or {}).get("device") or "cpu").type == "cpu":
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and not isinstance(args[0], FakeTensor):
            return args[0]  # a host buffer that receives numbers which do not exist
        args, kwargs = tree_map_only(Tensor, self._fake, (args, kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _fake(self, tensor: Tensor) -> Tensor:
        """Return a tensor of main memory as a fake one; views of one buffer are not related."""
        if isinstance(tensor, FakeTensor):
            return tensor
        with self:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


class _Generator(torch.Generator):
    """A generator of the CPU, for any requested device."""

    def __new__(cls, device: Any = None) -> _Generator:
        """Ignore the device."""
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]  # torch declares none


class _Event:
    """An event that has always happened."""

    def __init__(self, device: FakeCuda, **options: Any) -> None:
        self._device = device

    def record(self, *_: Any) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Return at once; a capture cannot contain a wait."""
        self._device.refuse_while_capturing("waiting for an event")

    def query(self) -> bool:
        """Return True."""
        return True

    def elapsed_time(self, end: _Event) -> float:
        """Return a millisecond: a fake device has no time."""
        return 1.0


class _Graph:
    def __init__(self, device: FakeCuda) -> None:
        self._device = device

    def replay(self) -> None:
        """Count the replay."""
        self._device.num_replays += 1


class _Properties:
    def __init__(self, device: FakeCuda) -> None:
        self.name, self.total_memory = NAME, MEMORY_BYTES
        self.multi_processor_count = device.num_processors
        self.major, self.minor = device.capability
        self.shared_memory_per_block_optin = device.shared_bytes
        self.L2_cache_size = 50 * 2**20


def _cuda_functions(device: FakeCuda) -> dict[str, Any]:
    """Return the replaced attributes of `torch.cuda`."""

    @contextlib.contextmanager
    def capture(*_: Any, stream: _Stream | None = None, **__: Any) -> Iterator[None]:
        device.num_captures += 1
        current, device.stream = device.stream, stream or device.stream
        device.is_capturing = True
        try:
            yield
        finally:
            device.is_capturing = False
        device.stream = current  # as in torch, not after an error

    @contextlib.contextmanager
    def on_stream(stream: _Stream) -> Iterator[None]:
        current, device.stream = device.stream, stream
        try:
            yield
        finally:
            device.stream = current

    def set_stream(stream: _Stream) -> None:
        device.stream = stream

    def set_sync_debug_mode(mode: int | str) -> None:
        if device.sync_debug_mode is None:
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)
        device.sync_debug_mode = mode if isinstance(mode, int) else _SYNC_MODES[mode]

    def synchronize(*_: Any) -> None:
        device.refuse_while_capturing("synchronising")

    def new_stream(**_: Any) -> _Stream:
        device.num_streams += 1
        return _Stream()

    def nothing(*_: Any, **__: Any) -> None:
        return None

    return {
        "device_count": lambda: 1,
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "_lazy_init": nothing,
        "set_device": nothing,
        "empty_cache": nothing,
        "manual_seed_all": nothing,
        "set_rng_state": nothing,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "mem_get_info": lambda *_: (MEMORY_BYTES, MEMORY_BYTES),
        "get_device_name": lambda *_: NAME,
        "get_device_capability": lambda *_: device.capability,
        "get_device_properties": lambda *_: _Properties(device),
        "synchronize": synchronize,
        "Event": lambda **options: _Event(device, **options),
        "Stream": new_stream,
        "current_stream": lambda *_: device.stream,
        "set_stream": set_stream,
        "stream": on_stream,
        "device": contextlib.nullcontext,
        "CUDAGraph": lambda: _Graph(device),
        "graph": capture,
        "graph_pool_handle": lambda: (0, 0),
        "get_sync_debug_mode": lambda: device.sync_debug_mode or 0,
        "set_sync_debug_mode": set_sync_debug_mode,
    }


def _pinned_or(empty: Callable[..., Tensor], device: FakeCuda) -> Callable[..., Tensor]:
    """Return `torch.empty` with pinned memory in main memory: the host writes to it."""

    def replaced(*size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        if not pin_memory:
            return empty(*size, **options)
        device.refuse_while_capturing("allocating pinned memory")
        with unset_fake_temporarily():
            return empty(*size, **options)

    return replaced


def _copy_to_host(device: FakeCuda) -> Callable[[Tensor], Callable[[], Tensor]]:
    """Return a copy of the right shape for `backend.CopyToHostAsync`."""

    def copy(tensor: Tensor) -> Callable[[], Tensor]:
        device.refuse_while_capturing("copying to the host")
        assert tensor.device.type == "cuda", f"the result of a step is on {tensor.device}"
        shape, dtype = tuple(tensor.shape), tensor.dtype

        def wait() -> Tensor:
            with unset_fake_temporarily():
                return torch.zeros(shape, dtype=dtype)

        return wait

    return copy


@contextlib.contextmanager
def _device_guard() -> Iterator[None]:
    """Install a device guard for CUDA in a torch without CUDA."""
    guard = _compiled_guard()
    guard.set_guard(True)
    try:
        yield
    finally:
        guard.set_guard(False)


@functools.cache
def _compiled_guard() -> ctypes.CDLL:
    folder = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "guard.so"
        command = [*COMPILER, str(GUARD), "-o", str(path), f"-I{folder / 'include'}"]
        subprocess.run([*command, f"-L{folder / 'lib'}", "-lc10"], check=True)
        return ctypes.CDLL(str(path))


# --- kernels ------------------------------------------------------------------------------


class _CheckedKernel:
    """A Triton kernel whose launches are checked, or compiled, and not run."""

    def __init__(self, kernel: Any, device: FakeCuda) -> None:
        self._kernel, self._device = kernel, device
        self.arg_names = kernel.arg_names
        self.fn = kernel.fn
        self._name = kernel.fn.__name__
        self._signature = inspect.signature(kernel.fn)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **keywords: Any) -> None:
            self._check(grid, args, keywords)
            self._device.launches[self._name] += 1
            if self._device.compiles:
                self._compile(grid, args, keywords)

        return launch

    def _check(self, grid: tuple[int, ...], args: Any, keywords: dict[str, Any]) -> None:
        options = {key: value for key, value in keywords.items() if key not in _OPTIONS}
        bound = self._signature.bind(*args, **options)
        if self._device.capability < (9, 0):
            used = [name for name in _OVERLAPS if bound.arguments.get(name)]
            assert not used, f"{self._name}: {used} need sm_90, got {self._device.capability}"
        for name, value in bound.arguments.items():
            if isinstance(value, Tensor):
                assert value.device.type == "cuda", f"{self._name}: {name} is on {value.device}"
            elif isinstance(value, int):
                assert abs(value) < _MAX_INT32, f"{self._name}: {name}={value} exceeds int32"
        assert 1 <= len(grid) <= 3, f"{self._name}: a grid has at most 3 dimensions, got {grid}"
        for size, most in zip(grid, (_MAX_INT32, 65_536, 65_536), strict=False):
            assert 1 <= size < most, f"{self._name}: a grid of {grid} cannot be launched"

    def _compile(self, grid: tuple[int, ...], args: Any, keywords: dict[str, Any]) -> None:
        from triton.runtime.jit import MockTensor

        addresses = [
            MockTensor(_triton_type(value.dtype)) if isinstance(value, Tensor) else value
            for value in args
        ]
        with unset_fake_temporarily():
            self._kernel[grid](*addresses, **keywords)


def _triton_type(dtype: torch.dtype) -> Any:
    from triton.language import core

    names = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16", "float16": "fp16"}
    name = str(dtype).removeprefix("torch.")
    return core.dtype(names.get(name, name.replace("uint", "u").replace("int", "int")))


def _replace_kernels(stack: contextlib.ExitStack, device: FakeCuda) -> None:
    """Replace every kernel in the modules that launch them."""
    from conure.kernels.gpu import elementwise, launcher, linear, sampling

    for module in (launcher, elementwise, linear, sampling):
        for name, value in [*vars(module).items()]:
            # Other functions are called by kernels, which must find them as they are.
            if hasattr(value, "fn") and value.fn.__name__.endswith("_kernel"):
                checked = _CheckedKernel(value, device)
                stack.enter_context(mock.patch.object(module, name, checked))
    stack.enter_context(mock.patch.object(launcher, "INTERPRETED", False))


class _Utilities:
    """The functions of a driver's library that Triton calls."""

    _handles = itertools.count(1)

    def get_device_properties(self, _: int) -> dict[str, int]:
        """Return the limits that a launch is checked against."""
        return {"max_shared_mem": SHARED_BYTES, "multiprocessor_count": PROCESSORS}

    def load_binary(self, *_: Any) -> tuple[int, int, int, int, int]:
        """Return module, function, registers, spills and threads of a binary."""
        return (next(self._handles), 1, 0, 0, 1024)


class _Driver:
    """A Triton driver that compiles for sm_90 and launches nothing."""

    def __init__(self) -> None:
        self.utils = _Utilities()

    def launcher_cls(self, *_: Any) -> Callable[..., None]:
        """Return a launcher that does nothing."""
        return lambda *_: None

    def get_current_device(self) -> int:
        """Return the only device."""
        return 0

    def get_current_stream(self, _: int) -> int:
        """Return the default stream."""
        return 0

    def get_current_target(self) -> Any:
        """Return sm_90."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        """Return the fake GPU."""
        return torch.device("cuda", 0)


@contextlib.contextmanager
def _triton_driver() -> Iterator[None]:
    from triton.runtime import driver

    # Asking for the active driver would look for a real one.
    before = driver._active
    driver.set_active(_Driver())
    try:
        yield
    finally:
        driver._active = before
