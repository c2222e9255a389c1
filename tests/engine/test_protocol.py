"""The records that server and engine share."""

from __future__ import annotations

from conure.engine.protocol import SamplingParams
from conure.server.program.content import Sampling


def test_sampling_records_have_the_same_fields() -> None:
    # The server copies the fields by name.
    assert SamplingParams.__struct_fields__ == Sampling.__struct_fields__
