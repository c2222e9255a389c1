"""Models of random weights: made in place, or written as folders for others."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from conure.engine import framing
from conure.engine.config import EngineConfig
from conure.engine.framing import FrameSocket
from conure.engine.models import builtin, checkpoint, weights
from conure.engine.protocol import EngineError, SamplingParams
from conure.engine.runner.base import ScheduledSequence
from conure.engine.runner.torch_runner import TorchModelRunner
from conure.engine.testing import dummy_checkpoint
from conure.engine.text import byte_tokenizer

from .. import shrunk
from ..families import changes, model_type

FAMILIES = ["llama", "gemma4_text", "gpt_oss", "deepseek_v3", "gpt2"]


def config_of(folder: Path, name: str = "llama", **more: Any) -> Path:
    shrunk.config_of(model_type(name), **{**changes(name), **more}).to_json_file(
        folder / "config.json"
    )
    return folder


def runner_of(path: Path, **options: Any) -> TorchModelRunner:
    return TorchModelRunner(
        EngineConfig(dummy_weights=str(path), num_blocks=16, threads=1, **options)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_folder_equals_the_dummy_model(name: str, dtype: str, tmp_path: Path) -> None:
    config_of(tmp_path, name)
    shape = checkpoint.read_dummy(str(tmp_path))
    made = weights.make(shape, weights.read_config(shape), dtype).state_dict()
    written = checkpoint.read(dummy_checkpoint.write(str(tmp_path), tmp_path / "out", dtype=dtype))
    read = weights.load(written, weights.read_config(written), "auto").state_dict()
    assert made.keys() == read.keys()
    for key, tensor in made.items():
        assert tensor.dtype == read[key].dtype
        assert torch.equal(tensor, read[key])


def test_tokenizer_beside_a_linked_config_is_used(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "blobs").mkdir(exist_ok=True)
        (tmp_path / "blobs" / f"blob-{name}").write_bytes((builtin.FOLDER / name).read_bytes())
        (tmp_path / name).symlink_to(tmp_path / "blobs" / f"blob-{name}")
    found = checkpoint.read_dummy(str(tmp_path / "config.json"))
    assert found.tokenizer_json == (builtin.FOLDER / "tokenizer.json").read_text("utf-8")


def test_seed_does_not_touch_global_random_state(
    tmp_path: Path,
) -> None:
    found = checkpoint.read_dummy(str(config_of(tmp_path)))
    config = weights.read_config(found)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    one, again, other = (
        weights.make(found, config, "float32", seed=seed).state_dict()["model.embed_tokens.weight"]
        for seed in (5, 5, 6)
    )
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_dummy_weights_write_no_files(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    config_of(folder, dtype="bfloat16")
    runner = runner_of(folder / "config.json")
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert runner.model == "tiny"
    assert "LlamaForCausalLM" in runner.description
    assert "bfloat16" in runner.description
    assert "random weights: its text means nothing" in runner.description
    assert runner.eos_ids == byte_tokenizer.EOS_IDS
    (sampled,) = runner.run(
        [ScheduledSequence(0, [72, 105], 0, 2, [0], SamplingParams(max_tokens=1))], []
    )
    assert 0 <= sampled < byte_tokenizer.VOCAB_SIZE


def test_config_file_name_names_the_model(tmp_path: Path) -> None:
    config_of(tmp_path)
    path = (tmp_path / "config.json").rename(tmp_path / "huge-8b.json")
    assert runner_of(path).model == "huge-8b"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_attention_heads": 7}, "not a multiple of the number of attention heads"),
        ({"hidden_size": "big"}, "expected int, got str"),
        ({"hidden_size": -4}, "-4"),
        ({"hidden_act": "nosuch"}, "KeyError 'nosuch'"),
        ({"pad_token_id": 5000}, "Padding_idx must be within num_embeddings"),
        ({"num_hidden_layers": 0}, "its config declares 0 layers"),
        ({"num_key_value_heads": 3}, "must match the size"),
    ],
)
def test_unusable_config_is_rejected_in_one_sentence(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    config = json.loads((config_of(tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(EngineError) as refused:
        runner_of(tmp_path)
    assert refused.value.code in {"model.invalid", "model.unsupported"}
    assert named in refused.value.message
    assert "\n" not in refused.value.message


def test_ids_above_bytes_render_as_numbers(tmp_path: Path) -> None:
    config_of(tmp_path, vocab_size=1000)
    tokenizer = Tokenizer.from_str(checkpoint.read_dummy(str(tmp_path)).tokenizer_json)
    assert tokenizer.get_vocab_size() == 1000
    assert tokenizer.decode([72, 105, 300, 999]) == "Hi 300 999"
    assert tokenizer.encode("Hi 300").ids == list(b"Hi 300")


def test_tokenizer_next_to_config_is_used(tmp_path: Path) -> None:
    config_of(tmp_path, vocab_size=20_000)
    (tmp_path / "tokenizer.json").write_text(shrunk.with_bos(byte_tokenizer.tokenizer_json()))
    settings = {"chat_template": "mine", "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    runner = runner_of(tmp_path)
    assert (runner.bos_id, runner.chat_template) == (256, "mine")
    written = checkpoint.read(dummy_checkpoint.write(str(tmp_path), tmp_path / "out"))
    assert (written.bos_id, written.chat_template) == (256, "mine")
    assert written.eos_ids == runner.eos_ids == (258,)


def test_transformers_reads_the_written_folder(tmp_path: Path) -> None:
    folder = dummy_checkpoint.write(str(config_of(tmp_path)), tmp_path / "out", seed=3)
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], return_dict=False)
    assert ids == [257, *b"user\nHi", 258, 10]
    model: Any = AutoModelForCausalLM.from_pretrained(str(folder))
    assert model.generation_config.eos_token_id == list(byte_tokenizer.EOS_IDS)
    assert model(torch.tensor([ids])).logits.shape == (1, len(ids), byte_tokenizer.VOCAB_SIZE)


@pytest.mark.parametrize(
    ("content", "code", "named"),
    [
        (None, "model.not_found", "config"),
        ("{", "model.invalid", "is not JSON"),
        (
            '{"model_type": "llama", "vocab_size": 100}',
            "model.unsupported",
            "259 ids of the byte tokenizer",
        ),
        ('{"model_type": "llama"}', "model.unsupported", "vocab_size"),
        ('{"model_type": "nothing", "vocab_size": 300}', "model.unsupported", "nothing"),
        ('{"vocab_size": 300}', "model.unsupported", "model type None"),
        ('{"model_type": "mamba", "vocab_size": 300}', "model.unsupported", "recurrent"),
        (
            '{"model_type": "nothing", "vocab_size": 300, "auto_map": {}}',
            "model.unsupported",
            "(auto_map) is never run",
        ),
        (
            '{"model_type": "llama", "vocab_size": 300, "hidden_size": "x"}',
            "model.unsupported",
            "hidden_size",
        ),
    ],
)
def test_config_without_model_is_rejected(
    content: str | None, code: str, named: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(EngineError) as refused:
        runner_of(path)
    assert refused.value.code == code
    assert named in refused.value.message
    assert "\n" not in refused.value.message


def test_command_does_not_overwrite_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(config_of(tmp_path)), str(tmp_path / "out"), "--dtype", "bfloat16"]
    assert dummy_checkpoint.main(arguments) == 0
    assert checkpoint.read(tmp_path / "out").config["dtype"] == "bfloat16"
    capsys.readouterr()
    assert dummy_checkpoint.main(arguments) == 1
    assert capsys.readouterr().err.strip().endswith("already exists")


def test_engine_process_serves_dummy_weights(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-m", "conure.engine", "--fd", str(theirs.fileno())]
        config = EngineConfig(dummy_weights=str(config_of(tmp_path)), num_blocks=8, threads=1)
        with subprocess.Popen(
            [*command, "--epoch", "1", "--config", config.to_json()],
            pass_fds=(theirs.fileno(),),
        ) as process:
            theirs.close()
            payloads = FrameSocket(ours).receive(wait=True)
            assert payloads is not None
            hello = framing.decode_hello(payloads[0])
            ours.close()
            assert process.wait(timeout=60) == 0
    assert "random weights: its text means nothing" in hello.description
    assert hello.purpose == "test"
    assert hello.tokenizer_json == byte_tokenizer.tokenizer_json()
