"""The built-in model: shipped whole, checked before it is loaded, small."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from conure.engine import builtin, checkpoint
from conure.engine.api import EngineError
from conure.engine.local import LocalRunner


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(builtin.FOLDER, tmp_path / "small"))


def test_the_shipped_files_are_intact_and_small() -> None:
    folder = builtin.intact()
    digests = json.loads((folder / builtin.DIGESTS).read_text(encoding="utf-8"))
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(digests)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 8 * 2**20


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_one_changed_byte_is_refused_in_one_line(copy: Path, name: str) -> None:
    content = bytearray((copy / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / name).write_bytes(content)
    with pytest.raises(EngineError) as refused:
        builtin.intact(copy)
    assert refused.value.code == "model.invalid"
    assert name in str(refused.value)
    assert "install" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["model.safetensors", builtin.DIGESTS])
def test_a_missing_file_is_refused(copy: Path, name: str) -> None:
    (copy / name).unlink()
    with pytest.raises(EngineError, match="damaged"):
        builtin.intact(copy)


def test_it_says_who_it_is_and_speaks_in_turns() -> None:
    runner = LocalRunner(model="builtin", threads=1, num_blocks=64)
    assert runner.model == "builtin"
    assert "means nothing" not in runner.description
    assert "<|im_start|>" in runner.chat_template
    found = checkpoint.read(builtin.FOLDER)
    assert found.eos_ids == runner.eos_ids
    assert len(runner.eos_ids) == 2
