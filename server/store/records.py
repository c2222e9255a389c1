"""Records and errors of the journal.

Bytes are JSON written and read by other components. The journal never decodes them.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from ..program.errors import ConureError


class JournalError(ConureError):
    """The journal rejects a batch, or cannot be used at all; a retry does not help.

    `store.invariant`: the batch contradicts written records (a second value of a variable, an
    unknown program), and none of it was written. `store.locked`, `store.unusable`: the data folder
    cannot be opened. `store.damaged`: a record cannot be read or does not match its checksum, or a
    start found damage. `store.broken`, `store.closed`: the journal no longer writes.
    """

    status = 500


class DuplicateKeyError(JournalError):
    """Another program of the tenant has this idempotency key. The batch was not written."""

    status = 409

    def __init__(self, program: str, body_hash: bytes) -> None:
        super().__init__(
            "store.duplicate_key", f"the idempotency key is already used by program {program}"
        )
        self.program = program
        self.body_hash = body_hash


class ProgramRecord(Struct, frozen=True, kw_only=True):
    """An accepted program."""

    id: str
    tenant: str
    idempotency_key: str | None
    """Unique within the tenant as long as the program is stored."""
    body_hash: bytes
    body: bytes
    """The submission as JSON."""
    created_at: float
    """Unix time in seconds, like every time in the journal."""
    name: str = ""
    """The name that the program gives itself."""


class ProcedureRecord(Struct, frozen=True, kw_only=True):
    """One version of a stored procedure. Storing it again has no effect."""

    tenant: str
    name: str
    version: str
    created_at: float
    program: bytes
    """The program as JSON."""


class AliasRecord(Struct, frozen=True, kw_only=True):
    """The version that an alias of a procedure names from now on."""

    tenant: str
    name: str
    alias: str
    version: str


class ProcedureRemoval(Struct, frozen=True, kw_only=True):
    """Removes one version of a procedure and its pin. Its aliases must be gone; an unknown version
    is ignored.
    """

    tenant: str
    name: str
    version: str


class AliasRemoval(Struct, frozen=True, kw_only=True):
    """Removes an alias of a procedure, not the version that it names."""

    tenant: str
    name: str
    alias: str


class PinRecord(Struct, frozen=True, kw_only=True):
    """Until when the prefixes of a procedure's version are pinned; replaces an earlier record."""

    tenant: str
    name: str
    version: str
    expires_at: float
    """Unix time; 0: the pin was removed."""


class ProcedureListing(Struct, frozen=True, kw_only=True):
    """Versions and aliases of procedures, without their programs."""

    versions: list[tuple[str, str, float]]
    """Name, version and time, oldest first."""
    aliases: list[tuple[str, str, str]]
    """Name, alias and version."""


class AppendRecord(Struct, frozen=True, kw_only=True):
    """Nodes appended to an open program. Records of one program keep their order."""

    program: str
    body: bytes


class ValueRecord(Struct, frozen=True, kw_only=True):
    """The committed value of a variable."""

    program: str
    variable: str
    value: bytes
    """JSON of any size."""
    text: str | None
    """The model's text, for values that a model wrote."""
    token_ids: list[int] | None
    tokenizer_hash: str | None
    epoch: int
    """Epoch of the engine that produced the value."""
    attempt: int


TRACE = "call.traced"
"""Type of the records of a trace. They are stored like events, and no event stream has them."""


class EventRecord(Struct, frozen=True, kw_only=True):
    """An event of a program; `seq` is from `Journal.next_seq`."""

    program: str
    seq: int
    type: str
    data: bytes
    at: float


class EndRecord(Struct, frozen=True, kw_only=True):
    """The end of a program. A program ends once."""

    program: str
    status: str
    finished_at: float
    receipt: bytes
    error: bytes | None
    nodes: bytes
    """Status of every node as JSON."""


class WatchRecord(Struct, frozen=True, kw_only=True):
    """A program that was running when a server died; replaces an earlier record of the program."""

    program: str
    num_deaths: int
    """Servers that died during a turn of the program, since its last new value."""
    num_values: int
    """Values that the program had at the last of them."""
    problem: str | None = None
    """Code of the error with which the next start ends the program; None to resume it."""


class DeleteRecord(Struct, frozen=True, kw_only=True):
    """The removal of programs with all of their records. Their cost stays in the usage sums."""

    programs: tuple[str, ...]
    """Ids. Unknown ones are ignored."""
    is_secure: bool = False
    """Overwrite the content on disk, and do not only mark its space as free."""


Record: TypeAlias = (
    ProgramRecord
    | AppendRecord
    | ValueRecord
    | EventRecord
    | EndRecord
    | ProcedureRecord
    | AliasRecord
    | ProcedureRemoval
    | AliasRemoval
    | PinRecord
    | WatchRecord
    | DeleteRecord
)


class UsageRecord(Struct, frozen=True):
    """One figure of a tenant's receipts, summed over the programs of one status."""

    status: str
    name: str
    """Path of the figure in a receipt, for example `prompt_tokens.logical`; or `programs`, the
    number of programs."""
    amount: float
    """Counts are ints."""


class StoredProgram(Struct, frozen=True, kw_only=True):
    """All records of one program."""

    id: str
    tenant: str
    idempotency_key: str | None
    body_hash: bytes
    body: bytes
    created_at: float
    appends: list[bytes]
    """In the order of appending."""
    values: list[ValueRecord]
    events: list[EventRecord]
    """Ordered by `seq`, without traces, and with `variable.committed` only for truncated texts (see
    `values`). Filled by `Journal.unfinished` only."""
    end: EndRecord | None
    """None while the program has not ended."""
    watch: WatchRecord | None = None
    """Set if the program was running when a server died. Filled by `Journal.unfinished` only."""


class ProgramListing(Struct, frozen=True, kw_only=True):
    """One line of a list of programs."""

    number: int
    """Position in the journal; newer programs have higher numbers."""
    id: str
    name: str
    created_at: float
    status: str | None
    """None if the program has not ended."""
    finished_at: float | None
    num_calls: int | None


class JournalStatus(Struct, frozen=True, kw_only=True):
    """State and counters of the journal."""

    healthy: bool
    num_pending: int
    """Batches that are not durable yet."""
    num_commits: int
    num_records: int
    """Records committed since the start of the process."""
    last_seq: int
    last_error: str | None
    """The last write error; None if no write has failed."""
