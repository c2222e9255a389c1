"""What is read from a model folder, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conure.engine import bytelevel, checkpoint
from conure.engine.api import EngineError

from . import shrunk


def folder_of(path: Path, files: dict[str, Any]) -> Path:
    """Write a folder of JSON and text files over the least that can be read; None omits one."""
    least: dict[str, Any] = {
        "config.json": {"model_type": "llama"},
        "tokenizer.json": bytelevel.tokenizer_json(),
        "model.safetensors": "",
    }
    for name, content in {**least, **files}.items():
        if content is not None:
            text = content if isinstance(content, str) else json.dumps(content)
            (path / name).write_text(text)
    return path


def test_the_least_folder_has_no_template_no_bos_and_no_end(tmp_path: Path) -> None:
    found = checkpoint.read(folder_of(tmp_path, {}))
    assert found.chat_template == ""
    assert found.special_tokens == {}
    assert found.bos_id is None
    assert found.eos_ids == ()


@pytest.mark.parametrize(
    ("generation", "config", "wanted"),
    [
        (None, 7, (7,)),
        (None, [7, 8], (7, 8)),
        ({"eos_token_id": 5}, 7, (5,)),
        ({"eos_token_id": [5, 6]}, 7, (5, 6)),
        ({}, 7, (7,)),
    ],
)
def test_ends_come_from_the_generation_config_before_the_config(
    tmp_path: Path, generation: Any, config: Any, wanted: tuple[int, ...]
) -> None:
    files = {
        "generation_config.json": generation,
        "config.json": {"model_type": "llama", "eos_token_id": config},
    }
    assert checkpoint.read(folder_of(tmp_path, files)).eos_ids == wanted


def test_bos_is_what_the_tokenizer_itself_puts_before_a_text(tmp_path: Path) -> None:
    text = shrunk.with_bos(bytelevel.tokenizer_json())
    assert checkpoint.read(folder_of(tmp_path, {"tokenizer.json": text})).bos_id == 256


@pytest.mark.parametrize(
    ("files", "wanted"),
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
def test_a_template_is_found_in_any_of_its_places(
    tmp_path: Path, files: dict[str, Any], wanted: str
) -> None:
    assert checkpoint.read(folder_of(tmp_path, files)).chat_template == wanted


def test_special_tokens_may_be_text_or_objects(tmp_path: Path) -> None:
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
        ({"model.safetensors": None, "model.bin": ""}, "model.unsupported", "safetensors"),
        ({"config.json": {"auto_map": {}}}, "model.unsupported", "auto_map"),
    ],
)
def test_a_folder_that_lacks_something_is_refused_by_its_name(
    tmp_path: Path, files: dict[str, Any], code: str, named: str
) -> None:
    with pytest.raises(EngineError) as refused:
        checkpoint.read(folder_of(tmp_path, files))
    assert refused.value.code == code
    assert named in refused.value.message


def test_a_folder_is_located_by_its_path(tmp_path: Path) -> None:
    assert checkpoint.locate(str(tmp_path)) == tmp_path.resolve()


@pytest.mark.parametrize("name", ["./nothing/here", "/nothing", "~/nothing-there", "nothing"])
def test_what_can_only_be_a_path_is_not_looked_for_on_the_hub(name: str) -> None:
    with pytest.raises(EngineError) as refused:
        checkpoint.locate(name)
    assert refused.value.code == "model.not_found"
