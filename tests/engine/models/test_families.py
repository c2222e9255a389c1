"""Every family that the engine claims, against transformers alone; every refusal; the page."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM

from conure.engine.config import EngineConfig
from conure.engine.models import attention_backend, attention_hook, probe
from conure.engine.protocol import EngineError
from conure.engine.runner.torch_runner import TorchModelRunner

from .. import exactness, models_page, shrunk
from ..families import REFUSED, RUNNING, changes, model_type

NOISE = 1e-3
"""Largest difference of a float32 logit; the spread of logits is 1 to 6."""


def check(row: models_page.Row, *, has_experts: bool) -> None:
    exact, errors = row.exact, row.rounding.errors
    assert exact.tokens > 200
    assert exact.ties <= exact.tokens // 100, "so many ties make the rule meaningless"
    assert exact.difference < NOISE
    assert exact.recomputed > 0
    assert exact.shared > 0
    assert exact.cached > 0
    assert statistics.median(errors) < models_page.USUAL
    beyond = sum(error > models_page.BOUND for error in errors)
    assert beyond <= (models_page.REROUTED * len(errors) if has_experts else 0)


@pytest.mark.parametrize("name", RUNNING)
def test_engine_matches_transformers(name: str, tmp_path: Path) -> None:
    row = models_page.judge(name, tmp_path / "model")
    check(row, has_experts=RUNNING[name].has_experts)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNNING)
def test_engine_matches_transformers_in_long_runs(name: str, tmp_path: Path) -> None:
    row = models_page.judge(name, tmp_path / "model", thorough=True)
    check(row, has_experts=RUNNING[name].has_experts)


@pytest.mark.parametrize("name", RUNNING)
def test_tested_models_depend_on_their_context(name: str, tmp_path: Path) -> None:
    # A model that ignored its context would pass whatever the engine does with it.
    reference = shrunk.load(shrunk.write(tmp_path, model_type(name), **changes(name)))
    ids = exactness.prompt(1, 20)
    other = [*ids[:-6], (ids[-6] + 1) % 256, *ids[-5:]]
    with torch.inference_mode():
        last, changed = reference(torch.tensor([ids, other])).logits[:, -1]
    assert (last - changed).abs().max() > 20 * NOISE * last.std()


def dropping(name: str) -> Callable[..., Any]:
    return lambda *args, **kwargs: attention_hook._hook(*args, **{**kwargs, name: None})


def rescaled(*args: Any, **kwargs: Any) -> Any:
    scaling = kwargs.get("scaling") or args[1].shape[-1] ** -0.5
    return attention_hook._hook(*args, **{**kwargs, "scaling": 1.01 * scaling})


def shifted(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    return attention_hook._hook(module, query, key, value.roll(1, 2), *args, **kwargs)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("olmo3", dropping("sliding_window")),
        ("gpt_oss", dropping("s_aux")),
        ("gemma2", dropping("softcap")),
        ("olmo2", rescaled),
        ("gemma4_text", shifted),
        ("deepseek_v3", shifted),
    ],
)
def test_slightly_wrong_attention_is_detected(
    name: str, wrong: Callable[..., Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    recorder, judge = exactness.load(
        shrunk.write(tmp_path, model_type(name), **changes(name)), "float32"
    )
    request.addfinalizer(attention_hook.register)
    AttentionInterface.register(attention_backend.ATTENTION, wrong)
    try:
        exactness.examine(recorder, judge)
    except AssertionError:
        return
    assert judge.verdict.difference > NOISE


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_families_are_rejected(name: str, tmp_path: Path) -> None:
    sentence = models_page.refusal(name, tmp_path)
    assert REFUSED[name].reason in sentence
    assert "\n" not in sentence
    config = shrunk.config_of(model_type(name), **changes(name))
    if REFUSED[name].is_known:
        with pytest.raises(EngineError):
            attention_hook.model_class(config, name)
    else:
        attention_hook.model_class(config, name)


@pytest.mark.parametrize("name", [name for name in REFUSED if REFUSED[name].trial])
def test_probe_detects_what_the_config_declares(name: str) -> None:
    attention_hook.register()
    config = shrunk.config_of(model_type(name), **changes(name))
    model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]  # theirs
        config, attn_implementation=attention_backend.ATTENTION
    )
    shrunk.widen(model)
    with pytest.raises(EngineError, match=REFUSED[name].trial):
        probe.probe(model.eval(), name)


@pytest.mark.parametrize(("name", "switch"), [("llama (dynamic)", 256), ("phi3 (longrope)", 128)])
def test_rotary_change_limits_runner_context(name: str, switch: int, tmp_path: Path) -> None:
    shrunk.write(tmp_path, model_type(name), **changes(name))
    runner = TorchModelRunner(EngineConfig(model=str(tmp_path), dtype="float32", threads=1))
    assert runner.limits.context_len == switch
    with pytest.raises(EngineError, match=f"rotary embedding changes beyond {switch} tokens"):
        TorchModelRunner(EngineConfig(model=str(tmp_path), dtype="float32", context_len=switch + 1))


def test_models_page_is_current(tmp_path: Path) -> None:
    nothing = exactness.Verdict(errors=[0.0])
    rows = {}
    for name in RUNNING:
        config = shrunk.config_of(model_type(name), **changes(name))
        config.to_json_file(tmp_path / "config.json")
        layers = models_page.layers_of(tmp_path)
        rows[name] = models_page.Row(models_page.keeps(layers), nothing, nothing)
    sentences = {name: models_page.refusal(name, tmp_path) for name in REFUSED}
    expected = models_page.without_measurements(models_page.render(rows, sentences))
    found = models_page.PAGE.read_text(encoding="utf-8")
    assert models_page.without_measurements(found) == expected, (
        "docs/engine/models.md is out of date: run `python -m tests.engine.models_page`"
    )
