"""A program of an accelerated chain that another client cancels."""

from __future__ import annotations

from pathlib import Path

import pytest

from conure.adapters.client import Client
from conure.adapters.langchain import ChatConure, accelerate
from conure.server.app import create_app
from conure.server.config import Config
from conure.server.program.errors import RunError

from ..shapes import TEXT, ask


def test_cancelled_program_ends_the_chain(tmp_path: Path, submitted: list[str]) -> None:
    config = Config(engine="fake", data=tmp_path, time_per_output_token=0.01)
    with Client(app=create_app(config)) as client:
        short = ChatConure(client=client, temperature=0, max_tokens=2, ignore_eos=True)
        long = short.model_copy(update={"max_tokens": 2_000})
        chunks = accelerate(ask("{x}") | short | TEXT | ask("{y}") | long).stream("tea")
        next(chunks)
        (program,) = submitted
        client.attach(program).cancel()
        with pytest.raises(RunError) as raised:
            list(chunks)
        assert raised.value.code == "program.cancelled"
        assert submitted == [program]
