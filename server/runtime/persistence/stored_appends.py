"""The form in which the journal stores an append.

Deadlines in an append count from the append, those of the graph from the start of the program. The
stored form has the time between both. Deadlines themselves are stored as the client sent them, so
that they stay within their bounds.
"""

from __future__ import annotations

import msgspec

from ...program.decoding.typed_json import decode_record
from ...program.ir import Append, Deadline


class StoredAppend(
    Append, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True
):
    """An append and its age."""

    age_s: float = 0.0
    """Seconds from the start of the program to the append, if the append has deadlines."""


def has_deadlines(append: Append) -> bool:
    """Return whether an append has a deadline."""
    return any(isinstance(objective, Deadline) for objective in append.objectives.values())


def with_deadlines_after(append: Append, age_s: float) -> Append:
    """Return an append whose deadlines count from the start of its program."""
    later = {
        name: Deadline(objective.deadline_s + age_s)
        for name, objective in append.objectives.items()
        if isinstance(objective, Deadline)
    }
    return msgspec.structs.replace(append, objectives=append.objectives | later)


def encode_append(append: Append, age_s: float) -> bytes:
    """Return the stored form of an append."""
    fields = {name: getattr(append, name) for name in append.__struct_fields__}
    return msgspec.json.encode(StoredAppend(**fields, age_s=age_s))


def decode_append(body: bytes) -> Append:
    """Return a stored append. Its deadlines count from the start of the program.

    Raises:
        DecodeError, ProgramError: if another version of the server wrote it.
    """
    stored = decode_record(body, StoredAppend)
    return with_deadlines_after(stored, stored.age_s) if stored.age_s else stored
