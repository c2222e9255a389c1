"""The engine core over a fake runner that checks what every block holds."""

from __future__ import annotations

import pytest

from conure.engine import api
from conure.engine.engine import Engine
from conure.engine.fake import FakeRunner, default_text

from .server_double import LIMITS, ServerDouble

A = b"abcdefghijklmnopqrstuvwxyz"


def limits(**changes: int) -> api.Limits:
    fields = {name: getattr(LIMITS, name) for name in api.Limits.__struct_fields__}
    return api.Limits(**{**fields, **changes})


def test_a_call_is_filled_then_generates_until_eos() -> None:
    server = ServerDouble()
    context = server.fill(A[:10])
    server.generate(context)
    server.run()
    known = server.known[context]
    text = default_text(list(A[:10]))
    assert known.filled == [api.Filled(context, computed=10, shared=0, cached=0)]
    assert known.finished == [
        api.Finished(context, "stop", text, len(text), "", len(text) + 1, None)
    ]
    assert known.ids == list(A[:10]) + list(text.encode())


def test_eos_is_in_neither_text_nor_context_and_the_next_fill_goes_on_behind_the_text() -> None:
    server = ServerDouble()
    context = server.fill(A[:5])
    server.generate(context)
    server.run()
    server.extend(context, b" and")
    server.generate(context, max_tokens=4)
    server.run()
    first, second = server.known[context].finished
    assert second.text == default_text([*A[:5], *first.text.encode(), *b" and"])[:4]
    assert server.known[context].filled[1] == api.Filled(context, 4, 0, 0)


def test_counts_of_many_segments_add_up_to_the_prompt_tokens_alone() -> None:
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
def test_a_stop_string_across_tokens_ends_the_text_before_it(
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


def test_text_that_might_begin_a_stop_string_comes_once_it_does_not() -> None:
    server = ServerDouble(answer=lambda _: "a<b<END")
    context = server.fill(A[:3])
    server.generate(context, stop=("<END>",))
    texts: list[str] = []
    while (step := server.step()) is not None:
        texts += [r.text for r in step.reports if isinstance(r, api.Tokens)]
    assert texts == ["a", "", "<b", "", "", "", "", "<END"]


def test_a_character_of_several_tokens_comes_whole() -> None:
    server = ServerDouble(answer=lambda _: "é🦜")
    context = server.fill(A[:3])
    server.generate(context)
    texts: list[str] = []
    while (step := server.step()) is not None:
        texts += [r.text for r in step.reports if isinstance(r, api.Tokens)]
    assert texts == ["", "é", "", "", "", "🦜"]


def test_half_a_character_at_the_end_is_not_lost() -> None:
    server = ServerDouble(answer=lambda _: "a🦜")
    context = server.fill(A[:3])
    server.generate(context, max_tokens=3)
    server.run()
    finished = server.known[context].finished[0]
    assert (finished.text, finished.num_kept, finished.reason) == ("a\ufffd", 3, "length")


def test_a_stop_token_ends_and_is_named() -> None:
    server = ServerDouble(answer=lambda _: "abc")
    context = server.fill(A[:3])
    server.generate(context, stop_token_ids=(ord("c"),))
    server.run()
    finished = server.known[context].finished[0]
    assert (finished.text, finished.reason, finished.stop) == ("ab", "stop", ord("c"))
    assert (finished.num_kept, finished.num_decoded) == (2, 3)


def test_min_tokens_holds_off_eos_and_stop_strings() -> None:
    server = ServerDouble(answer=lambda _: "ab")
    context = server.fill(A[:3])
    server.generate(context, min_tokens=7, stop=("b",))
    server.run()
    assert server.known[context].finished[0].text == "ab ab a"


def test_generation_ends_with_length_where_the_context_ends() -> None:
    server = ServerDouble(limits(context_len=10))
    context = server.fill(A[:7])
    server.generate(context, ignore_eos=True)
    server.run()
    assert server.known[context].finished[0].reason == "length"
    assert len(server.known[context].ids) == 10
    server.generate(context)
    server.run()
    assert server.known[context].finished[1] == api.Finished(context, "length", "", 0, "", 0)


def test_a_prompt_that_is_too_long_fails_with_both_numbers() -> None:
    server = ServerDouble(limits(context_len=10))
    server.fill(A[:11])
    server.run()
    assert server.failed[0].code == "prompt.too_long"
    assert "11 tokens" in server.failed[0].message
    assert "context of 10" in server.failed[0].message


def test_a_context_that_no_pool_can_hold_fails_instead_of_waiting() -> None:
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
        (api.Generate(9, api.Sampling(5), constraint="{}"), "engine.unsupported_constraint"),
        (api.Generate(9, api.Sampling(5)), "engine.empty_context"),
        (api.Fill(9, [1], parent=77), "engine.unknown_parent"),
        (api.Fill(9, [1], parent=1, parent_len=6), "engine.bad_parent"),
        (api.Fill(9, [1], parent=1, parent_len=-1), "engine.bad_parent"),
        (api.Fill(1, [1], parent=1, parent_len=2), "engine.bad_parent"),
    ],
)
def test_what_cannot_be_done_fails_with_its_code(command: api.Command, code: str) -> None:
    engine = Engine(FakeRunner(), 1)
    engine.apply(api.Fill(1, list(A[:5])))
    engine.apply(command)
    step = engine.step()
    assert step is not None
    assert [r.code for r in step.reports if isinstance(r, api.Failed)] == [code]
    engine.check()


def test_a_fill_into_a_generating_context_fails_it() -> None:
    server = ServerDouble()
    context = server.fill(A[:5])
    server.generate(context)
    server.step()
    server.apply(api.Fill(context, [1]))
    server.run()
    assert server.failed[0].code == "engine.busy"
    assert server.engine.status().num_free == server.limits.num_blocks


def test_commands_on_a_failed_context_fail_again_until_it_is_freed() -> None:
    server = ServerDouble(limits(context_len=10))
    context = server.fill(A[:11])
    server.apply(api.Fill(context, [1, 2]))
    server.apply(api.Generate(context, api.Sampling(5)))
    step = server.engine.step()
    assert step is not None
    assert [r.code for r in step.reports if isinstance(r, api.Failed)] == ["prompt.too_long"] * 3
    assert server.engine.status().num_contexts == 0
    server.apply(api.Free(context))
    server.apply(api.Fill(context, [1, 2]))
    assert server.engine.status().num_contexts == 1


def test_a_step_that_raises_fails_its_contexts_and_the_engine_lives_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = ServerDouble(limits(step_tokens=8))
    first, second = server.fill(A[:8]), server.fill(A[:20])
    server.generate(first)
    server.runner.fails = True
    server.step()
    server.runner.fails = False
    assert [(f.context, f.code) for f in server.failed] == [(first, "engine.step")]
    assert "told to fail" in caplog.text
    server.generate(second)
    server.run()
    assert server.known[second].finished[0].text == default_text(list(A[:20]))


def test_contexts_that_shared_with_a_failed_step_compute_for_themselves(
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


def test_simultaneous_arrivals_compute_their_prefix_once_within_one_step() -> None:
    server = ServerDouble()
    contexts = [server.fill([*A[:16], 48 + i]) for i in range(8)]
    server.step()
    assert server.engine.status().num_computed_tokens == 16 + 8
    assert [server.known[c].filled[0].shared for c in contexts] == [0] + [16] * 7


def test_equal_prompts_share_all_but_their_last_block() -> None:
    server = ServerDouble()
    for _ in range(4):
        server.generate(server.fill(A[:16]), max_tokens=2)
    server.run()
    assert server.engine.status().num_computed_tokens == 16 + 3 * 4


def test_a_fork_computes_its_own_tokens_alone() -> None:
    server = ServerDouble()
    parent = server.fill(A[:14])
    server.run()
    children = [server.fill([65 + i], parent, 14) for i in range(3)]
    for child in children:
        server.generate(child)
    server.run()
    assert server.engine.status().num_computed_tokens == 14 + 3
    # The last to write into the parent's partial block would not need one, but for the parent.
    assert len(server.runner.copies) == 3


def test_a_fork_of_what_is_still_being_filled_waits_instead_of_computing() -> None:
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


def test_a_fork_of_better_rank_computes_and_the_parent_shares() -> None:
    server = ServerDouble(limits(step_tokens=8))
    parent = server.fill(A[:16], rank=5.0)
    child = server.fill(b"", parent, 16, rank=1.0)
    server.step()
    assert server.runner.steps[0][0][0] == child
    server.run()
    assert server.engine.status().num_computed_tokens == 16
    assert server.known[parent].filled[0].shared == 16


def test_what_a_freed_parent_should_keep_is_kept_once_its_forks_have_it() -> None:
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


def test_a_freed_parent_that_is_in_the_step_goes_only_after_it() -> None:
    server = ServerDouble()
    parent = server.fill(A[:16])
    child = server.fill(b"X", parent, 16)
    server.free(parent, keep=16)
    server.step()
    assert server.runner.steps == [[(parent, 0, 16), (child, 16, 1)]]
    assert server.engine.status().num_held == 5
    server.free(child)
    assert server.engine.status().num_cached == 4


def test_a_fork_does_not_take_what_its_parent_has_become_since() -> None:
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


def test_a_block_that_this_step_fills_up_is_no_source_of_a_copy() -> None:
    server = ServerDouble(limits(step_tokens=6))
    server.fill(A[:8])
    server.step()
    second = server.fill(A[:8])
    server.generate(second)
    server.run()
    assert server.runner.steps[1][1] == (second, 4, 4)
    assert not server.failed


def test_the_source_of_a_copy_is_not_handed_out_in_the_same_step() -> None:
    server = ServerDouble(limits(num_blocks=5, context_len=20))
    soon, never = server.fill(A[:6]), server.fill(A[10:16])
    server.run()
    server.apply(api.Update(soon, next_use=1.0))
    first = server.fork_generate(never, 6, max_tokens=1)
    second = server.fork_generate(soon, 6, max_tokens=1)
    server.run()
    assert len(server.runner.copies) == 1
    assert server.runner.steps[1] == [(first, 5, 1), (second, 5, 1)]
    assert not server.failed


def test_the_last_token_is_run_again_in_a_copy_where_others_hold_its_block() -> None:
    server = ServerDouble()
    parent = server.fill(A[:16])
    server.run()
    child = server.fork_generate(parent, 16, max_tokens=3)
    server.run()
    assert server.runner.steps[1] == [(child, 15, 1)]
    assert len(server.runner.copies) == 1
    assert server.engine.status().num_held == 4 + 1


def test_generating_at_the_end_of_an_idle_context_runs_one_token_in_place() -> None:
    server = ServerDouble()
    context = server.fill(A[:16])
    server.run()
    server.generate(context, max_tokens=3)
    server.run()
    assert server.runner.steps[1] == [(context, 15, 1)]
    assert server.runner.copies == []


def test_free_keeps_what_it_is_told_and_only_for_its_salt() -> None:
    server = ServerDouble()
    context = server.fill(A[:16], salt="one")
    server.run()
    server.free(context, keep=11)
    assert server.engine.status().num_cached == 2
    mine, theirs = server.fill(A[:16], salt="one"), server.fill(A[:16], salt="two")
    server.run()
    assert server.known[mine].filled[0] == api.Filled(mine, 8, 0, 8)
    assert server.known[theirs].filled[0] == api.Filled(theirs, 16, 0, 0)


def test_an_abort_in_mid_prefill_frees_at_once_and_says_nothing() -> None:
    server = ServerDouble(limits(step_tokens=8))
    context = server.fill(A)
    server.generate(context)
    server.step()
    server.abort(context)
    assert server.engine.status().num_free == server.limits.num_blocks
    assert server.engine.is_idle
    assert server.step() is None


def test_better_ranks_preempt_and_the_preempted_give_the_same_text() -> None:
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


def test_a_worse_rank_takes_no_block_from_a_better_one() -> None:
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


def test_idle_contexts_are_evicted_by_next_use_and_filled_again() -> None:
    server = ServerDouble(limits(num_blocks=6))
    soon, later = server.fill(A[:8]), server.fill(A[8:16])
    server.run()
    server.apply(api.Update(soon, next_use=1.0))
    server.apply(api.Update(later, next_use=2.0))
    server.fill(A[16:26])
    server.run()
    server.generate(soon, max_tokens=1)
    server.run()
    assert server.engine.status().num_recomputed_tokens == 1
    server.generate(later, max_tokens=1)
    server.run()
    # Two blocks were missing, one after the other: the end of `later`, never all of it.
    assert server.engine.status().num_recomputed_tokens == 1 + 4


def test_what_a_fork_computed_again_goes_back_to_the_context_that_lost_it() -> None:
    server = ServerDouble(limits(num_blocks=4))
    kept = server.fill(A[:8])
    server.run()
    other = server.fill(A[8:24])
    server.run()
    server.free(other)
    for num_computed in (8, 1):  # the last token goes through the model in any case
        before = server.engine.status()
        fork = server.fork_generate(kept, 8, max_tokens=1)
        server.run()
        server.free(fork)
        after = server.engine.status()
        assert after.num_computed_tokens - before.num_computed_tokens == num_computed
    assert server.engine.status().num_held == 2


def test_what_a_fork_of_a_fork_computed_again_goes_back_to_the_first_that_is_left() -> None:
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


def test_the_better_rank_is_served_first() -> None:
    server = ServerDouble(limits(step_tokens=8))
    late, early = server.fill(A[:8], rank=2.0), server.fill(A[8:16], rank=1.0)
    server.step()
    assert server.runner.steps == [[(early, 0, 8)]]
    server.apply(api.Update(late, rank=0.5))
    server.fill(A[16:24], rank=1.0)
    server.step()
    assert server.runner.steps[1] == [(late, 0, 8)]


def test_status_and_pong_come_without_a_step() -> None:
    server = ServerDouble()
    server.apply(api.Ping(5))
    server.apply(api.Status(6))
    step = server.step()
    assert step is not None
    assert step.number == 0
    assert step.reports[0] == api.Pong(5)
    assert isinstance(step.reports[1], api.StatusReport)
    assert step.reports[1].num_free == server.limits.num_blocks
    assert server.step() is None


def test_hello_tells_who_it_is() -> None:
    hello = Engine(FakeRunner(), 7).hello()
    assert (hello.protocol, hello.epoch, hello.model) == (api.PROTOCOL_VERSION, 7, "fake")
    assert len(hello.tokenizer_hash) == 64
    assert hello.eos_ids == [258, 256]


def test_freeing_and_aborting_what_is_unknown_is_safe() -> None:
    engine = Engine(FakeRunner(), 1)
    engine.apply(api.Free(1, 10))
    engine.apply(api.Abort(2))
    engine.apply(api.Update(3, 1.0))
    assert engine.step() is None
