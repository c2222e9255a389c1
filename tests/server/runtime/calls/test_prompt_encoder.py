"""Tests of the prompt encoder."""

from __future__ import annotations

import asyncio
from typing import NoReturn

import pytest

from conure.server.runtime.calls.prompt_encoder import EncodeJob, PromptEncoder
from conure.server.runtime.slot_work import SlotWork
from conure.server.runtime.turns import Turns


async def test_log_names_the_node_whose_prompt_crashes(caplog: pytest.LogCaptureFixture) -> None:
    def crash(*_: object) -> NoReturn:
        raise RuntimeError

    crashed = asyncio.Event()
    encoder = PromptEncoder()
    work = SlotWork({}, Turns(), crash)
    encoder.submit(EncodeJob("bad", crash, 1, work, crash, crash, crashed.set))
    await crashed.wait()
    assert "prompt of node bad" in caplog.text
    await encoder.stop()
