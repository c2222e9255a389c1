"""Bounds of the settings, and the default journal directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conure.engine.config import EngineConfig
from conure.server.config import Config, ConfigError, default_data_folder, is_loopback
from conure.server.program.decoding.bodies import MAX_BODY_BYTES


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_hosts_are_accepted(host: str) -> None:
    assert is_loopback(host)
    assert Config(data=Path("d"), host=host).host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com", ""])
def test_public_hosts_are_rejected(host: str) -> None:
    with pytest.raises(ConfigError, match="reachable from other machines"):
        Config(data=Path("d"), host=host)


@pytest.mark.parametrize(
    "setting",
    [
        {"port": -1},
        {"port": 65_536},
        {"num_engines": 0},
        {"num_engines": 65},
        {"block_size": 0},
        {"drain_s": -1.0},
        {"time_per_call": float("nan")},
        {"max_body": 0},
        {"max_body": MAX_BODY_BYTES + 1},
        {"engine": "remote"},
        {"engine": "fake", "model": "x"},
        {"dummy_weights": "x", "model": "y"},
        {"dummy_weights": "x", "engine": "fake"},
        {"batch_invariant": True, "engine": "fake"},
    ],
)
def test_error_names_setting_out_of_bounds(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(data=Path("d"), **setting)
    assert next(iter(setting)) in str(caught.value)


def test_engines_know_how_many_share_the_machine() -> None:
    engine = EngineConfig.from_json(Config(data=Path("d"), num_engines=3).to_json())
    assert engine.num_engines == 3


def test_default_folder_ignores_relative_xdg_path() -> None:
    assert default_data_folder({"XDG_STATE_HOME": "/x"}) == Path("/x/conure")
    home = Path.home() / ".local" / "state" / "conure"
    assert default_data_folder({}) == home
    assert default_data_folder({"XDG_STATE_HOME": "relative"}) == home
