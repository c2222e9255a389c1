"""Why a model folder cannot be served, without loading its weights."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from conure.engine.models import builtin, checkpoint, weights
from conure.engine.models.checkpoint import read
from conure.engine.models.inspection import (
    downloaded_folder,
    has_chat_template,
    problem_of,
    weight_files,
)
from conure.engine.protocol import EngineError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(builtin.FOLDER, tmp_path / "model")


def shard(folder: Path) -> Path:
    """Move the weights of a folder to a file that an index names."""
    moved = (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = {"metadata": {}, "weight_map": {"some": moved.name, "other": moved.name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return moved


def test_complete_folder_has_no_problem(folder: Path) -> None:
    assert problem_of(folder) is None
    shard(folder)
    assert problem_of(folder) is None


def test_a_folder_without_a_chat_template_can_be_served(folder: Path) -> None:
    assert has_chat_template(folder)
    config = folder / "tokenizer_config.json"
    content = json.loads(config.read_text())
    del content["chat_template"]
    config.write_text(json.dumps(content))
    assert problem_of(folder) is None
    assert not has_chat_template(folder)


def test_engine_refuses_cut_off_weights_for_the_same_reason(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 100_000)
    checkpoint = read(folder)
    with pytest.raises(EngineError) as refused:
        weights.load(checkpoint, weights.read_config(checkpoint), "auto")
    reason = refused.value.message.partition(": ")[2]
    assert str(problem_of(folder)).startswith(f"cannot load {folder}/model.safetensors: {reason}")


def test_unread_files_do_not_matter(folder: Path) -> None:
    (folder / "consolidated.safetensors").touch()
    assert problem_of(folder) is None


@pytest.mark.parametrize("name", ["own.safetensors", "own.safetensors.index.json"])
def test_a_config_may_name_its_weights(name: str, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    moved = shard(folder)
    index = folder / "model.safetensors.index.json"
    if name.endswith(".json"):
        index.rename(folder / name)
    else:
        index.unlink()
        moved = moved.rename(folder / name)
    (folder / "config.json").write_text(json.dumps({**config, "transformers_weights": name}))
    assert problem_of(folder) is None
    assert weight_files(folder) == [moved]
    checkpoint = read(folder)
    weights.load(checkpoint, weights.read_config(checkpoint), "auto")
    (folder / name).unlink()
    (folder / "other.safetensors").touch()
    assert str(folder / name) in str(problem_of(folder))


def test_missing_shard_is_named(folder: Path) -> None:
    moved = shard(folder)
    moved.rename(folder / "renamed.safetensors")
    assert f"cannot load {moved}: " in str(problem_of(folder))


@pytest.mark.parametrize("index", [None, "", "[]", "{}", '{"weight_map": []}'])
def test_weights_without_a_readable_index_are_a_problem(folder: Path, index: str | None) -> None:
    shard(folder)
    path = folder / "model.safetensors.index.json"
    path.unlink()
    if index is not None:
        path.write_text(index)
    assert "model.safetensors.index.json cannot be read" in str(problem_of(folder))


def test_a_downloaded_model_is_found_by_the_files_that_a_start_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, object]] = []

    def fetch(name: str, **options: object) -> str:
        asked.append(options)
        if options.get("local_files_only") and len(asked) > 1:
            raise LocalEntryNotFoundError("not downloaded")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert downloaded_folder("owner/name") == tmp_path
    assert downloaded_folder("owner/name") is None
    checkpoint.locate("owner/name")
    assert asked[0] == {**asked[2], "local_files_only": True}


def test_no_model_is_found_in_an_empty_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert downloaded_folder("owner/name") is None
    assert downloaded_folder("-owner/name") is None  # no name of a repository
