"""Stored procedures: their signatures and versions, and the expansion of calls.

A call is expanded before the graph is built. The nodes, variables and jobs of the procedure get the
suffix `__` and the id of the calling node, and become the body of the node. A procedure that
calls others is stored with these calls expanded, so that a version never changes.

Out of scope: where procedures are stored, and which version an alias means.

Invariants: two programs have the same version if and only if their records are equal. An expanded
node reads only its own arguments from outside.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, NoReturn

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from .checks import MAX_NAME, listed
from .content import Expression, Json, Name
from .decoding.bounded_json import MAX_BODY_BYTES
from .errors import ProgramError, prefixed_path
from .expressions.renaming import Renaming
from .graph.instances import defined_names
from .ir import Job, KillNode, Objective, Options, ProcedureNode, Program, Variable
from .nodes import AnyNode, Node
from .nodes.base import MAX_NODES
from .nodes.bodies import count_calls, walk
from .nodes.control.base import NodeWithBodies
from .nodes.control.procedure import BoundArgument

DEFAULT_ALIAS = "default"
AliasName = Annotated[str, Meta(pattern=r"^[A-Za-z_][\w.-]{0,63}$(?!\n)")]


class ProcedureSignature(Struct, frozen=True, kw_only=True):
    """What callers of a procedure rely on."""

    parameters: dict[Name, Variable] = {}
    """The inputs of its program. One with a `default` may be omitted."""
    results: dict[Name, Variable] = {}
    """The outputs of its program."""

    @property
    def contract(self) -> ProcedureSignature:
        """The signature without descriptions, in the order of names: what callers depend on."""

        def bare(variables: dict[str, Variable]) -> dict[str, Variable]:
            return {
                name: msgspec.structs.replace(variables[name], description="")
                for name in sorted(variables)
            }

        return ProcedureSignature(parameters=bare(self.parameters), results=bare(self.results))


class Procedure(Struct, frozen=True, kw_only=True):
    """One version of a stored procedure."""

    name: str
    version: str
    """32 hexadecimal digits, derived from the program."""
    program: Program

    @property
    def reference(self) -> str:
        """`name@version`."""
        return f"{self.name}@{self.version}"

    @property
    def signature(self) -> ProcedureSignature:
        """The parameters and results."""
        return signature_of(self.program)


class PinnedPrefix(Struct, frozen=True, kw_only=True):
    """The cost of the constant prompt prefixes of a procedure that engines keep in KV."""

    expires_at: float
    """Unix time at which the pin ends."""
    tokens: int
    """Tokens of all pinned prefixes, in whole blocks; a shared block counts once."""
    blocks: int
    """KV blocks that these tokens take on each engine."""
    engines: list[str]
    """The engines that keep them now: all, unless memory is short."""
    computed_tokens: int
    """Prompt tokens that were computed for the pin, on all engines."""
    block_seconds: float
    """KV blocks multiplied by the time that they were kept, on all engines."""


class StoredProcedure(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A stored procedure, as the server describes it."""

    name: str
    version: str
    aliases: list[str] = []
    """The aliases that name this version."""
    parameters: dict[str, Variable] = {}
    results: dict[str, Variable] = {}
    calls: int = 0
    """LLM calls in the program, each body counted once."""
    pin: PinnedPrefix | UnsetType = UNSET
    """Unset: the version is not pinned."""
    program: Program | UnsetType = UNSET
    """Only in the description of one version."""


class PutProcedure(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `PUT /v1/procedures/{name}`: a graph, or a text that describes one."""

    program: Program | UnsetType = UNSET
    source: Annotated[str, Meta(max_length=1_000_000)] | UnsetType = UNSET
    language: Literal["decoder", "template"] = "decoder"
    """The language of `source`."""
    alias: AliasName | None = DEFAULT_ALIAS
    """The alias that names this version from now on; null: none."""
    pin_s: Annotated[float, Meta(gt=0)] | None = None
    """Seconds for which engines keep the constant prefixes of its prompts.

    Null: a pin stays as it is."""


class PutPin(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `PUT /v1/procedures/{reference}/pin`."""

    pin_s: Annotated[float, Meta(gt=0)]
    """Seconds from now."""


class PutAlias(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `PUT /v1/procedures/{name}/aliases/{alias}`."""

    version: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}$(?!\n)")]


class RunProcedure(
    Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True
):
    """The body of `POST /v1/procedures/{reference}/run`."""

    inputs: dict[Name, Json] = {}
    objectives: dict[Name, Objective] = {}
    options: Options = Options()


class ProcedureName(NamedTuple):
    """A parsed reference to a procedure; exactly one of `version` and `alias` is set."""

    name: str
    version: str | None
    alias: str | None


class ExpandedCalls(NamedTuple):
    """Nodes in which every procedure call is expanded, and what the program must declare."""

    nodes: list[AnyNode]
    variables: dict[str, Variable]
    jobs: dict[str, Job]


def parse_reference(reference: str) -> ProcedureName:
    """Parse a checked reference."""
    name, at, version = reference.partition("@")
    if at:
        return ProcedureName(name, version, None)
    name, _, alias = reference.partition(":")
    return ProcedureName(name, None, alias or DEFAULT_ALIAS)


def version_of(program: Program) -> str:
    """Return the version of a program: a hash of its record, whatever its JSON looked like."""
    body = msgspec.json.encode(program, order="deterministic")
    return hashlib.blake2b(body, digest_size=16).hexdigest()


def signature_of(program: Program) -> ProcedureSignature:
    """Return the parameters and results of a program, in their order in the program."""
    written = {name for _, node in walk(program.nodes, "") for name in node.defined_variables()}
    return ProcedureSignature(
        parameters={
            name: variable for name, variable in program.variables.items() if name not in written
        },
        results={name: program.variables.get(name, Variable()) for name in program.outputs},
    )


def stored_procedure(
    procedure: Procedure, aliases: list[str], pin: PinnedPrefix | None = None
) -> StoredProcedure:
    """Return the description of one version."""
    signature = procedure.signature
    return StoredProcedure(
        name=procedure.name,
        version=procedure.version,
        aliases=aliases,
        parameters=signature.parameters,
        results=signature.results,
        calls=count_calls(procedure.program.nodes),
        pin=UNSET if pin is None else pin,
        program=procedure.program,
    )


def calls_in(nodes: Iterable[Node], path: str) -> list[tuple[str, ProcedureNode]]:
    """Return the procedure calls in submitted nodes and their bodies, with their paths.

    Raises:
        ProgramError: for a call with fields that only the server may set.
    """
    calls = [(at, node) for at, node in walk(nodes, path) if isinstance(node, ProcedureNode)]
    for at, node in calls:
        with prefixed_path(at):
            node.check_call()
    return calls


def expand_calls(
    nodes: Sequence[AnyNode], procedures: Mapping[str, Procedure], path: str
) -> ExpandedCalls:
    """Expand the procedure calls in submitted nodes.

    Args:
        nodes: the nodes.
        procedures: the procedure of each reference in them.
        path: the path of the nodes in the submission.

    Raises:
        ProgramError: `procedure.argument`, `procedure.result`, with the path of the call;
            `program.too_large` (413).
    """
    expanded = ExpandedCalls([], {}, {})
    calls = calls_in(nodes, path)
    if not calls:
        return expanded._replace(nodes=list(nodes))
    _check_size(calls, procedures)
    expanded.nodes.extend(_expand_nodes(nodes, procedures, path, expanded))
    return expanded


def _check_size(
    calls: Iterable[tuple[str, ProcedureNode]], procedures: Mapping[str, Procedure]
) -> None:
    """Check the size of the expansion before anything is built."""
    num_nodes = num_bytes = 0
    sizes: dict[str, tuple[int, int]] = {}
    for path, call in calls:
        if call.procedure not in sizes:
            program = procedures[call.procedure].program
            sizes[call.procedure] = (
                sum(1 for _ in walk(program.nodes, "")),
                len(msgspec.json.encode(program)),
            )
        more_nodes, more_bytes = sizes[call.procedure]
        num_nodes += more_nodes
        num_bytes += more_bytes
        if num_nodes > MAX_NODES or num_bytes > MAX_BODY_BYTES:
            raise ProgramError(
                "program.too_large",
                f"the procedures that the program calls have more than {MAX_NODES:,} nodes or "
                f"{MAX_BODY_BYTES:,} bytes",
                path=f"{path}.procedure",
                status=413,
            )


def _expand_nodes(
    nodes: Sequence[Node],
    procedures: Mapping[str, Procedure],
    path: str,
    expanded: ExpandedCalls,
) -> list[Any]:
    return [
        _expand_node(node, procedures, f"{path}[{index}]", expanded)
        for index, node in enumerate(nodes)
    ]


def _expand_node(
    node: Node, procedures: Mapping[str, Procedure], path: str, expanded: ExpandedCalls
) -> Node:
    if isinstance(node, ProcedureNode):
        with prefixed_path(path):
            return _expand_call(node, procedures[node.procedure], expanded)
    if not isinstance(node, NodeWithBodies):
        return node
    return node.with_bodies(
        [
            _expand_nodes(body.nodes, procedures, f"{path}.{body.path}", expanded)
            for body in node.bodies()
        ]
    )


def _expand_call(
    node: ProcedureNode, procedure: Procedure, expanded: ExpandedCalls
) -> ProcedureNode:
    program, signature = procedure.program, procedure.signature
    returns = _returned_results(node, procedure)
    arguments = _arguments(node, procedure)
    job_names = _own_jobs(program)
    suffix = f"__{node.id}"
    defined = defined_names(program.nodes)
    variables = defined.variables | _bound_names(program) | program.variables.keys()
    names = defined._replace(variables=variables)
    _check_lengths(names.nodes | variables | job_names, suffix, node)
    renaming = Renaming(
        names,
        suffix,
        {},
        {"main": node.job, **{name: name + suffix for name in job_names}},
        keeps_seeds=True,
    )
    for name in sorted(job_names):
        job = program.jobs.get(name, Job())
        parent = node.job if name == "main" else renaming.job(job.parent or "main")
        expanded.jobs[renaming.job(name)] = msgspec.structs.replace(job, parent=parent)
    for name, variable in program.variables.items():
        # The expansion gives every parameter a value.
        declared = msgspec.structs.replace(variable, default=UNSET)
        expanded.variables[renaming.name(name)] = declared
    return msgspec.structs.replace(
        node,
        procedure=procedure.reference,
        args={},
        output=UNSET,
        outputs={},
        bound=[
            BoundArgument(name, renaming.name(name), arguments[name])
            for name in signature.parameters
        ],
        body=[each.renamed_with_bodies(renaming) for each in program.nodes],
        returns={name: renaming.expression(result) for name, result in returns.items()},
    )


def _own_jobs(program: Program) -> set[str]:
    """Return the jobs that each call of a procedure has for itself.

    `main` is the job of the call, unless the procedure declares or kills it.
    """
    nodes = [node for _, node in walk(program.nodes, "")]
    is_killed = any(isinstance(node, KillNode) and "main" in node.targets for node in nodes)
    used = {node.job for node in nodes}
    return (used | {"main"} if is_killed else used - {"main"}) | program.jobs.keys()


def _check_lengths(names: Iterable[str], suffix: str, node: ProcedureNode) -> None:
    """Refuse a call whose id makes a name of the procedure too long."""
    longest = max(names, key=len, default="")
    if len(longest) + len(suffix) > MAX_NAME:
        raise ProgramError(
            "program.name",
            f"procedure `{node.procedure}` has the name `{longest}`, which the call `{node.id}` "
            f"extends to `{longest}{suffix}`; a name has at most {MAX_NAME} characters: give the "
            "call a shorter id",
            path="id",
        )


def _bound_names(program: Program) -> frozenset[str]:
    """Return the names of items and indices in a program."""
    return frozenset(
        name for _, node in walk(program.nodes, "") for body in node.bodies() for name in body.binds
    )


def _arguments(node: ProcedureNode, procedure: Procedure) -> dict[str, Expression]:
    """Return the expression of every parameter."""
    parameters = procedure.signature.parameters
    unknown = next((name for name in node.args if name not in parameters), None)
    if unknown is not None:
        _refuse_argument(
            f"procedure `{procedure.reference}` has no parameter `{unknown}`; it has "
            f"{listed(parameters) or 'none'}",
            f"args.{unknown}",
        )
    arguments: dict[str, Expression] = {}
    for name, parameter in parameters.items():
        if name in node.args:
            arguments[name] = node.args[name]
        elif parameter.default is not UNSET:
            arguments[name] = {"lit": parameter.default}
        else:
            _refuse_argument(
                f"procedure `{procedure.reference}` needs an argument for `{name}`", "args"
            )
    return arguments


def _returned_results(node: ProcedureNode, procedure: Procedure) -> dict[str, Expression]:
    """Return the caller's variables with expressions over the results."""
    results = procedure.signature.results
    for name, result in node.outputs.items():
        if result not in results:
            raise ProgramError(
                "procedure.result",
                f"procedure `{procedure.reference}` has no result `{result}`; it has "
                f"{listed(results)}",
                path=f"outputs.{name}",
            )
    if node.output is UNSET:
        return {name: {"var": result} for name, result in node.outputs.items()}
    if len(results) == 1:
        return {node.output: {"var": next(iter(results))}}
    return {node.output: {"object": {result: {"var": result} for result in results}}}


def _refuse_argument(message: str, path: str) -> NoReturn:
    raise ProgramError("procedure.argument", message, path=path)
