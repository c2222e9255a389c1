"""Embeddings in the engine core: every token counts once, and nothing is shared or kept."""

from __future__ import annotations

import pytest

from conure.engine import protocol
from conure.engine.core.engine import EngineCore
from conure.engine.testing.scripted_runner import FakeRunner, hidden_state

from ..server_double import LIMITS

TEXT = [*b"the quick brown fox jumps over the lazy dog"]


def mean(ids: list[int]) -> list[float]:
    return [sum(values) / len(ids) for values in zip(*map(hidden_state, ids), strict=True)]


def engine_with(*, has_embeddings: bool = True, **changes: int) -> EngineCore:
    fields = {name: getattr(LIMITS, name) for name in protocol.EngineLimits.__struct_fields__}
    limits = protocol.EngineLimits(**{**fields, **changes})
    return EngineCore(FakeRunner(limits=limits, has_embeddings=has_embeddings), 1)


def embed(engine: EngineCore, context: int, ids: list[int], rank: float = 0.0) -> None:
    engine.apply(protocol.Embed(context, ids, rank))


def reports(engine: EngineCore) -> list[protocol.Report]:
    found: list[protocol.Report] = []
    while (step := engine.step()) is not None:
        engine.check()
        found += step.reports
    return found


def test_mean_is_of_all_tokens_over_several_steps() -> None:
    engine = engine_with(step_tokens=7)
    embed(engine, 1, TEXT)
    [report] = reports(engine)
    assert isinstance(report, protocol.Embedded)
    assert report.values == pytest.approx(mean(TEXT))


def test_equal_texts_share_nothing_and_leave_nothing() -> None:
    engine = engine_with()
    for context in (1, 2):
        embed(engine, context, TEXT)
    assert [type(each) for each in reports(engine)] == [protocol.Embedded] * 2
    status = engine.status()
    assert status.num_computed_tokens == 2 * len(TEXT)
    assert (status.num_held, status.num_cached, status.num_contexts) == (0, 0, 0)


def test_preempted_tokens_count_once() -> None:
    engine = engine_with(num_blocks=6, block_size=4, step_tokens=8)
    embed(engine, 1, TEXT[:20], rank=2.0)
    engine.step()
    embed(engine, 2, TEXT[:20], rank=1.0)
    found = {r.context: r for r in reports(engine) if isinstance(r, protocol.Embedded)}
    assert found[1].values == pytest.approx(mean(TEXT[:20]))
    assert found[2].values == pytest.approx(mean(TEXT[:20]))
    assert engine.status().num_recomputed_tokens > 0


def test_freed_context_gives_nothing() -> None:
    engine = engine_with(step_tokens=8)
    embed(engine, 1, TEXT)
    engine.step()
    engine.apply(protocol.Free(1))
    assert reports(engine) == []
    assert engine.status().num_held == 0


@pytest.mark.parametrize(
    ("ids", "code"),
    [([], "engine.empty_context"), ([1] * 100_000, "prompt.too_long")],
    ids=["empty", "too long"],
)
def test_text_that_cannot_be_embedded_fails(ids: list[int], code: str) -> None:
    engine = engine_with()
    embed(engine, 1, ids)
    [report] = reports(engine)
    assert isinstance(report, protocol.Failed)
    assert report.code == code


def test_engine_without_the_capability_refuses() -> None:
    engine = engine_with(has_embeddings=False)
    assert "embeddings" not in engine.hello().capabilities
    embed(engine, 1, TEXT)
    [report] = reports(engine)
    assert isinstance(report, protocol.Failed)
    assert report.code == "engine.unsupported_embedding"


def test_existing_context_is_not_embedded() -> None:
    engine = engine_with()
    engine.apply(protocol.Fill(1, TEXT))
    embed(engine, 1, TEXT)
    found = reports(engine)
    assert "engine.busy" in [each.code for each in found if isinstance(each, protocol.Failed)]
