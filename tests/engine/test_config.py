"""Engine options survive the way to the engine process."""

from __future__ import annotations

from pathlib import Path

import pytest

from conure.engine.config import ConfigError, EngineConfig, fields_of
from conure.engine.kv.capacity import DEFAULT_CONTEXT_LEN


def test_options_round_trip_through_json() -> None:
    config = EngineConfig(model='a "quoted" ü name', script=Path("/tmp/\udcff.json"), num_blocks=9)
    assert EngineConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize("text", ["", "{", '{"unknown": 1}', '{"num_blocks": "x"}'])
def test_malformed_options_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        EngineConfig.from_json(text)


def test_help_states_the_default_context_length() -> None:
    (field,) = (field for field in fields_of(EngineConfig) if field.name == "context_len")
    assert f"at most {DEFAULT_CONTEXT_LEN:,})" in field.option.help
