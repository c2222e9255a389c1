"""Graph extension: new nodes, checked against the whole graph before anything changes.

Responsibility: producers, jobs, bodies, inputs, outputs and sizes of a set of new nodes.
Out of scope: visibility of names (`name_resolution`), edges (`edges`), the meaning of
objectives, and what has run.

Invariants: `commit` cannot fail after `add` or `add_instances`. Instances of a checked template
need no checks but their number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn, cast

from msgspec import UNSET

from ..checks import check_name
from ..content import Json
from ..errors import ProgramError, prefixed_path
from ..expressions.value_schema import check_schema, find_mismatch
from ..ir import Job, Objective, Variable
from ..nodes import GraphNode, Node
from ..nodes.base import MAX_NODES, NodeBody
from ..nodes.bodies import BodyRef, PlacedNode, flatten, walk
from ..nodes.control.base import TemplateNode
from ..slot import Slot
from .edges import ExtensionEdges
from .instances import BodyInstance
from .name_resolution import EnclosingScope, NameResolver
from .tables import GraphTables

MAX_EDGES = 100_000
"""Edges between submitted nodes."""
MAX_EXPANDED_NODES = 100_000
"""Nodes of a program with all instances."""
MAX_JOB_DEPTH = 32
MAX_BODY_DEPTH = 32
MAX_TEMPLATE_DEPTH = 16
"""Bodies of `map` and `loop` around a node."""


class GraphExtension:
    """A checked set of nodes to append to a graph."""

    def __init__(
        self, existing: GraphTables, *, prefix: str, enclosing: EnclosingScope | None = None
    ) -> None:
        """Create an empty extension.

        Args:
            existing: the graph to extend.
            prefix: the prefix of paths in errors.
            enclosing: the graph around the body of a template; None for a program.
        """
        self._existing = existing
        self._prefix = prefix
        self._enclosing = enclosing
        self._base = len(existing.numbered_slots)
        self.new = GraphTables(jobs={})
        """The nodes to append."""
        self._paths: dict[str, str] = {}
        self._names = NameResolver(existing, self.new, self._paths, enclosing)
        self._edges = ExtensionEdges(existing, self.new, self._names)
        self.objectives: dict[str, Objective] = {}
        self.order: list[int] = []
        """The numbers of the new slots in topological order."""

    @property
    def is_append_only(self) -> bool:
        """Whether no existing slot waits for a new one."""
        return self._edges.is_append_only

    def add_jobs(self, jobs: Mapping[str, Job]) -> None:
        """Add declared jobs. `add` checks that their parents exist."""
        for name in jobs:
            check_name(name, f"{self._prefix}jobs.{name}")
        self.new.jobs |= jobs

    def add(
        self,
        variables: Mapping[str, Variable],
        nodes: Sequence[Node],
        inputs: Mapping[str, Json],
        outputs: Sequence[str],
        objectives: Mapping[str, Objective],
        *,
        is_append: bool = False,
    ) -> None:
        """Add and check submitted nodes, or appended ones.

        The objectives of an append may name any variables that its clients wait for.

        Raises:
            ProgramError: with the path of the first error.
        """
        self._add_variables(variables)
        self.new.num_submitted = sum(1 for _ in walk(nodes, ""))
        if self._existing.num_submitted + self.new.num_submitted > MAX_NODES:
            _refuse_size(f"a program can have at most {MAX_NODES:,} nodes")
        self._add_nodes(list(flatten(nodes, f"{self._prefix}nodes")))
        self._check_nodes()
        self._add_inputs(inputs)
        self._add_outputs(outputs)
        self._add_objectives(objectives, is_append=is_append)
        self._connect(MAX_EDGES)
        self.order = self._edges.sort(self._paths)

    def add_instances(self, instances: Sequence[BodyInstance]) -> None:
        """Add instances of a checked template.

        Raises:
            ProgramError: `program.too_large` if the graph would be too large.
        """
        check_expanded_size(self._existing, len(instances))
        for node, slots, body in instances:
            self._put(node, slots, body)
            if node.job not in self._existing.jobs:
                self.new.jobs.setdefault(node.job, Job())
            number = self.new.first_slot[node.id]
            for slot in slots:
                for variable in slot.writes:
                    self.new.producers[variable] = number + slot.index
                    self.new.variables[variable] = self._declaration(variable)
        self._connect(len(self._existing.numbered_slots) * 100 + 1_000_000)
        self._edges.is_append_only = False

    def commit(self) -> None:
        """Append the nodes to the graph. Cannot fail."""
        self._existing.merge(self.new)
        for source, target in self._edges.edges:
            self._existing.add_edge(source, target)

    def _declaration(self, variable: str) -> Variable:
        """Return the declaration of the template variable that this variable is an instance of."""
        name = variable.partition(".")[0]
        existing = self._existing
        return existing.template_variables.get(name) or existing.variables.get(name) or Variable()

    # --- variables, nodes and jobs ------------------------------------------------------------

    def _add_variables(self, variables: Mapping[str, Variable]) -> None:
        existing = self._existing
        for name, variable in variables.items():
            path = f"{self._prefix}variables.{name}"
            check_name(name, path)
            if name in existing.variables and variable == Variable():
                continue  # a reference: the earlier declaration counts
            declared = existing.variables.get(name, existing.template_variables.get(name))
            if declared is not None and declared not in (Variable(), variable):
                raise ProgramError(
                    "program.variable",
                    f"variable `{name}` is already declared with another type or schema",
                    path=path,
                )
            if variable.schema is not None:
                check_schema(variable.schema, f"{path}.schema")
            if variable.default is not UNSET:
                _check_value(name, variable, variable.default, f"{path}.default")
            self.new.variables[name] = variable

    def _add_nodes(self, nodes: Sequence[PlacedNode]) -> None:
        for path, node, body in nodes:
            if path.count("[") - 1 - path.count(".handlers[") > MAX_BODY_DEPTH:
                _refuse_depth("bodies", MAX_BODY_DEPTH, node.id, path)
            self._paths[node.id] = path
            with prefixed_path(path):
                _check_submitted_names(node)
                slots = node.make_slots()
            if self._names.is_known_node(node.id):
                _refuse_duplicate(node.id, path)
            number = self._base + len(self.new.numbered_slots)
            self._put(cast(GraphNode, node), slots, body)
            for slot in slots:
                for variable in slot.writes:
                    self._add_producer(variable, node, number + slot.index)

    def _put(self, node: GraphNode, slots: tuple[Slot, ...], body: BodyRef | None) -> None:
        self.new.nodes[node.id] = node
        self.new.slots[node.id] = slots
        self.new.first_slot[node.id] = self._base + len(self.new.numbered_slots)
        self.new.numbered_slots += slots
        if body is not None:
            self.new.body_of[node.id] = body

    def _reason_against_producer(self, variable: str) -> str:
        """Return why no further node may write a variable; empty if one may."""
        producer = self._names.producer(variable)
        if producer is not None:
            return f"node `{self._names.slot(producer).node}` already writes it"
        if variable in self._existing.provided:
            return "it already has a value"
        if self._names.is_template_variable(variable):
            return "a node in a body already writes it"
        return ""

    def _add_producer(self, variable: str, node: Node, number: int) -> None:
        reason = self._reason_against_producer(variable)
        if reason:
            raise ProgramError(
                "program.two_producers",
                f"node `{node.id}` cannot write variable `{variable}`: {reason}",
                path=f"{self._paths[node.id]}.{node.write_path(variable)}",
            )
        self.new.producers[variable] = number
        if variable not in self._existing.variables:
            self.new.variables.setdefault(variable, Variable())

    def _check_nodes(self) -> None:
        self._check_jobs()
        for node in list(self.new.nodes.values()):
            if isinstance(node, TemplateNode):
                self._add_template(node)
        for node in self.new.nodes.values():
            self._names.check(node)

    def _check_jobs(self) -> None:
        for node in self.new.nodes.values():
            if node.job not in self._existing.jobs:
                self.new.jobs.setdefault(node.job, Job())
        jobs = self._existing.jobs | self.new.jobs
        for name in self.new.jobs:
            path = f"{self._prefix}jobs.{name}.parent"
            chain = [name]
            while (parent := jobs[chain[-1]].parent) is not None:
                if parent not in jobs:
                    raise ProgramError(
                        "program.unknown_job",
                        f"job `{chain[-1]}` has unknown parent `{parent}`: declare it in `jobs`",
                        path=path,
                    )
                if parent in chain:
                    raise ProgramError(
                        "program.cycle",
                        f"jobs form a cycle: {' -> '.join([*chain, parent])}",
                        path=path,
                    )
                chain.append(parent)
                if len(chain) > MAX_JOB_DEPTH:
                    _refuse_size(f"jobs can be nested at most {MAX_JOB_DEPTH} levels deep")

    # --- templates ----------------------------------------------------------------------------

    def _add_template(self, node: TemplateNode) -> None:
        """Check the body of a template as a separate graph, and add its names."""
        path = self._paths[node.id]
        body_of_node = self._names.body_of(node.id)
        binds = self._names.enclosing_binds
        for field, name in node.bound_fields():
            if name in binds or self._names.can_read(name, body_of_node):
                _refuse_hidden(name, f"{path}.{field}")
        (body,) = node.bodies()
        enclosing = EnclosingScope(
            has_variable=lambda name: self._names.can_read(name, body_of_node),
            has_node=lambda name: self._names.can_run_after(name, body_of_node),
            binds=binds | body.binds,
            depth=1 if self._enclosing is None else self._enclosing.depth + 1,
        )
        if enclosing.depth > MAX_TEMPLATE_DEPTH:
            _refuse_depth("`map` and `loop`", MAX_TEMPLATE_DEPTH, node.id, path)
        jobs = self._existing.jobs | self.new.jobs
        inner = GraphExtension(GraphTables(jobs=jobs), prefix="", enclosing=enclosing)
        inner.check_template(node, body, path)
        for field, name in node.bound_fields():
            if name in inner.new.variables or name in inner.new.template_variables:
                _refuse_hidden(name, f"{path}.{field}")
        self._add_template_names(node.id, inner.new, path)

    def check_template(self, node: TemplateNode, body: NodeBody, path: str) -> None:
        """Check the body of a template and the references into it; `path` is the node's.

        Raises:
            ProgramError: with the path of the first error.
        """
        self._add_nodes(list(flatten(body.nodes, f"{path}.{body.path}")))
        self._check_nodes()
        self._connect(MAX_EDGES)
        self._edges.sort(self._paths)
        for reference in node.body_references():
            self._names.check_names(reference.names, f"{path}.{reference.path}")

    def _add_template_names(self, node_id: str, template: GraphTables, path: str) -> None:
        """Add the names that a template defines, so that no other node can use them."""
        nodes = template.nodes.keys() | template.template_nodes
        for name in nodes:
            if self._names.is_known_node(name):
                _refuse_duplicate(name, path)
        self.new.template_nodes |= nodes
        self.new.jobs |= template.jobs
        for name in [*template.producers, *template.template_variables]:
            reason = self._reason_against_producer(name)
            if reason:
                raise ProgramError(
                    "program.two_producers",
                    f"the body of node `{node_id}` cannot write variable `{name}`: {reason}; "
                    "names of variables are unique in a program, bodies included",
                    path=path,
                )
            declared = self.new.variables.pop(name, None) or self._existing.variables.get(name)
            self.new.template_variables[name] = declared or Variable()

    # --- inputs and outputs -------------------------------------------------------------------

    def _add_inputs(self, inputs: Mapping[str, Json]) -> None:
        for name, value in inputs.items():
            path = f"inputs.{name}"
            producer = self._names.producer(name)
            variable = self.new.variables.get(name) or self._existing.variables.get(name)
            reason = ""
            if producer is not None:
                reason = f"node `{self._names.slot(producer).node}` writes it"
            elif self._names.is_template_variable(name):
                reason = "a node in a body writes it"
            elif variable is None:
                reason = f"`variables` does not declare it{self._names.hint(name)}"
            elif name in self._existing.provided:
                reason = "it already has a value"
            if variable is None or reason:
                raise ProgramError(
                    "program.unknown_input", f"`{name}` is not an input: {reason}", path=path
                )
            _check_value(name, variable, value, path)
        self.new.provided |= inputs.keys()

    def _add_outputs(self, outputs: Sequence[str]) -> None:
        known = set(self._existing.outputs)
        for index, name in enumerate(outputs):
            if not self._names.can_read(name, None):
                is_inner = name in self.new.variables or name in self.new.template_variables
                raise ProgramError(
                    "program.unknown_output",
                    f"output `{name}` is visible only in a body: return it by `collect`, `merge` "
                    "or `carry`"
                    if is_inner
                    else f"output `{name}` is not a variable of the program"
                    f"{self._names.hint(name)}",
                    path=f"{self._prefix}outputs[{index}]",
                )
            if name not in known:
                known.add(name)
                self.new.outputs.append(name)

    def _add_objectives(self, objectives: Mapping[str, Objective], *, is_append: bool) -> None:
        outputs = set(self.new.outputs)
        kind = "a variable of the program" if is_append else "an output: add it to `outputs`"
        for name in objectives:
            is_known = self._names.can_read(name, None) if is_append else name in outputs
            if not is_known:
                raise ProgramError(
                    "program.objective",
                    f"`{name}` has an objective but is not {kind}",
                    path=f"objectives.{name}",
                )
        self.objectives |= objectives

    def _connect(self, max_edges: int) -> None:
        self._edges.connect()
        if self._existing.num_edges + len(self._edges.edges) > max_edges:
            _refuse_size(f"a program can have at most {max_edges:,} edges between nodes")


def _check_value(name: str, variable: Variable, value: Json, path: str) -> None:
    mismatch = find_mismatch(value, variable)
    if mismatch is not None:
        raise ProgramError("program.input_type", f"`{name}` {mismatch}", path=path)


def check_expanded_size(existing: GraphTables, num_new: int) -> None:
    """Check that a number of instances can be added.

    Raises:
        ProgramError: `program.too_large`.
    """
    if len(existing.nodes) + num_new > MAX_EXPANDED_NODES:
        _refuse_size(f"a program can expand to at most {MAX_EXPANDED_NODES:,} nodes")


def _check_submitted_names(node: Node) -> None:
    """Refuse expressions in fields that take a name: only instances may have them there."""
    for path, name in node.submitted_names():
        if not isinstance(name, str):
            raise ProgramError(
                "program.name", f"`{path}` must be the name of a variable", path=path
            )


def _refuse_size(message: str, path: str | None = None) -> NoReturn:
    raise ProgramError("program.too_large", message, path=path, status=413)


def _refuse_depth(kind: str, limit: int, node_id: str, path: str) -> NoReturn:
    message = f"{kind} can be nested at most {limit} levels deep, and node `{node_id}` is deeper"
    _refuse_size(message, path)


def _refuse_duplicate(node_id: str, path: str) -> NoReturn:
    raise ProgramError(
        "program.duplicate_node", f"two nodes have the id `{node_id}`", path=f"{path}.id"
    )


def _refuse_hidden(name: str, path: str) -> NoReturn:
    raise ProgramError(
        "program.hidden_name",
        f"`{name}` would hide another variable that the body can read: choose another name",
        path=path,
    )
