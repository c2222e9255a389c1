"""Encodes prompts into token ids without blocking the event loop.

Prompts that become ready in the same turn of the loop are encoded together: a few small ones
inline (a thread would cost more than the work), the others in a worker thread, in portions, so
that the first calls start while the last are still being encoded. A prompt whose expressions take
long is encoded among the long computations of its program (`SlotWork`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from ...program.expressions.budget import WorkBudget
from ...prompts.prompt import RenderedPrompt
from ...prompts.tokenizer import EncodedText
from ..slot_work import INLINE_STEPS, SlotWork, is_too_long

logger = logging.getLogger(__name__)

INLINE_CHARS = 8_192
"""Characters of prompt encoded on the event loop in one turn."""
PORTION = 64

EncodedPrompt: TypeAlias = tuple[RenderedPrompt, EncodedText]


class EncodeJob(NamedTuple):
    """A prompt to encode. `encode` may run in a thread; the callbacks run on the event loop."""

    node: str
    """Id of the node, for the log."""
    encode: Callable[[WorkBudget], EncodedPrompt]
    """Renders and encodes the prompt; charges its expressions to the budget."""
    num_chars: int
    """Characters of the prompt, and some for each of its segments."""
    work: SlotWork
    """The computations of the prompt's program."""
    on_encoded: Callable[[RenderedPrompt, EncodedText], None]
    on_error: Callable[[Exception], None]
    on_crash: Callable[[], None]
    """Called if one of the other callbacks raises."""


class PromptEncoder:
    """Encodes the prompts of all calls in order of submission."""

    def __init__(self) -> None:
        self._pending: list[EncodeJob] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(self, job: EncodeJob) -> None:
        """Encode a prompt. One of the job's callbacks is called in a later turn of the loop."""
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._run)
        self._pending.append(job)

    async def stop(self) -> None:
        """Drop all prompts that are not encoded yet."""
        self._pending.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _run(self) -> None:
        batch, self._pending = self._pending, []
        if sum(job.num_chars for job in batch) <= INLINE_CHARS:
            _deliver(_encode(batch))
            return
        task = asyncio.create_task(self._run_in_thread(batch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_in_thread(self, batch: list[EncodeJob]) -> None:
        for first in range(0, len(batch), PORTION):
            _deliver(await asyncio.to_thread(_encode, batch[first : first + PORTION]))


EncodeResult: TypeAlias = tuple[EncodeJob, EncodedPrompt | Exception]


def _encode(batch: list[EncodeJob]) -> list[EncodeResult]:
    budget = WorkBudget(INLINE_STEPS, is_trial=True)
    return [(job, _encode_one(job, budget)) for job in batch]


def _encode_one(job: EncodeJob, budget: WorkBudget) -> EncodedPrompt | Exception:
    try:
        return job.encode(budget)
    except Exception as error:
        return error


def _deliver(results: list[EncodeResult]) -> None:
    for job, result in results:
        if isinstance(result, Exception) and is_too_long(result):
            _encode_long(job)
        else:
            _deliver_one(job, result)


def _encode_long(job: EncodeJob) -> None:
    job.work.submit(
        lambda budget: _encode_one(job, budget), lambda outcome: _deliver_one(job, outcome.get())
    )


def _deliver_one(job: EncodeJob, result: EncodedPrompt | Exception) -> None:
    try:
        if isinstance(result, Exception):
            job.on_error(result)
        else:
            job.on_encoded(*result)
    except Exception:
        # The other prompts of the batch belong to other programs.
        logger.exception("the encoded prompt of node %s could not be queued", job.node)
        job.on_crash()
