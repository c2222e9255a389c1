"""Products inside of models that run by their modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from conure.engine.models import projection
from conure.engine.models.projection import PackedModules
from conure.engine.runner.torch_runner import TorchModelRunner
from conure.kernels.cpu import library
from conure.kernels.cpu.attention import NativeLibrary
from conure.kernels.cpu.linear import PackedLinear

from .. import shrunk
from .logits import logits_of


def pack(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    return PackedLinear(NativeLibrary(library.find()), weight, bias)


def runner_of(folder: Path, *, optimize: bool = True) -> TorchModelRunner:
    return shrunk.runner_on(folder, num_blocks=64, block_size=4, min_saved=0, optimize=optimize)


def packed_names(runner: TorchModelRunner) -> set[str]:
    """Return the last names of the modules whose forward pass is replaced."""
    model: Any = runner._model
    modules = model.named_modules()
    return {name.rpartition(".")[2] for name, module in modules if "forward" in vars(module)}


LAST_OF_ATTENTION = {
    "gemma2": "o_proj",
    "phi3": "o_proj",
    "mixtral": "o_proj",
    "opt": "out_proj",
    "gpt2": "c_proj",
}


@pytest.mark.parametrize("family", LAST_OF_ATTENTION)
def test_logits_equal_those_of_unpacked_modules(family: str, tmp_path: Path) -> None:
    folder = shrunk.write(tmp_path, family)
    fast, plain = runner_of(folder), runner_of(folder, optimize=False)
    assert packed_names(fast) >= {"lm_head", LAST_OF_ATTENTION[family]}
    assert not packed_names(plain)
    got, expected = logits_of(fast), logits_of(plain)
    assert (got - expected).abs().max() <= 2e-5 * expected.std()


def test_weights_exist_once_but_for_shared_ones() -> None:
    embedding, first, second = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11, bias=False)
    second.weight = embedding.weight
    model = nn.Sequential(embedding, first, second)
    expected = first.weight.clone()
    packed = PackedModules(model, pack)
    assert len(packed) == 2
    assert first.weight.numel() == 0
    assert len(embedding.weight) == 11
    packed.restore()
    assert torch.equal(first.weight, expected)
    assert "forward" not in vars(first)


def test_transposed_weights_exist_once_and_return() -> None:
    module: Any = Conv1D(5, 6)  # type: ignore[no-untyped-call]
    expected, inputs = module.weight.clone(), torch.randn(3, 6)
    before = module(inputs)
    packed = PackedModules(nn.Sequential(module), pack)
    assert module.weight.numel() == 0
    assert torch.allclose(module(inputs), before, atol=1e-5)
    packed.restore()
    assert torch.equal(module.weight, expected)
    assert torch.equal(module(inputs), before)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "granitemoe"])
def test_experts_are_packed_and_restored(family: str, tmp_path: Path) -> None:
    runner = runner_of(shrunk.write(tmp_path, family, num_hidden_layers=2), optimize=False)
    model: Any = runner._model
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    expected = logits_of(runner)
    packed = PackedModules(model, pack)
    experts = {name: weight for name, weight in model.named_parameters() if "experts.down" in name}
    assert experts
    assert all(weight.numel() == 0 for name, weight in experts.items() if "bias" not in name)
    assert (logits_of(runner) - expected).abs().max() <= 2e-5 * expected.std()
    packed.restore()
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in before.items())
    assert torch.equal(logits_of(runner), expected)


def test_experts_without_a_gate_match_a_loop_over_tokens() -> None:
    class Experts(nn.Module):
        has_gate, has_bias, is_transposed, num_experts = False, False, False, 3

        def __init__(self) -> None:
            super().__init__()
            self.up_proj = nn.Parameter(torch.randn(3, 5, 6))
            self.down_proj = nn.Parameter(torch.randn(3, 6, 5))
            self.act_fn = nn.ReLU()

        def _apply_gate(self, rows: Tensor) -> Tensor:
            raise AssertionError("without a gate")

    module = Experts()
    inputs, shares = torch.randn(4, 6), torch.rand(4, 2)
    experts = torch.tensor([[0, 2], [2, 0], [0, 2], [2, 0]])
    expected = torch.zeros(4, 6)
    for token in range(4):
        for expert, share in zip(experts[token], shares[token], strict=True):
            rows = functional.relu(module.up_proj[expert] @ inputs[token])
            expected[token] += share * (module.down_proj[expert] @ rows)
    with torch.no_grad():
        assert len(PackedModules(nn.Sequential(module), pack)) == 1
        assert torch.allclose(module(inputs, experts, shares), expected, atol=1e-5)


@pytest.mark.parametrize("shape", [(6,), (0, 6), (2, 3, 6)])
def test_inputs_have_any_shape(shape: tuple[int, ...]) -> None:
    linear = nn.Linear(6, 5)
    inputs = torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]
    expected = linear(inputs)
    PackedModules(nn.Sequential(linear), pack)
    assert torch.allclose(linear(inputs), expected, atol=1e-5)


def test_modules_of_derived_classes_stay() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            return 2 * super().forward(input)

    assert len(PackedModules(nn.Sequential(Doubled(3, 3)), pack)) == 0


def test_packed_weights_with_other_logits_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shrunk.write(tmp_path, "gemma2")
    expected = logits_of(runner_of(folder, optimize=False))
    apply = projection.Projection.apply
    monkeypatch.setattr(
        projection.Projection, "apply", lambda self, inputs: 1.001 * apply(self, inputs)
    )
    runner = runner_of(folder)
    assert not packed_names(runner)
    assert torch.equal(logits_of(runner), expected)


def test_model_that_reads_its_weights_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shrunk.write(tmp_path, "gemma2")
    expected = logits_of(runner_of(folder, optimize=False))
    make = projection.PackedModules.__init__

    def make_and_read(self: PackedModules, model: Any, pack: projection.Pack) -> None:
        make(self, model, pack)
        layer = model.model.layers[0].mlp.down_proj
        layer.forward = lambda inputs: functional.linear(inputs, layer.weight)

    monkeypatch.setattr(projection.PackedModules, "__init__", make_and_read)
    runner = runner_of(folder)
    assert not packed_names(runner)
    assert torch.equal(logits_of(runner), expected)
