"""Send one request until it gets a final reply.

Responsibility: retries, and decoding the body of a reply.
Out of scope: sockets, event streams.
Invariants: a request is repeated only if the server cannot do its work twice: reads, writes of one
value, submissions under an idempotency key, appends with a request id, and requests that were
refused before any work (429, 503) or never reached the server.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from conure.server.program.decoding.typed_json import decode_record
from conure.server.program.errors import ConureError

from .problems import (
    ServerUnreachableError,
    error_of,
    foreign_reply_message,
    problem_of,
    retry_after_s,
)
from .records import Flow, Reply, Request, Sleep
from .retry import OutageTimer, Retry

T = TypeVar("T")


def send(request: Request, retry: Retry) -> Flow[Reply]:
    """Send a request until it gets a final reply or the retries are used up."""
    num_refusals, num_busy = 0, 0
    refused_until_s: float | None = None
    outage = OutageTimer(retry)
    while True:
        try:
            reply = yield request._replace(timeout_s=retry.reply_timeout_s())
            assert reply is not None
        except ServerUnreachableError as failure:
            if failure.was_sent and not request.repeatable:
                raise
            yield Sleep(outage.next_delay_s(failure))
            continue
        outage.reset()
        if is_busy(reply, retry):
            num_busy, num_before = num_busy + 1, num_busy
        elif is_retryable(reply, retry, num_refusals) and _may_repeat(request, reply):
            num_refusals, num_before = num_refusals + 1, num_refusals
        else:
            return reply
        now_s = retry.clock()
        if refused_until_s is None:
            refused_until_s = now_s + retry.refused_timeout_s
        delay_s = retry.delay_s(num_before, retry_after_s(reply.headers))
        if now_s + delay_s > refused_until_s:
            return reply
        yield Sleep(delay_s)


def is_busy(reply: Reply, retry: Retry) -> bool:
    """Return whether the server has too much work and says when to try again."""
    asked_s = retry_after_s(reply.headers)
    return (
        reply.status == 429
        and retry.max_retries > 0
        and asked_s is not None
        and asked_s <= retry.max_retry_after_s
        and problem_of(reply).code == "queue.full"
    )


def is_retryable(reply: Reply, retry: Retry, num_refusals: int) -> bool:
    """Return whether a later request may succeed, and the policy allows one."""
    if reply.status not in (429, 502, 503, 504) or num_refusals >= retry.max_retries:
        return False
    if problem_of(reply).variable_status is not None:
        return False  # the status is the reason of a failed variable, which never changes
    asked_s = retry_after_s(reply.headers)
    return asked_s is None or asked_s <= retry.max_retry_after_s


def _may_repeat(request: Request, reply: Reply) -> bool:
    """Return whether the server did not do the work of a refused request, or may repeat it."""
    return request.repeatable or reply.status not in (502, 504)


def fetch(request: Request, retry: Retry, record: type[T]) -> Flow[T]:
    """Send a request and decode its reply as `record`.

    Raises:
        ConureError: the class that belongs to the reply's status, with the server's code.
    """
    return decode_reply((yield from send(request, retry)), record)


def decode_reply(reply: Reply, record: type[T]) -> T:
    """Decode a reply as `record`.

    Raises:
        ConureError: the error that the reply describes, or `client.answer` if the body is
            something else.
    """
    if reply.status >= 400:
        raise error_of(reply)
    try:
        return decode_record(reply.body, record)
    except msgspec.MsgspecError as problem:
        message = foreign_reply_message(
            reply, f" without a valid {record.__name__.lstrip('_')} ({problem})"
        )
        raise ConureError("client.answer", message, status=reply.status) from problem
