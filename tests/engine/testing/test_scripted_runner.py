"""The scripted runner: its texts, its time, and what its memory refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conure.engine.protocol import EngineError, EngineLimits, SamplingParams
from conure.engine.runner.base import ScheduledSequence
from conure.engine.testing.scripted_runner import (
    WORDS,
    FakeRunner,
    VirtualClock,
    default_text,
    load_script,
)

from ..server_double import LIMITS, ServerDouble


def row(ids: list[int], start: int, blocks: list[int], *, context: int = 1) -> ScheduledSequence:
    return ScheduledSequence(context, ids, start, len(ids) - start, blocks)


def test_default_text_matches_documentation() -> None:
    assert default_text([]) == "grove amber"
    assert default_text(list(b"hello")) == "river acorn kelp ocean maple"
    assert default_text([70_000, 1]) == "amber larch river"
    assert default_text(list(b"hello")) == default_text(tuple(b"hello"))
    assert len(set(WORDS)) == 32


def test_another_id_gives_another_text() -> None:
    texts = {default_text([1, 2, 3, i]) for i in range(200)}
    assert len(texts) > 190


def test_callable_answers_or_falls_back() -> None:
    server = ServerDouble(answer=lambda prompt: prompt.upper() if prompt == "ab" else None)
    assert server.generate_text(b"ab") == "AB"
    assert server.generate_text(b"cd") == default_text(list(b"cd"))


def test_callable_receives_special_tokens() -> None:
    seen: list[str] = []
    server = ServerDouble(answer=lambda prompt: seen.append(prompt))
    server.generate_text([257, *b"user", 258])
    assert seen == ["<|im_start|>user<|im_end|>"]


def test_first_matching_script_entry_answers(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text(
        json.dumps(
            [
                {"match": "sum.*two", "text": "three"},
                {"match": "^sum", "text": "some"},
                {"text": "what?"},
            ]
        )
    )
    answer = load_script(path)
    assert [answer("sum\ntwo"), answer("sum it"), answer("a sum")] == ["three", "some", "what?"]


@pytest.mark.parametrize(
    "text", ["[{}]", "{}", "nonsense", '[{"match": "(", "text": ""}]', '[{"text": "", "x": 1}]']
)
def test_malformed_script_is_rejected_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "script.json"
    path.write_text(text)
    with pytest.raises(EngineError, match=r"script\.json"):
        load_script(path)
    with pytest.raises(EngineError, match=r"missing\.json"):
        load_script(tmp_path / "missing.json")


def test_ignore_eos_repeats_the_text() -> None:
    server = ServerDouble(answer=lambda _: "ab")
    assert server.generate_text(b"x", ignore_eos=True, max_tokens=7) == "ab ab a"
    assert ServerDouble(answer=lambda _: "").generate_text(b"x", min_tokens=2) == "  "


def test_min_tokens_masks_stop_tokens() -> None:
    server = ServerDouble(answer=lambda _: "a b c")
    text = server.generate_text(b"x", min_tokens=3, stop_token_ids=(32, 33))
    assert text == 'a"b'


def test_steps_take_the_configured_time() -> None:
    clock = VirtualClock()
    runner = FakeRunner(
        time_per_call=100.0,
        time_per_prompt_token=1.0,
        time_per_output_token=10.0,
        sleep=clock.sleep,
    )
    first, second = [0] * 7, [0] * 3
    rows = [row(first, 0, [0]), row(second, 0, [1], context=2)]
    rows[0].sampling, rows[0].num_prompt = SamplingParams(5), 7
    runner.run(rows, [])
    assert clock.now == 110.0 + 10
    first.append(runner.run([ScheduledSequence(1, first, 6, 1, [0], SamplingParams(5), 7)], [])[0])
    before = clock.now
    runner.run([ScheduledSequence(1, first, 7, 1, [0], SamplingParams(5), 7)], [])
    assert clock.now - before == 10.0


def make(num_blocks: int = 8) -> FakeRunner:
    return FakeRunner(limits=EngineLimits(64, 4, num_blocks, 64, 8))


def test_reading_an_unwritten_block_fails() -> None:
    with pytest.raises(AssertionError, match="context 1 attends to block 3"):
        make().run([row([1, 2, 3, 4, 5], 4, [3, 4])], [])


def test_reading_a_block_of_another_prefix_fails() -> None:
    runner = make()
    runner.run([row([1, 1, 1, 1, 5, 5, 5, 5], 0, [0, 1])], [])
    runner.run([row([2, 2, 2, 2], 0, [2], context=2)], [])
    with pytest.raises(AssertionError, match="attends to block 1 at index 1"):
        runner.run([row([2, 2, 2, 2, 5, 5, 5, 5, 6], 8, [2, 1, 3], context=2)], [])
    with pytest.raises(AssertionError, match="attends to block 1 at index 1"):
        runner.run([row([2, 2, 2, 2, 5, 5, 6], 6, [2, 1], context=3)], [])


def test_reading_an_overwritten_block_fails() -> None:
    runner = make()
    ids = [1, 2, 3, 4, 5]
    runner.run([row(ids, 0, [0, 1])], [])
    runner.run([row([9, 9, 9], 0, [0], context=2)], [])
    ids.append(6)
    with pytest.raises(AssertionError, match="context 1 attends to block 0"):
        runner.run([row(ids, 5, [0, 1])], [])


def test_row_reads_tokens_of_earlier_row() -> None:
    runner = make()
    first, second = row([1, 2, 3, 4], 0, [0]), row([1, 2, 3, 4, 5], 4, [0, 1], context=2)
    runner.run([first, second], [])
    with pytest.raises(AssertionError):
        make().run([second, first], [])


def test_copies_must_not_depend_on_order() -> None:
    runner = make()
    runner.run([row([1, 2, 3], 0, [0])], [])
    runner.run([row([1, 2, 3, 4], 3, [5], context=2)], [(0, 5)])
    with pytest.raises(AssertionError, match="source and destination"):
        runner.run([], [(0, 1), (1, 2)])
    with pytest.raises(AssertionError, match="destination of two"):
        runner.run([], [(0, 1), (5, 1)])


def test_wrong_number_of_blocks_fails() -> None:
    with pytest.raises(AssertionError, match="has 1 blocks for 5 tokens"):
        make().run([row([1, 2, 3, 4, 5], 0, [0])], [])


def test_memory_checks_can_be_disabled() -> None:
    runner = FakeRunner(limits=LIMITS, is_checked=False)
    assert (
        runner.run([ScheduledSequence(1, [1, 2, 3, 4, 5], 4, 1, [3, 4], SamplingParams(1), 5)], [])
        != []
    )
