"""The engine core over a fake runner that checks what every block holds."""

from __future__ import annotations

import logging
import weakref

import pytest

from conure.engine import protocol
from conure.engine.core.engine import EngineCore
from conure.engine.runner.base import DeviceLostError, ScheduledSequence
from conure.engine.testing.scripted_runner import FakeRunner, default_text
from conure.engine.text.byte_tokenizer import VOCAB_SIZE

from ..server_double import LIMITS, ServerDouble

A = b"abcdefghijklmnopqrstuvwxyz"


def limits(**changes: int) -> protocol.EngineLimits:
    fields = {name: getattr(LIMITS, name) for name in protocol.EngineLimits.__struct_fields__}
    return protocol.EngineLimits(**{**fields, **changes})


def test_call_is_filled_then_generates_until_eos() -> None:
    server = ServerDouble()
    context = server.fill(A[:10])
    server.generate(context)
    server.run()
    known = server.known[context]
    text = default_text(list(A[:10]))
    assert known.filled == [protocol.Filled(context, computed=10, shared=0, cached=0)]
    assert known.finished == [
        protocol.Finished(context, "stop", text, len(text), "", len(text) + 1, None)
    ]
    assert known.ids == list(A[:10]) + list(text.encode())


def test_eos_is_dropped_from_text_and_context() -> None:
    server = ServerDouble()
    context = server.fill(A[:5])
    server.generate(context)
    server.run()
    server.extend(context, b" and")
    server.generate(context, max_tokens=4)
    server.run()
    first, second = server.known[context].finished
    assert second.text == default_text([*A[:5], *first.text.encode(), *b" and"])[:4]
    assert server.known[context].filled[1] == protocol.Filled(context, 4, 0, 0)


def test_computed_counts_only_include_prompt_tokens() -> None:
    server = ServerDouble()
    context = server.fill(A[:7])
    for _ in range(4):
        server.generate(context, max_tokens=3, ignore_eos=True)
        server.run()
        server.extend(context, b"xy")
    server.run()
    status = server.engine.status()
    assert status.num_computed_tokens == 7 + 4 * 2
    assert status.num_decoded_tokens == 4 * 3
    assert status.num_recomputed_tokens == 0


@pytest.mark.parametrize(
    ("text", "stop", "kept", "num_kept", "leftover"),
    [
        ("one\ntwo", ("\n",), "one", 3, ""),
        ("one<END>two", ("<END>",), "one", 3, ""),
        ("one two", ("wo", "tw"), "one ", 4, ""),
        ("naïve #", ("ve #",), "naï", 4, ""),
    ],
)
def test_stop_string_across_tokens_ends_the_text(
    text: str, stop: tuple[str, ...], kept: str, num_kept: int, leftover: str
) -> None:
    server = ServerDouble(answer=lambda _: text)
    context = server.fill(A[:6])
    server.generate(context, stop=stop)
    server.run()
    finished = server.known[context].finished[0]
    assert finished.text == kept
    assert finished.reason == "stop"
    assert finished.stop in stop
    assert (finished.num_kept, finished.leftover) == (num_kept, leftover)
    assert server.known[context].ids[6:] == list(kept.encode())


def test_possible_stop_string_prefix_is_withheld() -> None:
    server = ServerDouble(answer=lambda _: "a<b<END")
    context = server.fill(A[:3])
    server.generate(context, stop=("<END>",))
    texts: list[str] = []
    while (step := server.step()) is not None:
        texts += [r.text for r in step.reports if isinstance(r, protocol.Tokens)]
    assert texts == ["a", "", "<b", "", "", "", "", "<END"]


def test_multi_token_character_is_reported_whole() -> None:
    server = ServerDouble(answer=lambda _: "é🦜")
    context = server.fill(A[:3])
    server.generate(context)
    texts: list[str] = []
    while (step := server.step()) is not None:
        texts += [r.text for r in step.reports if isinstance(r, protocol.Tokens)]
    assert texts == ["", "é", "", "", "", "🦜"]


def test_incomplete_last_character_is_reported() -> None:
    server = ServerDouble(answer=lambda _: "a🦜")
    context = server.fill(A[:3])
    server.generate(context, max_tokens=3)
    server.run()
    finished = server.known[context].finished[0]
    assert (finished.text, finished.num_kept, finished.reason) == ("a\ufffd", 3, "length")


def test_stop_token_is_reported() -> None:
    server = ServerDouble(answer=lambda _: "abc")
    context = server.fill(A[:3])
    server.generate(context, stop_token_ids=(ord("c"),))
    server.run()
    finished = server.known[context].finished[0]
    assert (finished.text, finished.reason, finished.stop) == ("ab", "stop", ord("c"))
    assert (finished.num_kept, finished.num_decoded) == (2, 3)


def test_min_tokens_delays_eos_and_stop_strings() -> None:
    server = ServerDouble(answer=lambda _: "ab")
    context = server.fill(A[:3])
    server.generate(context, min_tokens=7, stop=("b",))
    server.run()
    assert server.known[context].finished[0].text == "ab ab a"


def test_context_length_ends_generation() -> None:
    server = ServerDouble(limits(context_len=10))
    context = server.fill(A[:7])
    server.generate(context, ignore_eos=True)
    server.run()
    assert server.known[context].finished[0].reason == "length"
    assert len(server.known[context].ids) == 10
    server.generate(context)
    server.run()
    assert server.known[context].finished[1] == protocol.Finished(context, "length", "", 0, "", 0)


def test_too_long_prompt_fails_with_both_lengths() -> None:
    server = ServerDouble(limits(context_len=10))
    server.fill(A[:11])
    server.run()
    assert server.failed[0].code == "prompt.too_long"
    assert "11 tokens" in server.failed[0].message
    assert "context of 10" in server.failed[0].message


def test_context_larger_than_all_blocks_fails() -> None:
    server = ServerDouble(limits(num_blocks=3))
    server.fill(A[:13])
    context = server.fill(A[:11])
    server.generate(context, ignore_eos=True)
    server.run()
    assert [failed.code for failed in server.failed] == ["engine.too_large"] * 2
    assert "13 tokens need 4 blocks of 4 and the engine has 3" in server.failed[0].message
    assert server.engine.status().num_free == 3


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (
            protocol.GenerateCommand(9, protocol.SamplingParams(5), constraint="{}"),
            "engine.unsupported_constraint",
        ),
        (protocol.GenerateCommand(9, protocol.SamplingParams(5)), "engine.empty_context"),
        (protocol.Fill(9, [1, VOCAB_SIZE]), "engine.unknown_token"),
        (protocol.Embed(9, [VOCAB_SIZE]), "engine.unknown_token"),
        (protocol.Fill(9, [1], parent=77), "engine.unknown_parent"),
        (protocol.Fill(9, [1], parent=1, parent_len=6), "engine.bad_parent"),
        (protocol.Fill(9, [1], parent=1, parent_len=-1), "engine.bad_parent"),
        (protocol.Fill(1, [1], parent=1, parent_len=2), "engine.bad_parent"),
    ],
)
def test_invalid_command_fails_with_its_code(command: protocol.Command, code: str) -> None:
    engine = EngineCore(FakeRunner(), 1)
    engine.apply(protocol.Fill(1, list(A[:5])))
    engine.apply(command)
    step = engine.step()
    assert step is not None
    assert [r.code for r in step.reports if isinstance(r, protocol.Failed)] == [code]
    engine.check()


def test_unknown_token_fails_only_its_context() -> None:
    server = ServerDouble()
    context = server.fill(A[:5])
    server.generate(context)
    server.step()
    server.fill([VOCAB_SIZE])
    server.run()
    assert [failed.code for failed in server.failed] == ["engine.unknown_token"]
    assert f"token {VOCAB_SIZE}, only ids below {VOCAB_SIZE}" in server.failed[0].message
    assert server.known[context].finished


def test_fill_into_a_generating_context_fails() -> None:
    server = ServerDouble()
    context = server.fill(A[:5])
    server.generate(context)
    server.step()
    server.apply(protocol.Fill(context, [1]))
    server.run()
    assert server.failed[0].code == "engine.busy"
    assert server.engine.status().num_free == server.limits.num_blocks


def test_commands_on_a_failed_context_fail_again() -> None:
    server = ServerDouble(limits(context_len=10))
    context = server.fill(A[:11])
    server.apply(protocol.Fill(context, [1, 2]))
    server.apply(protocol.GenerateCommand(context, protocol.SamplingParams(5)))
    step = server.engine.step()
    assert step is not None
    assert [r.code for r in step.reports if isinstance(r, protocol.Failed)] == [
        "prompt.too_long"
    ] * 3
    assert server.engine.status().num_contexts == 0
    server.apply(protocol.Free(context))
    server.apply(protocol.Fill(context, [1, 2]))
    assert server.engine.status().num_contexts == 1


def test_raising_step_fails_only_its_contexts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = ServerDouble(limits(step_tokens=8))
    first, second = server.fill(A[:8]), server.fill(A[:20])
    server.generate(first)
    server.runner.fails = True
    server.step()
    server.runner.fails = False
    assert [(f.context, f.code) for f in server.failed] == [(first, "engine.step")]
    assert "test failure" in caplog.text
    server.generate(second)
    server.run()
    assert server.known[second].finished[0].text == default_text(list(A[:20]))


@pytest.mark.parametrize("late", [False, True])
def test_nan_logits_fail_only_their_context(
    late: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = ServerDouble(late=late)
    first, second = server.fill(A[:8]), server.fill(A[:20])
    server.generate(first, ignore_eos=True)
    server.generate(second)
    sample = server.runner._next_id

    def broken(row: ScheduledSequence, sampling: protocol.SamplingParams, num_output: int) -> int:
        is_nan = row.context == first and num_output == 3
        return -1 if is_nan else sample(row, sampling, num_output)

    monkeypatch.setattr(server.runner, "_next_id", broken)
    server.run()
    [failed] = server.failed
    assert (failed.context, failed.code) == (first, "engine.step")
    assert "NaN after 11 tokens; start the engine with another --dtype" in failed.message
    assert f"context={first} tokens=11: the logits are NaN" in caplog.text
    assert server.known[second].finished[0].text == default_text(list(A[:20]))
    server.free(second)
    assert server.engine.status().num_held == 0


def test_lost_device_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that only fails would answer pings, and never be replaced."""
    server = ServerDouble()
    server.generate(server.fill(A[:10]))

    def fail(*arguments: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    def check_device() -> None:
        raise DeviceLostError("cuda:0 is lost")

    monkeypatch.setattr(server.runner, "start", fail)
    monkeypatch.setattr(server.runner, "check_device", check_device)
    with pytest.raises(DeviceLostError, match="cuda:0 is lost"):
        server.run()


def test_failed_launch_releases_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ServerDouble()
    tensors: list[weakref.ref[set[int]]] = []

    def fail(*arguments: object) -> None:
        tensor = {1}
        tensors.append(weakref.ref(tensor))
        raise RuntimeError("out of memory")

    monkeypatch.setattr(server.runner, "start", fail)
    # pytest keeps the errors of all log records.
    monkeypatch.setattr(logging.getLogger("conure.engine.core.engine"), "disabled", True)
    server.fill(A[:5])
    server.step()
    assert tensors[0]() is None


def test_failed_step_makes_sharing_contexts_recompute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = ServerDouble()
    first, rider = server.fill(A[:16]), server.fill(A[:16])
    server.runner.fails = True
    server.step()
    server.runner.fails = False
    assert server.runner.steps == [[(first, 0, 16)]]
    assert [failed.context for failed in server.failed] == [first]
    server.generate(rider)
    server.run()
    assert server.runner.steps[1] == [(rider, 0, 16)]
    assert caplog.records


def test_simultaneous_arrivals_compute_their_prefix_once() -> None:
    server = ServerDouble()
    contexts = [server.fill([*A[:16], 48 + i]) for i in range(8)]
    server.step()
    assert server.engine.status().num_computed_tokens == 16 + 8
    assert [server.known[c].filled[0].shared for c in contexts] == [0] + [16] * 7


def test_equal_prompts_share_all_but_the_last_block() -> None:
    server = ServerDouble()
    for _ in range(4):
        server.generate(server.fill(A[:16]), max_tokens=2)
    server.run()
    assert server.engine.status().num_computed_tokens == 16 + 3 * 4


def test_fork_computes_only_its_own_tokens() -> None:
    server = ServerDouble()
    parent = server.fill(A[:14])
    server.run()
    children = [server.fill([65 + i], parent, 14) for i in range(3)]
    for child in children:
        server.generate(child)
    server.run()
    assert server.engine.status().num_computed_tokens == 14 + 3
    # The last fork to write to the partial block needs a copy, too: the parent still reads it.
    assert len(server.runner.copies) == 3


def test_fork_waits_for_a_filling_parent() -> None:
    server = ServerDouble(limits(step_tokens=8))
    parent = server.fill(A[:22])
    children = [server.fill([65 + i], parent, 22) for i in range(3)]
    server.free(parent)
    for child in children:
        server.generate(child, max_tokens=1)
    server.run()
    assert server.engine.status().num_computed_tokens == 22 + 3
    assert server.engine.status().num_recomputed_tokens == 0
    for child in children:
        assert server.known[child].filled[0].shared == 22


def test_fork_with_higher_priority_computes_for_its_parent() -> None:
    server = ServerDouble(limits(step_tokens=8))
    parent = server.fill(A[:16], rank=5.0)
    child = server.fill(b"", parent, 16, rank=1.0)
    server.step()
    assert server.runner.steps[0][0][0] == child
    server.run()
    assert server.engine.status().num_computed_tokens == 16
    assert server.known[parent].filled[0].shared == 16


def test_freed_parent_is_cached_after_its_forks_share() -> None:
    server = ServerDouble(limits(step_tokens=8))
    parent = server.fill(A[:16])
    child = server.fill(b"X", parent, 16)
    server.free(parent, keep=12)
    server.run()
    server.free(child)
    assert server.engine.status().num_cached == 3
    again = server.fill(A[:16])
    server.run()
    assert server.known[again].filled[0].cached == 12


def test_cached_prefix_with_expected_readers_is_evicted_last() -> None:
    server = ServerDouble(limits(num_blocks=6))
    for prompt, num_expected in ((A[:8], 8), (b"B" * 8, 0)):
        context = server.fill(prompt)
        server.run()
        server.free(context, keep=8, expected=num_expected)
    server.fill(b"C" * 16)
    server.run()
    expected, other = server.fill(A[:8]), server.fill(b"B" * 8)
    server.run()
    assert server.known[expected].filled[0].cached == 8
    assert server.known[other].filled[0].cached == 0


def test_freed_parent_is_released_after_its_step() -> None:
    server = ServerDouble()
    parent = server.fill(A[:16])
    child = server.fill(b"X", parent, 16)
    server.free(parent, keep=16)
    server.step()
    assert server.runner.steps == [[(parent, 0, 16), (child, 16, 1)]]
    assert server.engine.status().num_held == 5
    server.free(child)
    assert server.engine.status().num_cached == 4


def test_fork_ignores_later_changes_of_its_parent() -> None:
    server = ServerDouble(
        limits(block_size=8, step_tokens=1, max_sequences=1), answer=lambda _: "ab!!"
    )
    parent = server.fill(A[:3])
    server.generate(parent, stop=("!!",))
    while len(server.known[parent].ids) < 6:
        server.step()
    child = server.fill(b"Q", parent, 6)
    server.generate(child, max_tokens=1)
    server.step()
    assert server.known[parent].finished[0].text == "ab"
    server.extend(parent, b"zz")
    server.run()
    assert server.known[child].finished[0].text == "a"
    assert not server.failed


def test_block_completed_in_this_step_is_not_copied() -> None:
    server = ServerDouble(limits(step_tokens=6))
    server.fill(A[:8])
    server.step()
    second = server.fill(A[:8])
    server.generate(second)
    server.run()
    assert server.runner.steps[1][1] == (second, 4, 4)
    assert not server.failed


def test_copy_source_is_not_reallocated_in_the_same_step() -> None:
    server = ServerDouble(limits(num_blocks=5, context_len=20))
    soon, never = server.fill(A[:6]), server.fill(A[10:16])
    server.run()
    server.apply(protocol.Update(soon, next_use=1.0))
    first = server.fork_generate(never, 6, max_tokens=1)
    second = server.fork_generate(soon, 6, max_tokens=1)
    server.run()
    assert len(server.runner.copies) == 1
    assert server.runner.steps[1] == [(first, 5, 1), (second, 5, 1)]
    assert not server.failed


def test_last_token_of_a_shared_block_reruns_in_a_copy() -> None:
    server = ServerDouble()
    parent = server.fill(A[:16])
    server.run()
    child = server.fork_generate(parent, 16, max_tokens=3)
    server.run()
    assert server.runner.steps[1] == [(child, 15, 1)]
    assert len(server.runner.copies) == 1
    assert server.engine.status().num_held == 4 + 1


def test_idle_context_generates_without_a_copy() -> None:
    server = ServerDouble()
    context = server.fill(A[:16])
    server.run()
    server.generate(context, max_tokens=3)
    server.run()
    assert server.runner.steps[1] == [(context, 15, 1)]
    assert server.runner.copies == []


def test_free_caches_the_prefix_for_its_salt() -> None:
    server = ServerDouble()
    context = server.fill(A[:16], salt="one")
    server.run()
    server.free(context, keep=11)
    assert server.engine.status().num_cached == 2
    mine, theirs = server.fill(A[:16], salt="one"), server.fill(A[:16], salt="two")
    server.run()
    assert server.known[mine].filled[0] == protocol.Filled(mine, 8, 0, 8)
    assert server.known[theirs].filled[0] == protocol.Filled(theirs, 16, 0, 0)


def test_abort_during_prefill_frees_at_once() -> None:
    server = ServerDouble(limits(step_tokens=8))
    context = server.fill(A)
    server.generate(context)
    server.step()
    server.abort(context)
    assert server.engine.status().num_free == server.limits.num_blocks
    step = server.step()
    assert step is not None
    assert step.reports == [protocol.Aborted(context)]
    assert server.engine.is_idle


@pytest.mark.parametrize("num_steps", [1, 2, 5, 9])
def test_abort_reports_the_tokens_of_its_output(num_steps: int) -> None:
    server = ServerDouble()
    context = server.fill(A)
    server.generate(context, max_tokens=50, ignore_eos=True)
    for _ in range(num_steps):
        server.step()
    server.abort(context)
    num_decoded = server.engine.status().num_decoded_tokens
    step = server.step()
    assert step is not None
    assert step.reports == [protocol.Aborted(context, num_decoded)]
    assert num_decoded >= num_steps - 1


def test_preempted_context_gives_the_same_text() -> None:
    server = ServerDouble(limits(num_blocks=8, max_sequences=4))
    worse = [server.fill([*A[:9], i]) for i in range(2)]
    for context in worse:
        server.generate(context, rank=1.0, ignore_eos=True, max_tokens=12)
    for _ in range(3):
        server.step()
    better = server.fill(A[10:22], rank=0.0)
    server.generate(better, ignore_eos=True, max_tokens=12)
    server.run()
    assert server.engine.status().num_recomputed_tokens > 0
    finished = [len(server.known[context].finished) for context in (better, *worse)]
    assert finished == [1, 1, 1]


def test_preempted_prompt_loses_only_the_blocks_that_are_needed() -> None:
    server = ServerDouble(limits(num_blocks=16))
    better = server.fill([*A, *A][:24])
    server.generate(better, ignore_eos=True, max_tokens=32)
    worse = server.fill([*reversed(A), *A][:44], rank=1.0)
    server.generate(worse, rank=1.0, ignore_eos=True, max_tokens=1)
    server.run()
    assert len(server.known[worse].finished) == 1
    # The better context grew by 8 blocks of 4 tokens. Before, 10 of 16 blocks were free.
    assert 0 < server.engine.status().num_recomputed_tokens <= 8 * 4


def test_lower_priority_does_not_preempt_higher() -> None:
    server = ServerDouble(limits(num_blocks=8))
    better = server.fill(A[:16])
    server.generate(better, ignore_eos=True, max_tokens=15)
    server.step()
    worse = server.fill(A[4:24], rank=1.0)
    server.generate(worse, rank=1.0, ignore_eos=True, max_tokens=4)
    while not server.known[better].finished:
        server.step()
    rows = [[context for context, _, _ in step] for step in server.runner.steps]
    assert all(step[0] == better for step in rows)
    assert len(rows) == 15
    server.free(better)
    server.run()
    assert len(server.known[worse].finished) == 1


def test_idle_contexts_are_evicted_by_next_use() -> None:
    server = ServerDouble(limits(num_blocks=6))
    soon, later = server.fill(A[:8]), server.fill(A[8:16])
    server.run()
    server.apply(protocol.Update(soon, next_use=1.0))
    server.apply(protocol.Update(later, next_use=2.0))
    server.fill(A[16:26])
    server.run()
    server.generate(soon, max_tokens=1)
    server.run()
    assert server.engine.status().num_recomputed_tokens == 1
    server.generate(later, max_tokens=1)
    server.run()
    # Two blocks were missing, one after the other: `later` lost its last blocks, not all of them.
    assert server.engine.status().num_recomputed_tokens == 1 + 4


def test_recomputed_kv_returns_to_the_origin() -> None:
    server = ServerDouble(limits(num_blocks=4))
    kept = server.fill(A[:8])
    server.run()
    other = server.fill(A[8:24])
    server.run()
    server.free(other)
    for num_computed in (8, 1):  # the model always computes the last token
        before = server.engine.status()
        fork = server.fork_generate(kept, 8, max_tokens=1)
        server.run()
        server.free(fork)
        after = server.engine.status()
        assert after.num_computed_tokens - before.num_computed_tokens == num_computed
    assert server.engine.status().num_held == 2


def test_recomputed_kv_returns_to_the_nearest_ancestor() -> None:
    server = ServerDouble(limits(num_blocks=5))
    kept = server.fill(A[:8])
    between = server.fill(A[8:12], kept, 8)
    server.run()
    other = server.fill(A[12:32])
    server.run()
    server.free(other)
    fork = server.fork_generate(between, 12, max_tokens=1)
    server.free(between)
    server.run()
    server.free(fork)
    assert server.engine.status().num_held == 2
    before = server.engine.status()
    server.fork_generate(kept, 8, max_tokens=1)
    server.run()
    after = server.engine.status()
    assert after.num_computed_tokens - before.num_computed_tokens == 1


def test_lower_rank_is_served_first() -> None:
    server = ServerDouble(limits(step_tokens=8))
    late, early = server.fill(A[:8], rank=2.0), server.fill(A[8:16], rank=1.0)
    server.step()
    assert server.runner.steps == [[(early, 0, 8)]]
    server.apply(protocol.Update(late, rank=0.5))
    server.fill(A[16:24], rank=1.0)
    server.step()
    assert server.runner.steps[1] == [(late, 0, 8)]


def test_status_and_pong_need_no_step() -> None:
    server = ServerDouble()
    server.apply(protocol.Ping(5))
    server.apply(protocol.Status(6))
    step = server.step()
    assert step is not None
    assert step.number == 0
    assert step.reports[0] == protocol.Pong(5)
    assert isinstance(step.reports[1], protocol.StatusReport)
    assert step.reports[1].num_free == server.limits.num_blocks
    assert server.step() is None


def test_step_without_rows_is_not_counted() -> None:
    server = ServerDouble()
    server.fill(A[:8])
    server.run()
    twin = server.fill(A[:8])
    server.run()
    assert server.known[twin].filled == [protocol.Filled(twin, 0, 8, 0)]
    assert server.engine.status().num_steps == len(server.runner.steps) == 1


def test_steps_report_all_computed_tokens_and_the_last_one_is_idle() -> None:
    server = ServerDouble()
    context = server.fill(A[:10])
    server.generate(context, max_tokens=4, ignore_eos=True)
    steps = []
    while (step := server.step()) is not None:
        steps.append(step)
    # The last token of the output is sampled, but not computed.
    assert steps[-1].num_tokens == 10 + 3
    assert [step.is_idle for step in steps] == [False] * (len(steps) - 1) + [True]
    server.extend(context, b"xy")
    server.run()
    server.apply(protocol.Ping(5))
    step = server.step()
    assert step is not None
    assert (step.num_tokens, step.is_idle) == (10 + 4 + 2, True)


def test_hello_identifies_the_engine() -> None:
    hello = EngineCore(FakeRunner(), 7).hello()
    assert (hello.protocol, hello.epoch, hello.model) == (protocol.PROTOCOL_VERSION, 7, "fake")
    assert len(hello.tokenizer_hash) == 64
    assert (hello.eos_ids, hello.num_ids) == ([258, 256], VOCAB_SIZE)


def test_commands_on_unknown_contexts_are_ignored() -> None:
    engine = EngineCore(FakeRunner(), 1)
    engine.apply(protocol.Free(1, 10))
    engine.apply(protocol.Update(3, 1.0))
    assert engine.step() is None
    engine.apply(protocol.Abort(2))
    step = engine.step()
    assert step is not None
    assert step.reports == [protocol.Aborted(2)]
