"""Merging of the reports of several steps.

If the event loop is late, the frames of many steps arrive at once. Outputs grow by a token per
step, and the work per text delta, up to the readers of event streams, is done once for all.

Invariants: the reports of a context keep their order; its texts and ids add up to the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from conure.engine import protocol


def join_tokens(steps: Sequence[Sequence[protocol.Report]]) -> Sequence[protocol.Report]:
    """Return the reports of steps in order, with consecutive Tokens of a context merged."""
    if len(steps) == 1:
        return steps[0]
    joined: list[protocol.Report] = []
    last_tokens: dict[int, int] = {}
    """Index in `joined` of each context's last report, if that is Tokens."""
    for report in [report for reports in steps for report in reports]:
        if isinstance(report, protocol.Tokens):
            index = last_tokens.setdefault(report.context, len(joined))
            if index < len(joined):
                previous = joined[index]
                assert isinstance(previous, protocol.Tokens)
                joined[index] = protocol.Tokens(
                    report.context,
                    previous.ids + report.ids,
                    previous.text + report.text,
                    previous.logprobs + report.logprobs,
                )
                continue
        elif isinstance(report, protocol.Filled | protocol.Finished | protocol.Failed):
            last_tokens.pop(report.context, None)
        joined.append(report)
    return joined
