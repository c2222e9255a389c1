"""Llama-like decoders without transformers compute what transformers computes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from conure.engine.models import attention_backend, checkpoint, llama, llama_config, registry
from conure.engine.models.llama import LlamaLikeDecoder
from conure.engine.protocol import EngineError

from .. import shrunk

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "shared embedding": ("llama", {"tie_word_embeddings": True}),
    "angles of llama 3": ("llama", {"rope_parameters": shrunk.LLAMA3_ROPE}),
    "divided angles": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.5}},
    ),
    "large heads": ("llama", {"head_dim": 40}),
    "one key head": ("llama", {"num_key_value_heads": 1}),
    "window": ("mistral", {"sliding_window": 9}),
    "no window": ("mistral", {"sliding_window": None}),
    "biases": ("qwen2", {"head_dim": ...}),
    "norms of heads": ("qwen3", {"tie_word_embeddings": True}),
}
NUM_TOKENS = 40
LIBRARIES = ("transformers", "torch._dynamo", "triton", "sympy")
"""Libraries whose import takes as long as everything else in an engine's start."""


def load(folder: Path, dtype: str = "float32") -> LlamaLikeDecoder | None:
    source = checkpoint.read(folder)
    config = llama_config.read(source.config)
    assert config is not None
    return llama.load(source, config, dtype, "cpu")


def write(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


class Eager:
    """Attends causally within one sequence, as transformers' eager attention does."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        assert (mask, softcap, sinks) == (None, None, None)
        group = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(group, dim=1) for each in (key, value))
        positions = torch.arange(query.shape[2])
        distances = positions[:, None] - positions
        hidden = distances < 0 if window is None else (distances < 0) | (distances >= window)
        scores = (query @ key.transpose(2, 3) * scale).masked_fill(hidden, float("-inf"))
        weights = functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        return (weights @ value).transpose(1, 2)


@pytest.fixture
def eager() -> Iterator[None]:
    token = attention_backend.CURRENT.set(Eager())
    yield
    attention_backend.CURRENT.reset(token)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_logits_equal_those_of_transformers(case: str, dtype: str, tmp_path: Path) -> None:
    family, changes = CASES[case]
    folder = shrunk.write(tmp_path, family, **changes)
    reference = shrunk.load(folder, getattr(torch, dtype))
    model = load(folder, dtype)
    assert model is not None
    ids = torch.arange(3, 3 + NUM_TOKENS)[None] * 37 % 256
    expected = reference(ids).logits
    found = model(ids, torch.arange(NUM_TOKENS)[None]).logits
    assert torch.allclose(found, expected, atol=1e-5 if dtype == "float32" else 0)


@pytest.mark.usefixtures("eager")
@torch.inference_mode()
def test_logits_of_some_tokens_are_computed(tmp_path: Path) -> None:
    model = load(shrunk.write(tmp_path, "llama"))
    assert model is not None
    ids = torch.arange(3, 9)[None]
    whole = model(ids, torch.arange(6)[None]).logits
    some = model(ids, torch.arange(6)[None], logits_to_keep=torch.tensor([5, 2])).logits
    assert torch.allclose(some, whole[:, [5, 2]], atol=1e-4)


def test_weights_in_several_files_are_read(tmp_path: Path) -> None:
    folder = shrunk.write(tmp_path, "llama")
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(whole)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: whole[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    model = load(folder)
    assert model is not None
    assert all(torch.equal(tensor, whole[name]) for name, tensor in model.state_dict().items())


def test_weights_survive_a_change_of_their_file(tmp_path: Path) -> None:
    folder = shrunk.write(tmp_path, "llama")
    model = load(folder)
    assert model is not None
    before = model.lm_head.weight.clone()
    path = folder / "model.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(model.lm_head.weight, before)


def missing(weights: dict[str, torch.Tensor]) -> None:
    del weights["model.norm.weight"]


def unknown(weights: dict[str, torch.Tensor]) -> None:
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)


def of_another_shape(weights: dict[str, torch.Tensor]) -> None:
    weights["model.norm.weight"] = torch.zeros(63)


@pytest.mark.parametrize("change", [missing, unknown, of_another_shape])
def test_other_weights_are_left_to_transformers(change: Any, tmp_path: Path) -> None:
    folder = shrunk.write(tmp_path, "llama")
    weights = load_file(folder / "model.safetensors")
    change(weights)
    write(folder, weights)
    assert load(folder) is None


def test_separate_output_layer_of_shared_embedding_is_left_to_transformers(tmp_path: Path) -> None:
    folder = shrunk.write(tmp_path, "llama", tie_word_embeddings=True)
    weights = load_file(folder / "model.safetensors")
    write(folder, weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + 1})
    assert load(folder) is None


def test_damaged_file_has_the_error_of_transformers(tmp_path: Path) -> None:
    folder = shrunk.write(tmp_path, "llama")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert load(folder) is None
    with pytest.raises(EngineError, match="cannot load"):
        shrunk.runner_on(folder)


@pytest.mark.parametrize("family", sorted(llama_config.ARCHITECTURES))
def test_engine_describes_the_architecture(family: str, tmp_path: Path) -> None:
    runner = shrunk.runner_on(shrunk.write(tmp_path, family))
    assert isinstance(runner._model, LlamaLikeDecoder)
    assert runner.description.startswith(llama_config.ARCHITECTURES[family] + ", 0.")
    assert runner._fused_decoder is not None


@pytest.mark.parametrize("name", [registry.BUILTIN, registry.SEEDED])
def test_engine_of_own_model_loads_no_model_library(name: str) -> None:
    program = f"""
import sys
from conure.engine.config import EngineConfig
from conure.engine.runner.torch_runner import create_runner
create_runner(EngineConfig(model={name!r}))
print([each for each in {LIBRARIES!r} if each in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
