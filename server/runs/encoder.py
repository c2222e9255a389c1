"""Turns prompts into token ids without holding up the event loop.

Prompts that become ready in one turn of the loop are rendered and encoded together: a few
small ones at once (a thread would cost more than the work), the rest in a worker thread,
in portions, so that the first calls start while the last are still encoded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple

from ..program.ir import Json
from ..prompts.prompt import Rendered
from ..prompts.tokenizer import Encoded
from .call import Call

logger = logging.getLogger(__name__)

INLINE_CHARS = 8_192
"""Characters of prompt that one turn of the loop may encode itself."""
PORTION = 64

Done = Callable[[Rendered, Encoded], None]
Broken = Callable[[Exception], None]


class Work(NamedTuple):
    """One prompt to encode, and who hears of it. Callbacks run on the loop."""

    call: Call
    slot: int
    values: dict[str, Json]
    num_chars: int
    done: Done
    broken: Broken


class Encoder:
    """Encodes what calls hand in, in order."""

    def __init__(self) -> None:
        self._pending: list[Work] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(self, work: Work) -> None:
        """Encode soon; exactly one of the work's callbacks follows in a later turn."""
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._run)
        self._pending.append(work)

    async def stop(self) -> None:
        """Forget what is not encoded yet."""
        self._pending.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _run(self) -> None:
        batch, self._pending = self._pending, []
        if sum(work.num_chars for work in batch) <= INLINE_CHARS:
            _deliver(_encode(batch))
            return
        task = asyncio.create_task(self._in_thread(batch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _in_thread(self, batch: list[Work]) -> None:
        for first in range(0, len(batch), PORTION):
            _deliver(await asyncio.to_thread(_encode, batch[first : first + PORTION]))


def _encode(batch: list[Work]) -> list[tuple[Work, tuple[Rendered, Encoded] | Exception]]:
    results: list[tuple[Work, tuple[Rendered, Encoded] | Exception]] = []
    for work in batch:
        try:
            rendered = work.call.render(work.slot, work.values)
            results.append((work, (rendered, work.call.encode(work.slot, rendered))))
        except Exception as error:
            results.append((work, error))
    return results


def _deliver(results: list[tuple[Work, tuple[Rendered, Encoded] | Exception]]) -> None:
    for work, result in results:
        try:
            if isinstance(result, Exception):
                work.broken(result)
            else:
                work.done(*result)
        except Exception:
            # The others of the batch belong to other programs.
            logger.exception("node %s was encoded and cannot go on", work.call.node.id)
            work.call.fail_internally()
