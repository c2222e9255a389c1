"""The built-in model: shipped whole, checked before it is loaded, small."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from conure.engine.config import EngineConfig
from conure.engine.models import builtin, checkpoint
from conure.engine.protocol import EngineError
from conure.engine.runner.torch_runner import TorchModelRunner


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(builtin.FOLDER, tmp_path / "small"))


def test_shipped_files_match_their_digests() -> None:
    folder = builtin.verified_folder()
    digests = json.loads((folder / builtin.DIGESTS).read_text(encoding="utf-8"))
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(digests)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 8 * 2**20


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_one_changed_byte_is_rejected(copy: Path, name: str) -> None:
    content = bytearray((copy / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / name).write_bytes(content)
    with pytest.raises(EngineError) as refused:
        builtin.verified_folder(copy)
    assert refused.value.code == "model.invalid"
    assert name in str(refused.value)
    assert "install" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["model.safetensors", builtin.DIGESTS])
def test_missing_file_is_rejected(copy: Path, name: str) -> None:
    (copy / name).unlink()
    with pytest.raises(EngineError, match="damaged"):
        builtin.verified_folder(copy)


@pytest.mark.parametrize("written", ["{}", "[" * 100_000, "[]", "7", '{"config.json": 1}'])
def test_incomplete_digests_are_rejected(copy: Path, written: str) -> None:
    (copy / builtin.DIGESTS).write_text(written, "utf-8")
    with pytest.raises(EngineError, match=r"damaged.*reinstall conure"):
        builtin.verified_folder(copy)


def test_unexpected_file_is_rejected(copy: Path) -> None:
    (copy / "chat_template.jinja").write_text("hacked", "utf-8")
    with pytest.raises(EngineError, match=r"chat_template.jinja: unexpected file"):
        builtin.verified_folder(copy)


def test_built_in_model_describes_itself() -> None:
    runner = TorchModelRunner(EngineConfig(model="builtin", threads=1, num_blocks=64))
    assert runner.model == "builtin"
    assert "means nothing" not in runner.description
    assert runner.purpose == "demonstration"
    assert "<|im_start|>" in runner.chat_template
    found = checkpoint.read(builtin.FOLDER)
    assert found.eos_ids == runner.eos_ids
    assert len(runner.eos_ids) == 2
