"""Lookahead: steps that start before the previous step is read give the same tokens.

The devices are test doubles on the CPU that return their results late. `kv/test_manager.py`
tests random commands during a step in flight.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from conure.engine import protocol
from conure.engine.config import EngineConfig
from conure.engine.core.engine import EngineCore
from conure.engine.runner.base import Handle, Runner, ScheduledSequence
from conure.engine.runner.step_inputs import Attention
from conure.engine.runner.torch_runner import TorchModelRunner
from conure.engine.testing.scripted_runner import default_text
from conure.kernels.planning.plan import Plan, build_plan

from .. import shrunk
from ..constraint_harness import ConstraintHarness, lark, schema
from ..graph_double import Recorder, backend
from ..random_calls import random_calls, run_calls
from ..server_double import LIMITS, RecordingRunner, ServerDouble

A = b"abcdefghijklmnopqrstuvwxyz"


def started(*, late: bool = True, **sampling: Any) -> tuple[ServerDouble, int]:
    """Return a server with one generating context."""
    server = ServerDouble(late=late)
    context = server.fill(A[:5])
    server.generate(context, **sampling)
    return server, context


def test_lookahead_does_not_change_the_text() -> None:
    texts = []
    for late in (False, True):
        server, context = started(late=late, max_tokens=12, ignore_eos=True)
        server.run()
        texts.append(server.known[context].finished[0].text)
        assert server.runner.num_ahead == (11 if late else 0)
    assert texts[0] == texts[1]


def test_lookahead_reports_the_logprob_of_each_token() -> None:
    found = []
    for late in (False, True):
        server, _ = started(late=late, max_tokens=9, ignore_eos=True, logprobs=2)
        logprobs = []
        while (step := server.step()) is not None:
            tokens = [each for each in step.reports if isinstance(each, protocol.Tokens)]
            assert all(len(each.ids) == len(each.logprobs) for each in tokens)
            logprobs += [each for report in tokens for each in report.logprobs]
        assert server.runner.num_ahead == (8 if late else 0)
        found.append(logprobs)
    assert found[0] == found[1]
    assert len(found[0]) == 9


def test_length_end_causes_no_extra_step() -> None:
    for late in (False, True):
        server, _ = started(late=late, max_tokens=9, ignore_eos=True)
        server.run()
        assert len(server.runner.steps) == 9


@pytest.mark.parametrize(
    "sampling", [{}, {"stop": ("al",), "ignore_eos": True}, {"stop": ("e",), "min_tokens": 2}]
)
def test_late_end_discards_one_token(sampling: dict[str, Any]) -> None:
    counts = []
    for late in (False, True):
        server, context = started(late=late, **sampling)
        server.run()
        known = server.known[context]
        assert known.finished[0].reason == "stop"
        counts.append((len(server.runner.steps), known.ids, server.engine.status().num_held))
    (steps, ids, held), (late_steps, late_ids, late_held) = counts
    assert (late_steps, late_ids, late_held) == (steps + 1, ids, held)


@pytest.mark.parametrize(
    "sampling",
    [
        {"repetition_penalty": 1.2},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
    ],
)
def test_penalty_defers_sampling_and_not_the_forward_pass(
    sampling: dict[str, Any],
) -> None:
    server, _ = started(max_tokens=8, ignore_eos=True, **sampling)
    server.run()
    assert server.runner.num_ahead == 7
    assert server.runner.num_deferred == 7


def test_free_rows_are_sampled_at_once() -> None:
    server, _ = started(max_tokens=8, ignore_eos=True)
    server.run()
    assert server.runner.num_deferred == 0


def test_new_prompt_joins_a_lookahead_step() -> None:
    server, _ = started(max_tokens=30, ignore_eos=True)
    for _ in range(5):
        server.step()
    ahead = server.runner.num_ahead
    server.fill(A[10:20])
    server.step()
    assert server.runner.num_ahead == ahead + 1
    assert [each[1:] for each in server.runner.steps[-1]] == [(9, 1), (0, 10)]
    server.run()
    assert server.runner.num_ahead == len(server.runner.steps) - 1


def test_prompt_continues_before_its_last_chunk_was_read() -> None:
    limits = protocol.EngineLimits(
        256, block_size=4, num_blocks=128, step_tokens=16, max_sequences=4
    )
    server = ServerDouble(limits, late=True)
    context = server.fill(A[:26] * 2)
    server.generate(context, max_tokens=3, ignore_eos=True)
    server.run()
    assert server.runner.num_ahead == 5
    assert [row[1:] for step in server.runner.steps for row in step] == [
        *((0, 16), (16, 16), (32, 16), (48, 4)),
        *((52, 1), (53, 1)),
    ]


def test_long_step_is_read_before_the_next_one() -> None:
    limits = protocol.EngineLimits(
        1024, block_size=4, num_blocks=512, step_tokens=512, max_sequences=4
    )
    server = ServerDouble(limits, late=True)
    for number in range(2):
        server.fill([number] * 400)
    server.run()
    assert [sum(row[2] for row in step) for step in server.runner.steps] == [512, 288]
    assert server.runner.num_ahead == 0


def test_context_that_needs_blocks_of_another_gets_them_after_the_step() -> None:
    """A higher rank preempts as soon as the step in flight is read."""
    limits = protocol.EngineLimits(64, block_size=4, num_blocks=16, step_tokens=64, max_sequences=4)
    server = ServerDouble(limits, late=True)
    low = server.fill(A[:20], rank=5.0)
    server.generate(low, rank=5.0, max_tokens=30, ignore_eos=True)
    for _ in range(4):
        server.step()
    high = server.fill(bytes(range(48)), rank=1.0)
    for _ in range(2):
        server.step()
    assert any((high, 0, 48) in step for step in server.runner.steps[-2:])
    server.run()
    assert server.known[low].finished


def test_fill_is_answered_after_its_step_is_read() -> None:
    server = ServerDouble(late=True)
    server.fill(A[:8])
    twin = server.fill(A[:8])
    server.step()
    assert server.runner.flying
    assert server.runner.steps == [[(1, 0, 8)]]
    server.extend(twin, b"")
    server.step()
    assert len(server.known[twin].filled) == 2
    server.run()
    assert server.engine.is_idle


@pytest.mark.parametrize("num_steps", range(4))
@pytest.mark.parametrize("size", [8, 32])
def test_tokens_of_a_freed_parent_in_flight_are_counted(num_steps: int, size: int) -> None:
    limits = protocol.EngineLimits(
        256, block_size=4, num_blocks=64, step_tokens=size, max_sequences=8
    )
    server = ServerDouble(limits, late=True)
    parent = server.fill(A[:16])
    child = server.fill(b"X", parent, 16)
    for _ in range(num_steps):
        server.step()
    server.free(parent, keep=16)
    server.run()
    status = server.engine.status()
    assert (status.num_computed_tokens, status.num_recomputed_tokens) == (16 + 1, 0)
    assert server.known[child].filled == [protocol.Filled(child, 1, 16, 0)]
    server.free(child)
    assert (server.engine.status().num_held, server.engine.status().num_cached) == (0, 4)


def test_waiting_contexts_do_not_disable_lookahead() -> None:
    limits = protocol.EngineLimits(
        256, block_size=4, num_blocks=128, step_tokens=64, max_sequences=2
    )
    server = ServerDouble(limits, late=True)
    for number in range(4):
        context = server.fill(A[number : number + 6], rank=number)
        server.generate(context, rank=number, max_tokens=20, ignore_eos=True)
    server.run()
    assert server.runner.num_ahead > 30


@pytest.mark.parametrize("num_steps", range(1, 6))
def test_abort_frees_blocks_of_a_step_in_flight(num_steps: int) -> None:
    server = ServerDouble(LIMITS, late=True)
    context = server.fill(A * 5)
    server.generate(context, max_tokens=50)
    for _ in range(num_steps):
        server.step()
    server.abort(context)
    assert server.engine.status().num_held == 0
    server.run()
    assert server.engine.status().num_free == LIMITS.num_blocks


@pytest.mark.parametrize("num_steps", [2, 3, 7])
def test_abort_counts_the_token_of_a_step_in_flight(num_steps: int) -> None:
    server, context = started(late=True, max_tokens=50, ignore_eos=True)
    for _ in range(num_steps):
        server.step()
    num_read = server.engine.status().num_decoded_tokens
    server.abort(context)
    step = server.step()
    assert step is not None
    assert protocol.Aborted(context, num_read + 1) in step.reports


def test_late_failure_fails_the_lookahead_step_too() -> None:
    server, _ = started(max_tokens=30, ignore_eos=True)
    for _ in range(3):
        server.step()
    server.runner.fails_late = True
    server.step()
    server.runner.fails_late = False
    server.step()
    assert [failed.code for failed in server.failed] == ["engine.step"]
    server.run()
    assert server.generate_text(A[3:9]) == ServerDouble().generate_text(A[3:9])
    assert server.engine.status().num_held == 0


def test_log_names_the_failed_step_and_not_the_one_after_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server, _ = started()
    server.runner.fails_late = True
    server.step()
    server.step()
    assert len(server.runner.steps) == 2
    assert "step=1 contexts=1 failed" in caplog.text


def test_prompt_that_shared_with_a_failed_step_is_computed_again() -> None:
    server = ServerDouble(late=True)
    failing = server.fill(A[:8])
    server.runner.fails_late = True
    server.step()
    server.runner.fails_late = False
    twin = server.fill(A[:12])
    server.step()
    assert [failed.context for failed in server.failed] == [failing]
    server.run()
    assert (twin, 0, 12) in server.runner.steps[-1]
    assert len(server.known[twin].filled) == 1


def test_kv_rewritten_by_a_failed_step_is_recomputed() -> None:
    server = ServerDouble(late=True)
    context = server.fill(A[:8])
    server.run()
    server.runner.fails_late = True
    server.generate(context)
    server.step()
    assert server.runner.steps[-1] == [(context, 7, 1)]
    fork = server.fork_generate(context, 8)
    server.runner.fails_late = False
    server.run()
    assert [failed.context for failed in server.failed] == [context]
    assert (fork, 0, 8) in server.runner.steps[3]


def test_failed_step_leaves_no_cached_kv() -> None:
    server = ServerDouble(late=True)
    context = server.fill(A[:8])
    server.runner.fails_late = True
    server.step()
    server.free(context, keep=8)
    server.step()
    assert server.engine.status().num_cached == 0


def test_cut_of_forced_tokens_discards_their_step_in_flight() -> None:
    """The next prompt takes their positions before the step is read."""
    limits = protocol.EngineLimits(
        256, block_size=4, num_blocks=128, step_tokens=16, max_sequences=4
    )
    runner = RecordingRunner(limits, late=True)
    harness = ConstraintHarness(runner)
    forced = lark('start: "hello STOP world"')
    harness.call(forced)  # From here on, the grammar is cached.
    context = harness.start(A[:16], forced, stop=("STOP",))
    harness.run()
    assert harness.outcomes[context].finished.text == "hello "
    assert runner.flying
    assert runner.steps[-1] == [(context, 16, len("hello STOP"))]
    harness.apply(protocol.Fill(context, list(A[:20])))
    harness.generate(context, None, max_tokens=4)
    harness.run()
    expected = default_text([*A[:16], *b"hello ", *A[:20]])[:4]
    assert harness.outcomes[context].finished.text == expected
    harness.close()


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shrunk.write(tmp_path_factory.mktemp("model") / request.param, request.param)


@pytest.mark.parametrize("num_blocks", [200, 24])
def test_lookahead_does_not_change_model_outputs(
    folder: Path, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers arrivals, ends, aborts, shared prefixes, EOS and, with few blocks, preemption."""
    recorder = Recorder()
    options: dict[str, Any] = {
        "num_blocks": num_blocks,
        "block_size": 4,
        "max_sequences": 6,
        "min_saved": 0,
    }
    options["step_tokens"] = 24
    num_ahead = 0
    runners = [
        shrunk.runner_on(folder, device, **options)
        for device in ("cpu", backend(recorder, is_late=True), backend(None, is_late=True))
    ]
    start = runners[1].start

    def counted(rows: list[ScheduledSequence], copies: list[tuple[int, int]]) -> Any:
        nonlocal num_ahead
        num_ahead += rows[0].previous_id_index is not None
        return start(rows, copies)

    monkeypatch.setattr(runners[1], "start", counted)
    for runner in runners:
        # Many ids end a text, so that many ends are detected late.
        runner.eos_ids = (*runner.eos_ids, *range(0, 256, 16))
    for seed in range(2):
        calls = random_calls(seed)
        found = [run_calls(runner, calls) for runner in runners]
        assert found[0] == found[1] == found[2]
    assert num_ahead > 20
    assert recorder.num_replayed > 20


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9}, {"logprobs": 1}])
def test_lookahead_survives_nan_logits(
    folder: Path, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step after the one with NaN has started when the engine reads -1."""
    params = protocol.SamplingParams(max_tokens=12, **sampling)
    options: dict[str, Any] = {"num_blocks": 50, "block_size": 4, "max_sequences": 4}
    runner = shrunk.runner_on(folder, backend(None, is_late=True), **options)
    forward, found = runner._forward, []

    def broken(ids: Tensor, positions: Tensor, last: Tensor, attention: Attention) -> Tensor:
        is_nan = positions[last] == 7
        return forward(ids, positions, last, attention).masked_fill(is_nan[:, None], math.nan)

    for prompts in ((A[:10],), (A[:10], A[:4])):
        engine, reports = EngineCore(runner, epoch=1), list[protocol.Report]()
        for number, prompt in enumerate(prompts):
            engine.apply(protocol.Fill(number, list(prompt)))
            engine.apply(protocol.GenerateCommand(number, params))
        while (step := engine.step()) is not None:
            engine.check()
            reports += step.reports
        found.append([each for each in reports if isinstance(each, protocol.Finished)])
        failed = [each for each in reports if isinstance(each, protocol.Failed)]
        assert [each.context for each in failed] == [*range(1, len(prompts))]
        monkeypatch.setattr(runner, "_forward", broken)
    assert len(found[0]) == 1
    assert found[0] == found[1]


GRAMMARS = (
    None,
    lark('start: /[a-z]{1,9}/ "," /[0-9]+/'),
    lark('start: "yes, certainly" | "no, never"'),
    schema({"type": "object", "properties": {"name": {"type": "integer"}}, "required": ["name"]}),
    None,
)
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "logprobs": 1},
    {"temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.3},
    {"temperature": 1.2, "top_p": 0.9, "min_tokens": 3},
)


def constrained_outputs(runner: Runner, seed: int) -> list[tuple[list[int], str, str]]:
    """Return ids, text and outcome of calls, of which some have grammars and penalties."""
    rng = random.Random(seed)
    harness = ConstraintHarness(runner)
    common = rng.choices(range(32, 127), k=20)
    names: list[int] = []
    for number in range(15):
        prompt = common[: rng.randrange(20)] + rng.choices(range(32, 127), k=rng.randint(1, 12))
        sampling = {"seed": number, "max_tokens": rng.randint(1, 20), **rng.choice(KINDS)}
        names.append(harness.start(prompt, rng.choice(GRAMMARS), **sampling))
        for _ in range(rng.randrange(4)):
            harness.step()
    harness.run()
    found: list[tuple[list[int], str, str]] = []
    for name in names:
        outcome = harness.outcomes[name]
        found.append((outcome.ids, outcome.finished.text, outcome.finished.constraint))
        harness.free(name)
    while harness.step():
        pass
    assert harness.engine.status().num_held == 0
    harness.close()
    return found


@pytest.mark.parametrize("num_blocks", [200, 24])
def test_lookahead_does_not_change_constrained_outputs(folder: Path, num_blocks: int) -> None:
    """Covers grammars with forced tokens, penalties and free rows in the same steps."""
    options: dict[str, Any] = {
        "num_blocks": num_blocks,
        "block_size": 4,
        "max_sequences": 6,
        "min_saved": 0,
        "step_tokens": 24,
    }
    runners = [
        shrunk.runner_on(folder, device, **options)
        for device in ("cpu", backend(None, is_late=True))
    ]
    counters = [count_deferred(runner) for runner in runners]
    for seed in range(2):
        found = [constrained_outputs(runner, seed) for runner in runners]
        assert found[0] == found[1]
    # How often depends on how long the grammars take to compile.
    assert [counter.num_ahead > 0 for counter in counters] == [False, True]
    assert [counter.num_deferred > 0 for counter in counters] == [False, True]


@dataclass
class LookaheadCounter:
    """Steps that continue ids which the host has not read, and those that are sampled later."""

    num_ahead: int = 0
    num_deferred: int = 0


def count_deferred(runner: TorchModelRunner) -> LookaheadCounter:
    """Count the steps of a runner."""
    counter = LookaheadCounter()
    start = runner.start

    def counted(rows: Sequence[ScheduledSequence], copies: Sequence[tuple[int, int]]) -> Handle:
        counter.num_ahead += any(row.previous_id_index is not None for row in rows)
        counter.num_deferred += any(row.is_deferred for row in rows)
        return start(rows, copies)

    runner.start = counted  # type: ignore[method-assign]
    return counter


@pytest.mark.parametrize("num_blocks", [200, 24])
def test_plans_notice_every_replaced_block(
    tmp_path: Path, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan updated from the previous one must equal a plan built from its rows alone.

    Each call is made twice, so that two contexts fill equal blocks concurrently, and a block of
    one is then replaced by the other's.
    """
    runner = TorchModelRunner(
        EngineConfig(
            model=str(shrunk.write(tmp_path / "llama", "llama")),
            dtype="float32",
            num_blocks=num_blocks,
            block_size=4,
            max_sequences=6,
            step_tokens=24,
            threads=1,
        ),
        min_saved=0,
    )
    planner = runner._planner
    make, num_replaced = planner.plan, 0
    # Holding the tables keeps their ids unique.
    before: dict[int, tuple[Any, list[int]]] = {}

    def checked(new: Sequence[int], lengths: Sequence[int], tables: Sequence[Any]) -> Plan:
        nonlocal num_replaced
        for table in tables:
            _, copy = before.get(id(table), (table, []))
            num_replaced += list(table[: len(copy)]) != copy
            before[id(table)] = table, list(table)
        found = make(new, lengths, tables)
        expected = build_plan(
            new, lengths, [list(table) for table in tables], block_size=4, min_saved=0
        )
        assert found.slots.tolist() == expected.slots.tolist()
        assert read_by(found) == read_by(expected)
        return found

    monkeypatch.setattr(planner, "plan", checked)
    for seed in range(4):
        run_calls(runner, [call for call in random_calls(seed) for _ in range(2)])
    assert num_replaced > 0, "no block was replaced"


def read_by(plan: Plan) -> list[list[int]]:
    """Return the slots that the items of each query read, in any order."""
    slots: list[list[int]] = [[] for _ in range(plan.num_queries)]
    for item in plan.items():
        for query in item.queries.tolist():
            slots[query] += item.slots(plan.block_size).tolist()
    return [sorted(each) for each in slots]
