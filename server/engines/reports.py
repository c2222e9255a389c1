"""What several steps of an engine report, as one.

A loop that is late finds the frames of many steps at once. Outputs grow by a token a step, and
everything that is done for a piece of text, up to its readers, is done once for all of them.

Kept true: of every context the reports keep their order, and its texts and ids their sum.
"""

from __future__ import annotations

from collections.abc import Sequence

from conure.engine import api


def join_tokens(steps: Sequence[Sequence[api.Report]]) -> Sequence[api.Report]:
    """The reports of steps in order, with what an output grew by, one after the other, as one."""
    if len(steps) == 1:
        return steps[0]
    joined: list[api.Report] = []
    growing: dict[int, int] = {}
    """By context: where its last report stands, if that is of tokens."""
    for report in [report for reports in steps for report in reports]:
        if isinstance(report, api.Tokens):
            at = growing.setdefault(report.context, len(joined))
            if at < len(joined):
                before = joined[at]
                assert isinstance(before, api.Tokens)
                joined[at] = api.Tokens(
                    report.context,
                    before.ids + report.ids,
                    before.text + report.text,
                    before.chances + report.chances,
                )
                continue
        elif isinstance(report, api.Filled | api.Finished | api.Failed):
            growing.pop(report.context, None)
        joined.append(report)
    return joined
