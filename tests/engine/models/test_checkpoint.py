"""What is read from a model folder, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.utils._paths import filter_repo_objects
from tokenizers import Tokenizer
from tokenizers.normalizers import Replace
from tokenizers.processors import TemplateProcessing

from conure.engine.models import checkpoint
from conure.engine.protocol import EngineError
from conure.engine.testing.scripted_runner import FakeRunner
from conure.engine.text import byte_tokenizer

from .. import shrunk
from ..constraint_harness import ConstraintHarness, lark


def folder_of(path: Path, files: dict[str, Any]) -> Path:
    """Write the files of a minimal folder, replaced and extended by `files`; None omits one."""
    minimal: dict[str, Any] = {
        "config.json": {"model_type": "llama"},
        "tokenizer.json": byte_tokenizer.tokenizer_json(),
        "model.safetensors": "",
    }
    for name, content in {**minimal, **files}.items():
        if content is not None:
            text = content if isinstance(content, str | bytes) else json.dumps(content)
            (path / name).write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_minimal_folder_has_no_template_and_no_bos(tmp_path: Path) -> None:
    found = checkpoint.read(folder_of(tmp_path, {}))
    assert found.chat_template == ""
    assert found.special_tokens == {}
    assert found.bos_id is None
    assert found.eos_ids == ()


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, 7, (7,)),
        (None, [7, 8], (7, 8)),
        ({"eos_token_id": 5}, 7, (5,)),
        ({"eos_token_id": [5, 6]}, 7, (5, 6)),
        ({}, 7, (7,)),
    ],
)
def test_generation_config_overrides_eos_ids(
    tmp_path: Path, generation: Any, config: Any, expected: tuple[int, ...]
) -> None:
    files = {
        "generation_config.json": generation,
        "config.json": {"model_type": "llama", "eos_token_id": config},
    }
    assert checkpoint.read(folder_of(tmp_path, files)).eos_ids == expected


@pytest.mark.parametrize(
    ("token", "configured", "expected"),
    [
        ("<|im_end|>", 256, (256, 258)),
        ("<|im_end|>", [258, 256], (258, 256)),
        ("<|im_end|>", None, (258,)),
        ("<|unknown|>", 256, (256,)),
        ("a", 256, (256,)),
    ],
)
def test_special_eos_token_of_the_tokenizer_ends_texts_too(
    tmp_path: Path, token: str, configured: Any, expected: tuple[int, ...]
) -> None:
    files = {
        "generation_config.json": {"eos_token_id": configured},
        "tokenizer_config.json": {"eos_token": token},
    }
    assert checkpoint.read(folder_of(tmp_path, files)).eos_ids == expected


def test_bos_is_what_the_tokenizer_adds(tmp_path: Path) -> None:
    text = shrunk.with_bos(byte_tokenizer.tokenizer_json())
    assert checkpoint.read(folder_of(tmp_path, {"tokenizer.json": text})).bos_id == 256


def test_bos_is_found_if_the_tokenizer_has_no_ids_for_a_letter(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(shrunk.with_bos(byte_tokenizer.tokenizer_json()))
    tokenizer.normalizer = Replace("a", "")
    found = checkpoint.read(folder_of(tmp_path, {"tokenizer.json": tokenizer.to_str()}))
    assert found.bos_id == 256


def test_several_tokens_before_a_text_are_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = Tokenizer.from_str(byte_tokenizer.tokenizer_json())
    tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> <|im_start|> $A <|im_end|>",
        special_tokens=list(byte_tokenizer.SPECIAL_IDS.items()),
    )
    found = checkpoint.read(folder_of(tmp_path, {"tokenizer.json": tokenizer.to_str()}))
    assert found.bos_id is None
    assert "adds 2 tokens before a text, ['<|endoftext|>', '<|im_start|>']" in caplog.text


@pytest.mark.parametrize("options", [{"length": 32}, {"pad_to_multiple_of": 8}])
def test_padding_and_truncation_of_a_tokenizer_are_removed(
    tmp_path: Path, options: dict[str, int]
) -> None:
    text = shrunk.with_bos(byte_tokenizer.tokenizer_json())
    tokenizer = Tokenizer.from_str(text)
    tokenizer.enable_padding(**options)
    tokenizer.enable_truncation(4)
    found = checkpoint.read(folder_of(tmp_path, {"tokenizer.json": tokenizer.to_str()}))
    assert found.bos_id == 256
    read = Tokenizer.from_str(found.tokenizer_json)
    assert (read.padding, read.truncation) == (None, None)
    assert json.loads(found.tokenizer_json) == json.loads(text)


def test_padding_of_a_tokenizer_does_not_reach_constrained_outputs(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(byte_tokenizer.tokenizer_json())
    tokenizer.enable_padding(length=32)
    folder = folder_of(tmp_path, {"tokenizer.json": tokenizer.to_str()})
    runner = FakeRunner()
    runner.tokenizer_json = checkpoint.read(folder).tokenizer_json
    harness = ConstraintHarness(runner)
    assert harness.call(lark('start: "only this"')).finished.constraint == "met"
    harness.close()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {"chat_template": "one"}}, "one"),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [
                        {"name": "tool_use", "template": "two"},
                        {"name": "default", "template": "three"},
                    ]
                }
            },
            "three",
        ),
        (
            {"tokenizer_config.json": {"chat_template": "one"}, "chat_template.jinja": "four"},
            "four",
        ),
    ],
)
def test_template_is_found_in_all_locations(
    tmp_path: Path, files: dict[str, Any], expected: str
) -> None:
    assert checkpoint.read(folder_of(tmp_path, files)).chat_template == expected


def test_special_tokens_may_be_strings_or_objects(tmp_path: Path) -> None:
    files = {
        "special_tokens_map.json": {"eos_token": "old", "unk_token": "<unk>"},
        "tokenizer_config.json": {
            "bos_token": {"content": "<s>", "lstrip": False},
            "eos_token": "</s>",
            "pad_token": None,
            "add_bos_token": True,
        },
    }
    found = checkpoint.read(folder_of(tmp_path, files)).special_tokens
    assert found == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@pytest.mark.parametrize(
    ("files", "code", "named"),
    [
        ({"config.json": None}, "model.invalid", "config.json"),
        ({"config.json": "{"}, "model.invalid", "config.json"),
        ({"config.json": [1]}, "model.invalid", "JSON object"),
        ({"tokenizer.json": None}, "model.invalid", "tokenizer.json"),
        ({"tokenizer.json": "{}"}, "model.invalid", "tokenizer.json"),
        ({"tokenizer.json": b"\xff"}, "model.invalid", "tokenizer.json cannot be read"),
        ({"chat_template.jinja": b"\xff"}, "model.invalid", "chat_template.jinja"),
        ({"config.json": b"\xff"}, "model.invalid", "config.json cannot be read"),
        ({"tokenizer_config.json": {"chat_template": ["a"]}}, "model.invalid", "without names"),
        ({"model.safetensors": None, "model.bin": ""}, "model.unsupported", "safetensors"),
    ],
)
def test_incomplete_folder_is_rejected_by_name(
    tmp_path: Path, files: dict[str, Any], code: str, named: str
) -> None:
    with pytest.raises(EngineError) as refused:
        checkpoint.read(folder_of(tmp_path, files))
    assert refused.value.code == code
    assert named in refused.value.message


def test_folder_is_located_by_path(tmp_path: Path) -> None:
    assert checkpoint.locate(str(tmp_path)) == tmp_path.resolve()


def test_weights_are_fetched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = [
        *("config.json", "tokenizer.json", "chat_template.jinja", "README.md", "params.json"),
        *("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
        *("model.safetensors.index.json", "consolidated.safetensors", "original/params.json"),
        *("original/consolidated.00.pth", "original/model.safetensors", "own.py"),
    ]
    fetched: list[str] = []

    def fetch(model: str, *, local_files_only: bool, **patterns: Any) -> str:
        assert not local_files_only
        fetched.extend(filter_repo_objects(stored, **patterns))
        return f"/cache/{model}"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert checkpoint.locate("owner/name") == Path("/cache/owner/name")
    assert fetched == [
        *("config.json", "tokenizer.json", "chat_template.jinja", "params.json"),
        *("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
        "model.safetensors.index.json",
    ]


@pytest.mark.parametrize("name", ["./nothing/here", "/nothing", "~/nothing-there", "nothing"])
def test_paths_are_not_searched_on_the_hub(name: str) -> None:
    with pytest.raises(EngineError) as refused:
        checkpoint.locate(name)
    assert refused.value.code == "model.not_found"
