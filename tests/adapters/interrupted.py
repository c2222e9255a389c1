"""A caller that is interrupted while it submits a program, and the cancellation of the program."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from conure.adapters.client import AsyncClient, Client


def check_interruption_cancels(
    call: Callable[[], Any],
    client: Client,
    double: Any,
    kit: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Interrupt a call while the server's answer is missing; its program must be cancelled."""

    def interrupt(*_: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(type(client._settings), "unreachable", interrupt)
    double.answer("POST", "/v1/programs", kit.Answer(is_lost=True))
    with pytest.raises(KeyboardInterrupt):
        call()
    _check_cancelled_once(double)


async def check_cancelled_task_cancels(
    call: Callable[[], Awaitable[Any]], double: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancel the task of a call before it has the server's answer; so must be its program."""
    is_accepted = asyncio.Event()
    submit = AsyncClient.submit

    async def accept(*args: Any, **kwargs: Any) -> Any:
        await submit(*args, **kwargs)
        is_accepted.set()
        await asyncio.Event().wait()

    async def make_call() -> None:
        await call()

    monkeypatch.setattr(AsyncClient, "submit", accept)
    calling = asyncio.create_task(make_call())
    await is_accepted.wait()
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    _check_cancelled_once(double)


def _check_cancelled_once(double: Any) -> None:
    (post,) = double.of("POST", "/v1/programs")
    assert len(double.of("DELETE", f"/v1/programs/{post.body['id']}")) == 1
