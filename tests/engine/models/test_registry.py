"""The names under which models are served."""

from __future__ import annotations

from pathlib import Path

import pytest

from conure.engine.models import builtin, registry


def load(model: str, *, is_dummy: bool = False) -> registry.LoadedModel:
    source = registry.find(model, is_dummy=is_dummy)
    config = registry.read_config(source, is_dummy=is_dummy)
    return registry.load(model, source, config, "float32", "cpu", is_dummy=is_dummy)


def name_of(model: str, *, is_dummy: bool = False) -> str:
    return load(model, is_dummy=is_dummy).name


@pytest.mark.parametrize("is_dummy", [False, True])
def test_a_link_names_its_model(
    is_dummy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "my-model"
    link.symlink_to(builtin.FOLDER)
    assert name_of(str(link), is_dummy=is_dummy) == "my-model"
    monkeypatch.chdir(tmp_path)
    assert name_of("./my-model", is_dummy=is_dummy) == "my-model"
    monkeypatch.chdir(builtin.FOLDER)
    assert name_of(".", is_dummy=is_dummy) == builtin.FOLDER.name


def test_a_config_names_its_random_model(tmp_path: Path) -> None:
    link = tmp_path / "mine.json"
    link.symlink_to(builtin.FOLDER / "config.json")
    assert name_of(str(link), is_dummy=True) == "mine"
    assert name_of(str(builtin.FOLDER / "config.json"), is_dummy=True) == builtin.FOLDER.name


def test_the_hub_name_is_an_alias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conure.engine.models.checkpoint.locate", lambda name: builtin.FOLDER)
    found = load("owner/my-model")
    assert (found.name, found.aliases) == ("my-model", ("owner/my-model",))
    assert load(registry.BUILTIN).aliases == ()
    assert load(str(builtin.FOLDER)).aliases == ()  # paths are not published
