"""Decode steps recorded once and replayed: one launch instead of hundreds.

A decode step of a small batch takes an accelerator less time than it takes the host to ask
for its kernels one by one. All its kernels and their arguments are therefore recorded once
for each number of rows that steps are padded to, and replayed with one call. What is recorded
are addresses: a replay reads what lies in the same buffers *now*, and any number that the
host knew at the time of recording stays as it was. So a function may be recorded only if
everything that differs between two steps of one key comes to it through tensors that do not
move.

Knows functions of tensors; refuses to know models and rows. Kept true: what cannot be
recorded is run as it is.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final, TypeAlias

import torch
from torch import Tensor

MOST_KEYS: Final = 64
"""Recordings hold memory: beyond so many, the one that was not used for longest goes."""

_FORBIDDEN: Final = ("operation not permitted when", "during capture", "while capturing")
"""What torch and CUDA say of a function that cannot be recorded."""

Replay: TypeAlias = Callable[[], Tensor]
Record: TypeAlias = Callable[[Callable[[], Tensor]], Replay]
"""Records what a function asks the device to do; its replay returns the same tensor always."""

_log = logging.getLogger(__name__)


def sizes(most: int) -> tuple[int, ...]:
    """Return the numbers of rows that steps are padded to: powers of two, then `most`."""
    return (*(2**power for power in range(most.bit_length()) if 2**power < most), most)


def padded(num_rows: int, most: int) -> int | None:
    """Return the rows that a step of `num_rows` is padded to, None beyond `most`."""
    return next((size for size in sizes(most) if size >= num_rows), None)


class Graphs:
    """Recordings by key."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._replays: OrderedDict[Hashable, Replay] = OrderedDict()
        self._eager: set[Hashable] = set()
        """Keys for whose recording there was no memory."""
        self._can_record = True

    def __len__(self) -> int:
        return len(self._replays)

    def run(self, key: Hashable, function: Callable[[], Tensor]) -> Tensor:
        """Do what `function` does, from a recording under `key` if there is one.

        Args:
            key: Everything that `function` depends on besides the contents of tensors.
            function: Queues work on the device and asks it for nothing; running it twice
                does what running it once does.

        Returns:
            What it returns, valid until the next `run`.
        """
        replay = self._replays.get(key)
        if replay is not None:
            self._replays.move_to_end(key)
        elif self._can_record and key not in self._eager:
            replay = self._try(key, function)
        return function() if replay is None else replay()

    def _try(self, key: Hashable, function: Callable[[], Tensor]) -> Replay | None:
        if len(self._replays) == MOST_KEYS:
            self._replays.popitem(last=False)
        try:
            replay = self._replays[key] = self._record(function)
        except torch.OutOfMemoryError:
            # This step may still fit without; what was recorded goes on being replayed.
            _log.warning("no memory for a recording of key=%s: such steps run eagerly", key)
            self._eager.add(key)
            return None
        except RuntimeError as error:
            if not any(part in str(error) for part in _FORBIDDEN):
                # Not about recording: the step itself is wrong.
                raise
            # Some models ask the device for numbers on the way.
            self._can_record = False
            line = next(iter(str(error).splitlines()), type(error).__name__)
            _log.warning(
                "the model asks the device for numbers while it decodes, so decode steps "
                "cannot be recorded and run eagerly: %s",
                line,
            )
            return None
        return replay


class CudaGraphs:
    """Records by CUDA graphs, which share the memory of what they need in between."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], Tensor]) -> Replay:
        """Record; see `Record`.

        Raises:
            RuntimeError: if the function does what cannot be recorded.
        """
        with torch.cuda.device(self._device):
            # Once outside: kernels are compiled and libraries make room for themselves.
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                function()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # Other threads of this process may allocate meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                out = function()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay
