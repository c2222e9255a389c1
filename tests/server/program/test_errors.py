"""Errors keep their fields when they are pickled, as multiprocessing does."""

from __future__ import annotations

import pickle

import pytest

from conure import ConureError, NotReadyError, ProgramError, ServerUnreachableError


@pytest.mark.parametrize(
    "error",
    [
        ProgramError("program.cycle", "a cycle", path="program.nodes[0]"),
        ConureError("server.busy", "busy", retry_after_s=2.0, status=429),
        NotReadyError("variable.not_ready", "no value yet"),
        ServerUnreachableError("no server", was_sent=True, is_known=False),
    ],
)
def test_an_error_survives_pickling(error: ConureError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), vars(copy)) == (str(error), vars(error))
    assert copy.status == error.status
