"""Answers to client steps."""

from __future__ import annotations

import pytest

from conure.adapters.client.client_steps import MAX_VALUE_BYTES, StepRequest, answer_of
from conure.server.program.decoding.bodies import MAX_BODY_BYTES
from conure.server.program.errors import ProgramError

STEP = StepRequest("request", "node", "name", "output", {}, lambda: None)


def test_an_oversized_value_raises() -> None:
    assert MAX_VALUE_BYTES < MAX_BODY_BYTES
    fitting = "x" * (MAX_VALUE_BYTES - 2)
    assert answer_of(STEP, fitting).request_id == "request"
    with pytest.raises(ProgramError, match=f"{MAX_VALUE_BYTES + 1:,} bytes as JSON") as caught:
        answer_of(STEP, fitting + "x")
    assert caught.value.code == "client.value_too_large"
