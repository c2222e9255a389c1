"""The forward pass for accelerators, and that nothing in a decode step waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from transformers import AutoModelForCausalLM

from conure.engine.models import fused_decoder, projection
from conure.engine.protocol import SamplingParams
from conure.engine.runner import backend as backends
from conure.engine.runner.base import ScheduledSequence
from conure.engine.runner.torch_runner import TorchModelRunner
from conure.engine.sampling import batch, sampler
from conure.kernels.elementwise import ReferenceElementwise

from .. import shrunk
from ..graph_double import READS, backend
from .logits import logits_of

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama with biases": {"attention_bias": True},
    "llama that shares its embedding": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 9},
    "qwen2": {},
    "qwen3": {},
}


def runner_of(folder: Path, **options: Any) -> TorchModelRunner:
    return shrunk.runner_on(folder, backend(None), num_blocks=32, block_size=4, **options)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_of_the_modules(name: str, tmp_path: Path) -> None:
    folder = shrunk.write(tmp_path, name.split()[0], **FAMILIES[name])
    fast, plain = runner_of(folder), runner_of(folder, optimize=False)
    assert isinstance(fast._fused_decoder, fused_decoder.FusedDecoder)
    assert plain._fused_decoder is None
    got, expected = logits_of(fast), logits_of(plain)
    assert len(got) == 4
    assert (got - expected).abs().max() <= 2e-5 * expected.std()


def test_bfloat16_error_is_not_above_the_modules(tmp_path: Path) -> None:
    folder = shrunk.write(tmp_path, "llama")
    exact = logits_of(runner_of(folder))
    errors = [
        (logits_of(runner_of(folder, dtype="bfloat16", optimize=optimize)).float() - exact).std()
        for optimize in (True, False)
    ]
    assert errors[0] <= 1.4 * errors[1]


def test_weights_exist_once_and_model_still_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on an accelerator, where no library packs weights.
    monkeypatch.setattr(backends, "_pack", lambda *_: None)
    monkeypatch.setattr(projection, "_can_reorder", lambda _: False)
    folder = shrunk.write(tmp_path, "qwen3")
    runner = runner_of(folder)
    model: Any = runner._model
    passed: Any = runner._fused_decoder
    for layer, joined in zip(model.model.layers, passed._layers, strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        pairs = [
            (attention.q_proj, joined.qkv),
            (attention.v_proj, joined.qkv),
            (attention.o_proj, joined.out),
            (mlp.gate_proj, joined.gate_up),
            (mlp.up_proj, joined.gate_up),
            (mlp.down_proj, joined.down),
        ]
        for module, linear in pairs:
            mine, ours = (
                one.untyped_storage().data_ptr() for one in (module.weight, linear._weight)
            )
            assert mine == ours
    expected = shrunk.load(folder).state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, expected[name]), name


def memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_decoder_with_other_logits_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shrunk.write(tmp_path, "llama")
    expected = logits_of(runner_of(folder, optimize=False))
    angles = fused_decoder.rope_tables
    monkeypatch.setattr(
        fused_decoder, "rope_tables", lambda *args: tuple(1.001 * x for x in angles(*args))
    )
    runner = runner_of(folder)
    assert runner._fused_decoder is None
    assert (logits_of(runner) - expected).abs().max() <= 2e-5 * expected.std()


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Refuses what makes the host wait for the device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert func.overloadpacket.__name__ not in READS, func
        out = func(*args, **(kwargs or {}))
        given, made = (
            {one.device.type for one in tree_flatten(found)[0] if isinstance(one, Tensor)}
            for found in ((args, kwargs), out)
        )
        assert not ("meta" in given and "cpu" in made), f"{func} copies from the device to the host"
        assert given != {"meta", "cpu"}, f"{func} reads both here and there"
        return out


@contextmanager
def gpu_that_is_not_there() -> Iterator[None]:
    """Tensors of `meta` have shapes and no contents: code that reads contents fails."""
    with torch.inference_mode(), Watch():  # type: ignore[no-untyped-call]  # torch's
        yield


class Nothing:
    """Operations that give attention its shape."""

    def attention(self, query: Tensor, *others: Any, **options: Any) -> Tensor:
        return torch.empty_like(query)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_gpu_decode_step_never_synchronises(family: str) -> None:
    config = shrunk.config_of(family)
    with gpu_that_is_not_there():
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]  # theirs
                config, dtype=torch.bfloat16
            )
            passed = fused_decoder.FusedDecoder(model, 64, ReferenceElementwise())
            ids = torch.empty(3, dtype=torch.int64)
            cache = torch.empty(8, 4, 2, 16, dtype=torch.bfloat16)
        layer: Any = type("Layer", (), {"window": None})
        attention: Any = type("Attention", (), {"slots": ids, "caches": [(cache, cache)] * 3})()
        attention.read = lambda index, query, scale: Nothing().attention(query, index, layer, scale)
        logits = passed(ids, ids, ids[:2], attention)
        assert logits.shape == (2, config.vocab_size)
        assert logits.device.type == "meta"


def test_gpu_sampling_never_synchronises() -> None:
    everything = SamplingParams(
        max_tokens=9,
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=0.1,
        ignore_eos=True,
        logprobs=3,
    )
    rows = [ScheduledSequence(0, [1, 2, 3], 2, 1, [0], everything, 1) for _ in range(3)]
    rows[1].mask = b"\x0f\x01"
    wishes = batch.make_batch(rows, (5,), 300)
    assert wishes is not None
    assert all(len(array) for array in wishes.ops)
    with gpu_that_is_not_there():
        there = [
            torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, device="meta")
            for array in wishes.ops
        ]
        logits = torch.empty(3, 300, dtype=torch.bfloat16, device="meta")
        found = sampler.sample_tokens(logits, sampler.LogitOpsBatch(*there), wishes.num_top)
        assert found.shape == (3 + 3 + 2 * 3 * 3,)
        assert found.device.type == "meta"
        assert sampler.sample_tokens(logits, None).device.type == "meta"


def test_synchronisation_is_detected() -> None:
    with gpu_that_is_not_there():
        there = torch.empty(3, device="meta")
        with pytest.raises((AssertionError, NotImplementedError)):
            there.cpu()
        with pytest.raises((AssertionError, RuntimeError)):
            there.sum().item()
        with pytest.raises(AssertionError, match="both here and there"):
            there.index_select(0, torch.arange(2))
