"""Steps that are started before the one before them is read: the same tokens, one step ahead.

The devices are doubles on the CPU that tell their results late. What any commands may do to
steps on their way is in `test_memory`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from conure.engine import api
from conure.engine.engine import Engine
from conure.engine.local import LocalRunner
from conure.engine.runner import Row, Runner
from conure.kernels.plan import Plan, build

from . import shrunk
from .graph_double import Recorder, backend
from .server_double import LIMITS, ServerDouble

A = b"abcdefghijklmnopqrstuvwxyz"


def started(*, late: bool = True, **sampling: Any) -> tuple[ServerDouble, int]:
    """A server that generates at the end of one context."""
    server = ServerDouble(late=late)
    context = server.fill(A[:5])
    server.generate(context, **sampling)
    return server, context


def test_decoding_is_one_step_ahead_and_the_text_is_the_same() -> None:
    texts = []
    for late in (False, True):
        server, context = started(late=late, max_tokens=12, ignore_eos=True)
        server.run()
        texts.append(server.known[context].finished[0].text)
        assert server.runner.num_ahead == (11 if late else 0)
    assert texts[0] == texts[1]


def test_what_ends_with_length_is_not_run_once_more() -> None:
    for late in (False, True):
        server, _ = started(late=late, max_tokens=9, ignore_eos=True)
        server.run()
        assert len(server.runner.steps) == 9


@pytest.mark.parametrize(
    "sampling", [{}, {"stop": ("al",), "ignore_eos": True}, {"stop": ("e",), "min_tokens": 2}]
)
def test_an_end_that_is_found_late_throws_one_token_away(sampling: dict[str, Any]) -> None:
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
        {"logprobs": 0},
    ],
)
def test_what_the_host_must_know_before_the_next_token_is_read_first(
    sampling: dict[str, Any],
) -> None:
    server, _ = started(max_tokens=8, ignore_eos=True, **sampling)
    server.run()
    assert server.runner.num_ahead == 0


def test_a_prompt_that_comes_is_not_kept_waiting() -> None:
    server, _ = started(max_tokens=30, ignore_eos=True)
    for _ in range(5):
        server.step()
    ahead = server.runner.num_ahead
    server.fill(A[10:20])
    server.step()
    assert server.runner.num_ahead == ahead
    assert server.runner.steps[-1][-1][2] == 10, "the prompt is in the step that was started"
    server.run()
    assert server.runner.num_ahead > ahead


def test_a_fill_is_not_answered_before_the_step_that_computes_it_is_read() -> None:
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


def test_contexts_that_find_no_place_do_not_stop_those_that_run() -> None:
    limits = api.Limits(256, block_size=4, num_blocks=128, step_tokens=64, max_sequences=2)
    server = ServerDouble(limits, late=True)
    for number in range(4):
        context = server.fill(A[number : number + 6], rank=number)
        server.generate(context, rank=number, max_tokens=20, ignore_eos=True)
    server.run()
    assert server.runner.num_ahead > 30


@pytest.mark.parametrize("num_steps", range(1, 6))
def test_an_abort_frees_at_once_whatever_is_on_its_way(num_steps: int) -> None:
    server = ServerDouble(LIMITS, late=True)
    context = server.fill(A * 5)
    server.generate(context, max_tokens=50)
    for _ in range(num_steps):
        server.step()
    server.abort(context)
    assert server.engine.status().num_held == 0
    server.run()
    assert server.engine.status().num_free == LIMITS.num_blocks


def test_a_step_that_fails_late_fails_its_contexts_and_its_follower() -> None:
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


def test_what_a_step_that_failed_late_wrote_again_is_computed_again() -> None:
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
    assert (fork, 0, 8) in server.runner.steps[2]


def test_what_was_kept_of_a_step_that_failed_late_is_not_found_again() -> None:
    server = ServerDouble(late=True)
    context = server.fill(A[:8])
    server.runner.fails_late = True
    server.step()
    server.free(context, keep=8)
    server.step()
    assert server.engine.status().num_cached == 0


@dataclass
class Call:
    """One call of a random load."""

    ids: list[int]
    sampling: api.Sampling
    arrival: int
    abort: int | None


def calls_of(seed: int) -> list[Call]:
    rng = random.Random(seed)
    common = rng.choices(range(256), k=20)
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {},
        {"temperature": 0.9},
        {"temperature": 1.1, "top_p": 0.9, "top_k": 30, "min_tokens": 3},
        {"repetition_penalty": 1.2},
        {"logprobs": 1, "temperature": 0.7},
        {"logit_bias": ((9, 1.5),), "ignore_eos": True, "stop_token_ids": (4, 70, 200)},
    )
    calls: list[Call] = []
    for number in range(12):
        ids = common[: rng.randrange(20)] + rng.choices(range(256), k=rng.randint(1, 20))
        sampling = api.Sampling(
            max_tokens=rng.randint(1, 25), seed=number, **{"temperature": 0.0, **rng.choice(kinds)}
        )
        arrival = rng.randrange(40)
        abort = arrival + rng.randrange(12) if rng.random() < 0.25 else None
        calls.append(Call(ids, sampling, arrival, abort))
    return calls


def answers(runner: Runner, calls: list[Call]) -> dict[int, tuple[list[int], str]]:
    """Run calls through an engine; return ids and ending of those that were not aborted."""
    engine = Engine(runner, epoch=1)
    got: dict[int, list[int]] = {number: [] for number in range(len(calls))}
    ended: dict[int, tuple[list[int], str]] = {}
    for now in range(2000):
        for number, call in enumerate(calls):
            if call.arrival == now:
                engine.apply(api.Fill(number, call.ids, rank=float(number % 3)))
                engine.apply(api.Generate(number, call.sampling, rank=float(number % 3)))
            if call.abort == now:
                engine.apply(api.Abort(number))
        step = engine.step()
        engine.check()
        for report in step.reports if step is not None else ():
            assert not isinstance(report, api.Failed), report
            if isinstance(report, api.Tokens):
                got[report.context] += report.ids
            elif isinstance(report, api.Finished):
                ended[report.context] = (got[report.context], report.reason)
                engine.apply(api.Free(report.context))
        if step is None and now > 60:
            break
    assert engine.is_idle
    assert engine.status().num_held == 0
    wanted = {number for number, call in enumerate(calls) if call.abort is None}
    assert wanted <= ended.keys()
    return {number: ended[number] for number in wanted}


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shrunk.write(tmp_path_factory.mktemp("model") / request.param, request.param)


@pytest.mark.parametrize("num_blocks", [200, 24])
def test_a_model_says_the_same_one_step_ahead(
    folder: Path, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Joins, leaves, aborts, shared prefixes, EOS and, in the small pool, preemption."""
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
        LocalRunner(model=str(folder), dtype="float32", device=device, threads=1, **options)
        for device in ("cpu", backend(recorder, is_late=True), backend(None, is_late=True))
    ]
    start = runners[1].start

    def counted(rows: list[Row], copies: list[tuple[int, int]]) -> Any:
        nonlocal num_ahead
        num_ahead += rows[0].follows is not None
        return start(rows, copies)

    monkeypatch.setattr(runners[1], "start", counted)
    for runner in runners:
        # Many ids end a text, so that ends are found late.
        runner.eos_ids = (*runner.eos_ids, *range(0, 256, 16))
    for seed in range(2):
        calls = calls_of(seed)
        found = [answers(runner, calls) for runner in runners]
        assert found[0] == found[1] == found[2]
    assert num_ahead > 20
    assert recorder.num_replayed > 20


@pytest.mark.parametrize("num_blocks", [200, 24])
def test_no_block_that_an_engine_replaces_is_missed_by_its_plans(
    tmp_path: Path, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables are told apart by what they count: a plan must still be that of its rows alone.

    Each call is made twice, so that contexts fill the same blocks side by side: a block of one
    then takes the place of the other's.
    """
    runner = LocalRunner(
        model=str(shrunk.write(tmp_path / "llama", "llama")),
        dtype="float32",
        num_blocks=num_blocks,
        block_size=4,
        max_sequences=6,
        step_tokens=24,
        min_saved=0,
        threads=1,
    )
    planner = runner._planner
    make, num_replaced = planner.plan, 0

    def checked(new: Sequence[int], lengths: Sequence[int], tables: Sequence[Any]) -> Plan:
        nonlocal num_replaced
        num_replaced += sum(table.replaced for table in tables)
        found = make(new, lengths, tables)
        wanted = build(new, lengths, [list(table) for table in tables], block_size=4, min_saved=0)
        assert found.slots.tolist() == wanted.slots.tolist()
        assert read_by(found) == read_by(wanted)
        return found

    monkeypatch.setattr(planner, "plan", checked)
    for seed in range(4):
        answers(runner, [call for call in calls_of(seed) for _ in range(2)])
    assert num_replaced > 0, "nothing was put to the test"


def read_by(plan: Plan) -> list[list[int]]:
    """Return the slots that the items of each query read, in any order."""
    slots: list[list[int]] = [[] for _ in range(plan.num_queries)]
    for item in plan.items():
        for query in item.queries.tolist():
            slots[query] += item.slots(plan.block_size).tolist()
    return [sorted(each) for each in slots]
