"""What the journal keeps, as records; and what it answers when it cannot.

Bytes are JSON that somebody else wrote and will read. The journal never looks inside them.
"""

from __future__ import annotations

from typing import ClassVar, TypeAlias

from msgspec import Struct

from ..program.errors import ConureError


class JournalError(ConureError):
    """The journal refuses a batch, or cannot be used at all; asking again does not help.

    `store.invariant`: the batch contradicts what is written (a second value of a variable, an
    unknown program); nothing of it was kept. `store.locked`, `store.unusable`: the data folder
    cannot be opened. `store.broken`, `store.closed`: nothing is written any more.
    """

    status: ClassVar[int] = 500


class DuplicateKeyError(JournalError):
    """Another program of the tenant has this idempotency key; nothing of the batch was kept."""

    status: ClassVar[int] = 409

    def __init__(self, program: str, body_hash: bytes) -> None:
        super().__init__(
            "store.duplicate_key", f"the idempotency key belongs to program {program} already"
        )
        self.program = program
        self.body_hash = body_hash


class ProgramRecord(Struct, frozen=True, kw_only=True):
    """A program that was accepted."""

    id: str
    tenant: str
    idempotency_key: str | None
    """Unique within the tenant, for as long as the program is kept."""
    body_hash: bytes
    body: bytes
    """The submission, JSON."""
    created_at: float
    """Unix time in seconds, as every time here."""


class AppendRecord(Struct, frozen=True, kw_only=True):
    """Nodes appended to a session; records of one program keep their order."""

    program: str
    body: bytes


class ValueRecord(Struct, frozen=True, kw_only=True):
    """The one committed value of a variable."""

    program: str
    variable: str
    value: bytes
    """JSON; of any size, it stays in its row."""
    text: str | None
    """What the model wrote, where it was a model."""
    token_ids: list[int] | None
    tokenizer_hash: str | None
    epoch: int
    """Life of the engine that made it."""
    attempt: int


class EventRecord(Struct, frozen=True, kw_only=True):
    """Something that happened to a program; `seq` comes from `Journal.next_seq`."""

    program: str
    seq: int
    type: str
    data: bytes
    at: float


class EndRecord(Struct, frozen=True, kw_only=True):
    """The end of a program; a program ends once."""

    program: str
    status: str
    finished_at: float
    receipt: bytes
    error: bytes | None
    nodes: bytes
    """Status of every node, JSON."""


Record: TypeAlias = ProgramRecord | AppendRecord | ValueRecord | EventRecord | EndRecord


class UsageRecord(Struct, frozen=True):
    """One number of the receipts of a tenant's programs, summed over those of one status."""

    status: str
    name: str
    """The number's path in a receipt, as in `prompt_tokens.logical`; or `programs`, how many."""
    amount: float
    """A count is an int."""


class StoredProgram(Struct, frozen=True, kw_only=True):
    """Everything that is written about one program."""

    id: str
    tenant: str
    idempotency_key: str | None
    body_hash: bytes
    body: bytes
    created_at: float
    appends: list[bytes]
    """In the order in which they were appended."""
    values: list[ValueRecord]
    events: list[EventRecord]
    """By `seq`, without `variable.committed` (that is `values`). Only `Journal.unfinished`
    fills it in."""
    end: EndRecord | None
    """None while it has not ended."""


class JournalStatus(Struct, frozen=True, kw_only=True):
    """How the journal does."""

    healthy: bool
    num_pending: int
    """Batches that are not on disk yet."""
    num_commits: int
    num_records: int
    """Records committed since the start."""
    last_seq: int
    last_error: str | None
    """What the disk last said, None if it never refused anything."""
