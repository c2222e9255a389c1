"""The seeded random model: a complete folder, the same everywhere, made once."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path

import pytest
import torch

from conure.engine.testing import random_model
from conure.engine.text import byte_tokenizer

from .. import shrunk

WEIGHTS = "65e81a2c71a0f3960214a51136ebf147443ca1447bf487b494b466545c85777b"


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_weights_are_equal_on_all_machines(tmp_path: Path) -> None:
    folder = random_model.create(tmp_path / "model")
    assert digest(folder) == WEIGHTS, "other weights need another seeded.VERSION"


def test_another_seed_gives_another_model(tmp_path: Path) -> None:
    assert digest(random_model.create(tmp_path / "a")) != digest(
        random_model.create(tmp_path / "b", seed=1)
    )


def test_existing_folder_is_not_changed(tmp_path: Path) -> None:
    folder = random_model.create(tmp_path / "deep" / "model")
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert random_model.create(folder, seed=5) == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == ["model"], "nothing left beside it"


def test_concurrent_creation_yields_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    rename = os.rename

    def late(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "rename", rename)
        random_model.create(folder, seed=1)
        rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    random_model.create(folder)
    assert digest(folder) == digest(random_model.create(tmp_path / "other", seed=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "other"]


def test_transformers_loads_all_weights(tmp_path: Path) -> None:
    model = shrunk.load(random_model.create(tmp_path / "model"))
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.config.vocab_size == byte_tokenizer.VOCAB_SIZE
    assert model.generation_config is not None
    assert model.generation_config.eos_token_id == list(byte_tokenizer.EOS_IDS)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["max_position_embeddings"] == random_model.CONTEXT_LEN


def test_greedy_text_is_varied_and_has_no_ties(tmp_path: Path) -> None:
    model = shrunk.load(random_model.create(tmp_path / "model"))
    for text in ("Hello, world. ", "Summarise: ", "a"):
        ids = list(text.encode())
        num_prompt = len(ids)
        with torch.inference_mode():
            cache = None
            fresh = ids
            gaps = []
            for _ in range(60):
                out = model(torch.tensor([fresh]), past_key_values=cache, use_cache=True)
                best = out.logits[0, -1].topk(2)
                gaps.append(float(best.values[0] - best.values[1]))
                cache, fresh = out.past_key_values, [int(best.indices[0])]
                ids.extend(fresh)
        generated = ids[num_prompt:]
        assert len(set(generated)) >= 10, "a constant repetition"
        assert bytes(token for token in generated if token < 256).isascii()
        assert sorted(gaps)[3] > 10 * shrunk.TIE, "nearly tied too often"


def test_temporary_folder_replaces_unwritable_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = random_model.create_cached()
    assert (folder / "model.safetensors").is_file()
    assert tmp_path in folder.parents
