"""Recorded steps: one launch of a CUDA graph instead of hundreds of kernel launches.

A step of few tokens takes an accelerator less time than the host needs to launch its kernels one
by one. The kernels and their arguments are therefore recorded once for each padded number of
tokens, and replayed with one call. A recording holds addresses: a replay reads the current
content of the same buffers. Numbers that the host passed to the kernels keep their recorded value.
A function can be recorded only if everything that may differ between two steps with the same key
is in tensors whose addresses do not change.

Out of scope: models and rows.
Invariants: a function that cannot be recorded is run eagerly.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Hashable, Iterator
from typing import Final, TypeAlias

import torch
from cachetools import LRUCache
from torch import Tensor

MAX_RECORDINGS: Final = 160
"""Recordings take memory. The least recently used one is dropped beyond this number."""
RECORDING_BYTES: Final = 8 * 2**20
"""Estimated memory of one recording, besides the tensors that all of them share."""

_WAITED: Final = "called a synchronizing CUDA operation"
"""Part of torch's error for a function that waits for the device where that is refused."""
_NOT_RECORDABLE: Final = (
    _WAITED,
    "operation not permitted when",
    "during capture",
    "while capturing",
)
"""Parts of the errors of torch and CUDA for a function that cannot be recorded."""

Replay: TypeAlias = Callable[[], Tensor]
Record: TypeAlias = Callable[[Callable[[], Tensor]], Replay]
"""Records the device work of a function. The replay returns the same tensor every time."""

_log = logging.getLogger(__name__)


def bucket_sizes(most: int) -> tuple[int, ...]:
    """Return the padded numbers of rows: powers of two, then `most`."""
    return (*(2**power for power in range(most.bit_length()) if 2**power < most), most)


class CudaGraphCache:
    """Recordings by key."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._replays: LRUCache[Hashable, Replay] = LRUCache(MAX_RECORDINGS)
        self._eager_keys: set[Hashable] = set()
        """Keys that could not be recorded for lack of memory."""
        self.can_record = True
        """False as soon as a function could not be recorded for another reason."""
        self.last_replay: Replay | None = None
        """Replay of the latest step, None if it ran eagerly."""

    def __len__(self) -> int:
        return len(self._replays)

    def has(self, key: Hashable) -> bool:
        """Return whether steps of a key are recorded."""
        return key in self._replays

    def may_record(self, key: Hashable) -> bool:
        """Return whether `run` records a step of a key that is not recorded."""
        return self.can_record and key not in self._eager_keys

    def run(self, key: Hashable, function: Callable[[], Tensor]) -> Tensor:
        """Replay the recording of `key`, or record `function` first.

        Args:
            key: Everything that `function` depends on besides the contents of tensors.
            function: Queues work on the device without synchronising. Running it twice has the
                same effect as running it once.

        Returns:
            The result of `function`, valid until the next `run`.
        """
        replay = self._replays.get(key)
        if replay is None and self.may_record(key):
            replay = self._try_record(key, function)
        self.last_replay = replay
        return function() if replay is None else replay()

    def _try_record(self, key: Hashable, function: Callable[[], Tensor]) -> Replay | None:
        if len(self._replays) == MAX_RECORDINGS:
            # Free the memory of the least recently used recording before a new one is made.
            self._replays.popitem()
        try:
            replay = self._replays[key] = self._record(function)
        except torch.OutOfMemoryError:
            # The eager step may still fit. Existing recordings stay in use.
            _log.warning("not enough memory to record steps of key=%s: they run eagerly", key)
            self._eager_keys.add(key)
            return None
        except RuntimeError as error:
            if not any(part in str(error) for part in _NOT_RECORDABLE):
                raise
            # Some models read numbers from the device during the forward pass.
            self.can_record = False
            line = next(iter(str(error).splitlines()), type(error).__name__)
            _log.warning(
                "decode steps run eagerly because they cannot be recorded: the model reads "
                "numbers from the device while it decodes (%s)",
                line,
            )
            return None
        return replay


class CudaGraphs:
    """Records functions as CUDA graphs that share one memory pool for temporaries.

    A function should write its result to a tensor that it owns: a result allocated during recording
    keeps its memory until the recording is dropped.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # One stream for all recordings: torch caches memory per stream, and cuBLAS a workspace.
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, function: Callable[[], Tensor]) -> Replay:
        """Record a function; see `Record`.

        Raises:
            RuntimeError: if the function cannot be recorded.
        """
        with torch.cuda.device(self._device):
            if self._stream is None:
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's
            side, current = self._stream, torch.cuda.current_stream()
            side.wait_stream(current)
            try:
                with torch.cuda.stream(side):
                    _run_eagerly(function)
            finally:
                current.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            try:
                # Other threads of this process may allocate meanwhile.
                with torch.cuda.graph(
                    graph, pool=self._pool, stream=side, capture_error_mode="thread_local"
                ):
                    out = function()
            finally:
                # torch does not leave the stream of a capture that failed.
                torch.cuda.set_stream(current)

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


def _run_eagerly(function: Callable[[], Tensor]) -> None:
    """Run a function before it is recorded: kernels are compiled, libraries allocate workspaces.

    A function that waits for the device is found here, because a capture that fails has side
    effects: in torch 2.11, the allocator frees no cached memory any more.

    Raises:
        RuntimeError: if the function waits for the device whenever it is run.
    """
    try:
        with _refusing_waits():
            function()
    except RuntimeError as error:
        if _WAITED not in str(error):
            raise
        # It may have waited once, for numbers that it keeps.
        function()
        with _refusing_waits():
            function()


@contextlib.contextmanager
def _refusing_waits() -> Iterator[None]:
    """Let torch raise an error instead of waiting for the device."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # It does not find every wait: torch warns of that once.
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
