"""The signatures of functions that `call` nodes may name.

Out of scope: the functions themselves. The server registers them (`server.functions`).
"""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, Struct

from .ir import Seconds, Variable

FunctionName = Annotated[
    str, Meta(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$(?!\n)", max_length=128)
]

OPTIONAL_FUNCTIONS = {
    "python": "start the server with `--allow python`",
    "retrieve": "start the server with `--retrieve FOLDER`",
}
"""Functions of the package that a server has only if an option says so, and what to do."""


class FunctionSignature(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What a caller needs of a function."""

    name: str
    description: str = ""
    parameters: dict[str, Variable] = {}
    """Parameters, in the order of positional arguments. One with a `default` may be omitted."""
    accepts_any: bool = False
    """Whether arguments with other names are accepted, too."""
    result: Variable = Variable()
    timeout_s: Seconds
    """Used by a `call` node without a `timeout_s`; a node may only shorten it."""
    capability: str | None = None
    """What the operator must have allowed for the function to be registered."""

    @property
    def required(self) -> tuple[str, ...]:
        """The parameters without a default."""
        return tuple(name for name, each in self.parameters.items() if each.default is UNSET)
