"""`procedure`: a call of a stored procedure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, NoReturn

from msgspec import UNSET, Meta, Struct, UnsetType

from ...checks import check_name, check_references, refuse_control
from ...content import Expression, Name
from ...errors import ProgramError
from ...expressions.renaming import Renaming
from ...slot import Slot, SlotInputs, read_by
from ..base import NodeBody
from .base import Body, BodyReference, NodeWithBodies

REFERENCE_PATTERN = r"^[A-Za-z_][\w.-]{0,127}(@[0-9a-f]{32}|:[A-Za-z_][\w.-]{0,63})?$(?!\n)"
"""A name, with a version (`@`) or an alias (`:`); a bare name means the alias `default`."""
ProcedureReference = Annotated[str, Meta(pattern=REFERENCE_PATTERN)]


class BoundArgument(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The argument of one parameter in an expanded call."""

    parameter: Name
    variable: Name
    """The parameter's variable in the body."""
    value: Expression


class ProcedureNode(NodeWithBodies, frozen=True, kw_only=True, tag="procedure"):
    """Runs a stored procedure as part of the program.

    The server expands the call before it builds the graph (`program.procedures`): the nodes of the
    procedure, renamed, become the body. The calls of a procedure are therefore scheduled, grouped
    and shared like calls that the program contains itself.
    """

    procedure: ProcedureReference
    """`name@version`, `name:alias` or `name`. Expanded: always `name@version`."""
    args: dict[Name, Expression] = {}
    """A parameter to an expression. Expanded: empty."""
    output: Name | UnsetType = UNSET
    """The variable that gets the only result, or an object of all results. Expanded: unset."""
    outputs: dict[Name, Name] = {}
    """A variable to the result that it gets. Expanded: empty."""
    bound: list[BoundArgument] = []
    """Only in an expanded call: the value of every parameter."""
    body: Body = []
    """Only in an expanded call: the nodes of the procedure."""
    returns: dict[Name, Expression] = {}
    """Only in an expanded call: a variable to its value in the body."""

    @property
    def is_expanded(self) -> bool:
        """Whether the server has inserted the body. A body without nodes returns parameters."""
        return bool(self.body or self.bound)

    @property
    def decision_variable(self) -> str:
        """The variable that stores that the body was entered."""
        return f"{self.id}.entered"

    @property
    def defined_in_body(self) -> frozenset[str]:
        """The variables of the parameters."""
        return frozenset(argument.variable for argument in self.bound)

    def bodies(self) -> tuple[NodeBody, ...]:
        return (NodeBody("body", "body", self.body),)

    def _make_slots(self, inputs: SlotInputs) -> tuple[Slot, ...]:
        if not self.is_expanded:
            self._refuse_unexpanded()
        parameters = [self.decision_variable]
        for argument in self.bound:
            check_name(argument.variable, f"args.{argument.parameter}")
            inputs.add_expression(argument.value, f"args.{argument.parameter}")
            parameters.append(argument.variable)
        inner = check_references("outputs", {name: (each,) for name, each in self.returns.items()})
        return self._body_slots(inputs, parameters, self.returns, inner)

    def _refuse_unexpanded(self) -> NoReturn:
        raise ProgramError(
            "procedure.unexpanded",
            f"node `{self.id}` calls procedure `{self.procedure}`, whose nodes are known to the "
            "server only: send the program to a server",
            path="procedure",
        )

    def check_call(self) -> None:
        """Check the fields of a call that was sent to the server.

        Raises:
            ProgramError: `program.control`, `program.expression`, `program.name`.
        """
        if self.bound or self.body or self.returns:
            refuse_control("`bound`, `body` and `returns` are set by the server only", "body")
        if self.output is not UNSET and self.outputs:
            refuse_control("a procedure call has both `output` and `outputs`", "outputs")

    def written_variables(self) -> Iterable[str]:
        return self.returns

    def defined_variables(self) -> Iterable[str]:
        return (*self.returns, *self.defined_in_body)

    def definitions(self) -> Iterator[tuple[str, Expression]]:
        yield from ((argument.variable, argument.value) for argument in self.bound)
        yield from self.returns.items()

    def body_references(self) -> Iterator[BodyReference]:
        for name, inner in self.returns.items():
            yield BodyReference("body", f"outputs.{name}", read_by(inner))

    def write_path(self, variable: str) -> str:
        return f"outputs.{variable}" if variable in self.returns else "args"

    def _expressions(self) -> Iterable[tuple[str, Expression]]:
        return ((f"args.{each.parameter}", each.value) for each in self.bound)

    def _renamed_fields(self, renaming: Renaming) -> dict[str, object]:
        bound = [
            BoundArgument(
                argument.parameter,
                renaming.name(argument.variable),
                renaming.expression(argument.value),
            )
            for argument in self.bound
        ]
        returns = {
            renaming.name(name): renaming.expression(inner) for name, inner in self.returns.items()
        }
        return {"bound": bound, "returns": returns, "body": []}
