"""Merged reports of several steps: none is lost, and those of one context keep their order."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from conure.engine import protocol
from conure.server.engines.reports import join_tokens

contexts = st.integers(1, 3)
tokens = st.builds(
    lambda context, ids: protocol.Tokens(
        context, ids, "".join(map(chr, ids)), [protocol.TokenLogprob(-float(each)) for each in ids]
    ),
    contexts,
    st.lists(st.integers(97, 122), min_size=1, max_size=2),
)
reports = st.one_of(
    tokens,
    tokens,
    st.builds(lambda context: protocol.Filled(context, 1, 0, 0, 0), contexts),
    st.builds(lambda context: protocol.Failed(context, "engine.step", "no"), contexts),
    st.just(protocol.Pong(1)),
)


def reports_of(reports: Sequence[protocol.Report], context: int) -> list[object]:
    """Return the reports of one context, with texts split into characters."""
    found: list[object] = []
    for report in reports:
        if getattr(report, "context", None) != context:
            continue
        if isinstance(report, protocol.Tokens):
            found += zip(report.ids, report.text, report.logprobs, strict=True)
        else:
            found.append(report)
    return found


@given(st.lists(st.lists(reports, max_size=6), min_size=1, max_size=5))
def test_every_context_receives_the_same(steps: list[list[protocol.Report]]) -> None:
    joined = join_tokens(steps)
    flat = [report for step in steps for report in step]
    for context in (1, 2, 3):
        assert reports_of(joined, context) == reports_of(flat, context)
    assert [each for each in joined if isinstance(each, protocol.Pong)] == [
        each for each in flat if isinstance(each, protocol.Pong)
    ]


def test_new_text_of_an_output_is_one_report() -> None:
    def grown(context: int, text: str) -> protocol.Tokens:
        return protocol.Tokens(context, [ord(letter) for letter in text], text)

    filled = protocol.Filled(2, 1, 0, 0, 0)
    steps: list[list[protocol.Report]] = [
        [grown(1, "a"), grown(2, "b")],
        [grown(1, "c"), filled, grown(2, "d")],
        [grown(1, "e")],
    ]
    assert join_tokens(steps) == [grown(1, "ace"), grown(2, "b"), filled, grown(2, "d")]
    assert join_tokens(steps[:1]) is steps[0]
