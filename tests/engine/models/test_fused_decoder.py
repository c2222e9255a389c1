"""The lean forward pass: which models it takes, and that it computes what they compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from conure.engine.config import EngineConfig
from conure.engine.models import fused_decoder, probe, projection
from conure.engine.runner import backend, torch_runner
from conure.engine.runner.torch_runner import TorchModelRunner
from conure.kernels.cpu import library

from .. import shrunk
from .logits import logits_of

PLAIN: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama with biases": {"attention_bias": True, "mlp_bias": False},
    "llama that shares its embedding": {"tie_word_embeddings": True},
    "llama with scaled angles": {"rope_parameters": shrunk.LLAMA3_ROPE},
    "mistral": {"sliding_window": 9},
    "qwen2": {},
    "qwen3": {},
}


def runner_of(folder: Path, dtype: str = "float32", *, optimize: bool = True) -> TorchModelRunner:
    return shrunk.runner_on(
        folder,
        dtype=dtype,
        num_blocks=64,
        block_size=4,
        min_saved=0,
        optimize=optimize,
    )


@pytest.mark.parametrize("name", PLAIN)
def test_logits_equal_those_of_the_modules(name: str, tmp_path: Path) -> None:
    folder = shrunk.write(tmp_path, name.split()[0], **PLAIN[name])
    fast, plain = runner_of(folder), runner_of(folder, optimize=False)
    assert fast._fused_decoder is not None
    assert plain._fused_decoder is None
    got, expected = logits_of(fast), logits_of(plain)
    assert len(expected) == 4
    assert (got - expected).abs().max() <= 2e-5 * expected.std()


def test_bfloat16_error_is_not_above_the_modules(tmp_path: Path) -> None:
    folder = shrunk.write(tmp_path, "llama")
    exact = logits_of(runner_of(folder))
    errors = [
        (logits_of(runner_of(folder, "bfloat16", optimize=optimize)) - exact).std()
        for optimize in (True, False)
    ]
    assert errors[0] <= 1.2 * errors[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", PLAIN)
def test_layers_in_one_call_equal_single_operations(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "has_matrix_unit", lambda: False)
    folder = shrunk.write(tmp_path, name.split()[0], **PLAIN[name])
    together, apart = runner_of(folder, dtype), runner_of(folder, dtype)
    assert together._fused_decoder is not None
    assert apart._fused_decoder is not None
    assert together._fused_decoder._native is not None
    apart._fused_decoder._native = None
    got, expected = logits_of(together), logits_of(apart)
    # The first norm is torch's in single operations, so floats differ in their last bits.
    assert (got - expected).abs().max() <= (2e-5 * expected.std() if dtype == "float32" else 0)


@pytest.mark.parametrize("token", [-1, 10**6])
def test_ids_outside_of_the_vocabulary_are_an_error(
    token: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "has_matrix_unit", lambda: False)
    decoder = runner_of(shrunk.write(tmp_path, "llama"), "bfloat16")._fused_decoder
    assert decoder is not None
    native: Any = decoder._native
    with pytest.raises(IndexError, match="token ids must be from 0 to"):
        native(torch.tensor([1, token]), None, None, None)


def test_weights_exist_once_and_can_be_restored(tmp_path: Path) -> None:
    runner = runner_of(shrunk.write(tmp_path, "qwen2"))
    model: Any = runner._model
    assert runner._fused_decoder is not None
    before = sum(parameter.numel() for parameter in model.parameters())
    runner._fused_decoder.restore()
    weights = shrunk.load(tmp_path).state_dict()
    assert before < sum(weight.numel() for weight in weights.values()) / 2
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, weights[name]), name


@pytest.mark.parametrize("is_reordered", [False, True])
def test_projection_by_torch_gives_same_result(
    is_reordered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shrunk.write(tmp_path, "qwen2")
    expected = logits_of(runner_of(folder))
    monkeypatch.setattr(backend, "_pack", lambda *_: None)
    monkeypatch.setattr(projection, "_can_reorder", lambda _: is_reordered)
    runner = runner_of(folder)
    assert runner._fused_decoder is not None
    got = logits_of(runner)
    assert (got - expected).abs().max() <= 2e-5 * expected.std()
    runner._fused_decoder.restore()
    weights = shrunk.load(folder).state_dict()
    model: Any = runner._model
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, weights[name]), name


def test_decoder_with_other_logits_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shrunk.write(tmp_path, "llama")
    with monkeypatch.context() as patch:
        patch.setattr(fused_decoder, "is_supported", lambda *_: False)
        expected = logits_of(runner_of(folder))
    angles = fused_decoder.rope_tables
    monkeypatch.setattr(
        fused_decoder, "rope_tables", lambda *args: tuple(1.001 * x for x in angles(*args))
    )
    runner = runner_of(folder)
    assert runner._fused_decoder is None
    assert torch.equal(logits_of(runner), expected)
    modules = logits_of(runner_of(folder, optimize=False))
    assert (expected - modules).abs().max() <= 2e-5 * modules.std()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma2", {}),
        ("granite", {"attention_multiplier": 0.2}),
        ("llama", {"hidden_act": "gelu"}),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "dynamic",
                    "rope_theta": 10000.0,
                    "factor": 2.0,
                }
            },
        ),
    ],
)
def test_other_structure_runs_by_its_modules(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    runner = runner_of(shrunk.write(tmp_path, family, **changes))
    assert runner._fused_decoder is None


def test_additional_module_is_another_structure(tmp_path: Path) -> None:
    runner = runner_of(shrunk.write(tmp_path, "llama"), optimize=False)
    model: Any = runner._model
    assert fused_decoder.is_supported(model, runner.layers)
    model.model.layers[1].mlp.extra = torch.nn.Identity()
    assert not fused_decoder.is_supported(model, runner.layers)


def test_shared_kv_layers_are_another_structure(tmp_path: Path) -> None:
    runner = runner_of(shrunk.write(tmp_path, "llama"), optimize=False)
    layers = [*runner.layers]
    layers[1] = probe.LayerKVSpec(2, 16, 16, None, source=0)
    assert not fused_decoder.is_supported(runner._model, layers)


def test_calibration_fits_a_short_context(tmp_path: Path) -> None:
    runner = TorchModelRunner(
        EngineConfig(
            model=str(shrunk.write(tmp_path, "llama")),
            dtype="float32",
            num_blocks=2,
            block_size=4,
            threads=1,
        )
    )
    assert runner.limits.context_len < torch_runner.CALIBRATION_TOKENS
    assert runner._fused_decoder is not None
