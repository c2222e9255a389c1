"""How a graph may grow: new nodes, checked against all that stands before anything changes.

Knows names, slots and edges, as tables (`Standing`) and as a wish (`Growth`). Refuses to know
what is seen from where (`sight`), sessions, objectives' meaning and what has run.

Kept true: a `Growth` that `add` has accepted can join the `Standing` it was checked
against, and `join` cannot fail; instances of a body that was checked need no check.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

from msgspec import UNSET

from .control import (
    GIVE,
    Body,
    Member,
    Place,
    bodies,
    bound_names,
    check_names_only,
    slots_of,
    stand,
    walk,
)
from .errors import ProgramError
from .expression import variables
from .instances import Instance, read_by
from .ir import MAX_NODES, AnyNode, Job, Json, Loop, Map, Objective, Placed, Variable
from .order import find_cycle, reach, sort
from .sight import Outside, Sight
from .standing import Standing, gate
from .validation import Slot, check_name, find_write
from .value import has_type, kind_of

MAX_EDGES = 100_000
"""Edges between nodes as they were sent."""
MAX_GROWN_NODES = 100_000
"""Nodes of a program with all instances."""
MAX_JOB_DEPTH = 32
MAX_BODY_DEPTH = 16
"""Bodies inside each other."""


class Growth:
    """Nodes that want to join a graph: checked against the whole before anything changes."""

    def __init__(self, standing: Standing, *, prefix: str, outside: Outside | None = None) -> None:
        self._standing = standing
        self._prefix = prefix
        self._outside = outside
        self._base = len(standing.numbered)
        self.new = Standing(jobs={})
        """What is to join."""
        self._paths: dict[str, str] = {}
        self._sight = Sight(standing, self.new, self._paths, outside)
        self.objectives: dict[str, Objective] = {}
        self.edges: list[tuple[int, int]] = []
        self.order: list[int] = []
        self.is_behind = True
        """No slot that was there before waits for a new one."""

    def add_jobs(self, jobs: Mapping[str, Job]) -> None:
        """Take declared jobs; `add` then checks that their parents exist."""
        for name in jobs:
            check_name(name, f"{self._prefix}jobs.{name}")
        self.new.jobs |= jobs

    def add(
        self,
        variables: Mapping[str, Variable],
        nodes: Sequence[AnyNode],
        inputs: Mapping[str, Json],
        outputs: Sequence[str],
        objectives: Mapping[str, Objective],
    ) -> None:
        """Check all of it.

        Raises:
            ProgramError: with the path of the first thing that is wrong.
        """
        self._add_variables(variables)
        self.new.num_sent = sum(1 for _ in walk(nodes, ""))
        if self._standing.num_sent + self.new.num_sent > MAX_NODES:
            _refuse_size(f"a program may have {MAX_NODES:,} nodes")
        self._add_nodes(list(stand(nodes, f"{self._prefix}nodes")))
        self._check_jobs()
        self._add_templates()
        for node in self.new.nodes.values():
            self._sight.check(node)
        self._add_inputs(inputs)
        self._add_outputs(outputs, objectives)
        self._connect(MAX_EDGES)
        self._sort()

    def add_instances(self, instances: Sequence[Instance]) -> None:
        """Take instances of templates that `add` has checked.

        Raises:
            ProgramError: `program.too_large` if the graph would be too large.
        """
        check_growth(self._standing, len(instances))
        for node, slots, place in instances:
            self._put(node, slots, place)
            if node.job not in self._standing.jobs:
                self.new.jobs.setdefault(node.job, Job())
            number = self.new.first[node.id]
            for slot in slots:
                for variable in slot.writes:
                    self.new.producers[variable] = number + slot.index
                    self.new.variables[variable] = self._declared(variable)
        self._connect(len(self._standing.numbered) * 100 + 1_000_000)
        self.is_behind = False

    def _declared(self, variable: str) -> Variable:
        """What the template of an instance's variable is declared as."""
        name = variable.partition(".")[0]
        known = self._standing.hidden.get(name) or self._standing.variables.get(name)
        return known or Variable()

    def join(self) -> None:
        """Make what was checked part of the tables; cannot fail."""
        self._standing.take(self.new)
        for source, target in self.edges:
            self._standing.behind[source].append(target)
            self._standing.before[target].append(source)
        self._standing.num_edges += len(self.edges)

    # --- variables and nodes --------------------------------------------------------------

    def _add_variables(self, variables: Mapping[str, Variable]) -> None:
        for name, variable in variables.items():
            path = f"{self._prefix}variables.{name}"
            check_name(name, path)
            before = self._standing.variables.get(name, self._standing.hidden.get(name))
            if before is not None and before not in (Variable(), variable):
                raise ProgramError(
                    "program.variable",
                    f"variable `{name}` is declared otherwise already",
                    path=path,
                )
        self.new.variables |= variables

    def _add_nodes(self, members: Sequence[Member]) -> None:
        for path, node, place in members:
            if path.count(".") > 2 * MAX_BODY_DEPTH:
                _refuse_size(f"bodies may stand {MAX_BODY_DEPTH} deep in each other")
            self._paths[node.id] = path
            try:
                check_names_only(node)
                slots = slots_of(node)
            except ProgramError as error:
                error.path = f"{path}.{error.path}" if error.path else path
                raise
            known = self._standing
            if node.id in self.new.nodes or node.id in known.nodes or node.id in known.hidden_nodes:
                _refuse_second(node.id, path)
            number = self._base + len(self.new.numbered)
            self._put(node, slots, place)
            for slot in slots:
                for variable in slot.writes:
                    self._add_producer(variable, node, number + slot.index)

    def _put(self, node: Placed, slots: tuple[Slot, ...], place: Place | None) -> None:
        self.new.nodes[node.id] = node
        self.new.slots[node.id] = slots
        self.new.first[node.id] = self._base + len(self.new.numbered)
        self.new.numbered += slots
        if place is not None:
            self.new.places[node.id] = place

    def _add_producer(self, variable: str, node: Placed, own: int) -> None:
        reason = ""
        number = self._sight.producer(variable)
        if number is not None:
            reason = f"node `{self._sight.slot(number).node}` writes it already"
        elif variable in self._standing.given:
            reason = "it has a value already"
        elif variable in self._standing.hidden:
            reason = "a body makes it already"
        if reason:
            raise ProgramError(
                "program.two_producers",
                f"node `{node.id}` cannot write variable `{variable}`: {reason}",
                path=f"{self._paths[node.id]}.{find_write(node, variable)}",
            )
        self.new.producers[variable] = own
        if variable not in self._standing.variables:
            self.new.variables.setdefault(variable, Variable())

    def _check_jobs(self) -> None:
        for node in self.new.nodes.values():
            if node.job not in self._standing.jobs:
                self.new.jobs.setdefault(node.job, Job())
        known = self._standing.jobs | self.new.jobs
        for name in self.new.jobs:
            path = f"{self._prefix}jobs.{name}.parent"
            line = [name]
            while (parent := known[line[-1]].parent) is not None:
                if parent not in known:
                    raise ProgramError(
                        "program.unknown_job",
                        f"job `{line[-1]}` has no job `{parent}` above it",
                        path=path,
                    )
                if parent in line:
                    raise ProgramError(
                        "program.cycle",
                        f"jobs stand in each other: {' -> '.join([*line, parent])}",
                        path=path,
                    )
                line.append(parent)
                if len(line) > MAX_JOB_DEPTH:
                    _refuse_size(f"jobs may be nested {MAX_JOB_DEPTH} deep")

    # --- templates ------------------------------------------------------------------------

    def _add_templates(self) -> None:
        """Check the bodies of which instances will be made, each as a graph of its own."""
        for node in list(self.new.nodes.values()):
            if isinstance(node, Map | Loop):
                self._add_template(node, bodies(node)[0])

    def _add_template(self, node: Map | Loop, body: Body) -> None:
        path = self._paths[node.id]
        place = self._sight.place(node.id)
        around = frozenset() if self._outside is None else self._outside.binds
        for field, name in (("as", node.item), ("index", node.index)):
            if name is not UNSET and (name in around or self._sight.sees_variable(name, place)):
                _refuse_hiding(name, f"{path}.{field}")
        outside = Outside(
            has_variable=lambda name: self._sight.sees_variable(name, place),
            has_node=lambda name: self._sight.sees_node(name, place),
            binds=around | body.binds,
            depth=1 if self._outside is None else self._outside.depth + 1,
        )
        if outside.depth > MAX_BODY_DEPTH:
            _refuse_size(f"bodies may stand {MAX_BODY_DEPTH} deep in each other")
        inside = Growth(
            Standing(jobs=self._standing.jobs | self.new.jobs), prefix="", outside=outside
        )
        inside.check_body(body, f"{path}.{body.path}")
        inside.check_ends(node, path)
        for name in bound_names(node):
            if name in inside.new.variables or name in inside.new.hidden:
                _refuse_hiding(name, f"{path}.{'as' if name == node.item else 'index'}")
        self._hide(inside, path)

    def check_body(self, body: Body, path: str) -> None:
        """Check the nodes of a template against what stands around it.

        Raises:
            ProgramError: with the path of the first thing that is wrong.
        """
        self._add_nodes(list(stand(body.nodes, path)))
        self._check_jobs()
        self._add_templates()
        for node in self.new.nodes.values():
            self._sight.check(node)
        self._connect(MAX_EDGES)
        self._sort()

    def check_ends(self, node: Map | Loop, path: str) -> None:
        """Check the names that stand beside a body and mean what is in it.

        Raises:
            ProgramError: `program.unknown_variable`.
        """
        if isinstance(node, Map):
            for outer, inner in node.collect.items():
                self._sight.check_names(read_by(inner), f"{path}.collect.{outer}")
            return
        for name, (_, following) in node.carry.items():
            self._sight.check_names(variables(following), f"{path}.carry.{name}[1]")
        if node.until is not UNSET:
            self._sight.check_names(variables(node.until), f"{path}.until")

    def _hide(self, inside: Growth, path: str) -> None:
        """Take over the names of a template, which nobody else may have or see."""
        for name in inside.new.nodes.keys() | inside.new.hidden_nodes:
            known = self.new.nodes.keys() | self.new.hidden_nodes
            if name in known or name in self._standing.nodes or name in self._standing.hidden_nodes:
                _refuse_second(name, path)
        self.new.hidden_nodes |= inside.new.nodes.keys() | inside.new.hidden_nodes
        self.new.jobs |= inside.new.jobs
        for name in [*inside.new.producers, *inside.new.hidden]:
            stands = name in self._standing.given or name in self._standing.hidden
            if stands or name in self.new.hidden or self._sight.producer(name) is not None:
                raise ProgramError(
                    "program.two_producers",
                    f"variable `{name}` is made in the body of a node, and elsewhere",
                    path=path,
                )
            declared = self.new.variables.pop(name, None) or self._standing.variables.get(name)
            self.new.hidden[name] = declared or Variable()

    # --- inputs and outputs ---------------------------------------------------------------

    def _add_inputs(self, inputs: Mapping[str, Json]) -> None:
        for name, value in inputs.items():
            path = f"inputs.{name}"
            number = self._sight.producer(name)
            variable = self.new.variables.get(name) or self._standing.variables.get(name)
            reason = ""
            if number is not None:
                reason = f"node `{self._sight.slot(number).node}` writes it"
            elif name in self.new.hidden or name in self._standing.hidden:
                reason = "it is made in a body"
            elif variable is None:
                reason = "`variables` does not declare it"
            elif name in self._standing.given:
                reason = "it has a value already"
            if variable is None or reason:
                raise ProgramError(
                    "program.unknown_input", f"`{name}` takes no value: {reason}", path=path
                )
            if not has_type(value, variable.type):
                raise ProgramError(
                    "program.input_type",
                    f"`{name}` is declared as {variable.type}, its value is {kind_of(value)}",
                    path=path,
                )
        self.new.given |= inputs.keys()

    def _add_outputs(self, outputs: Sequence[str], objectives: Mapping[str, Objective]) -> None:
        stands = set(self._standing.outputs)
        for index, name in enumerate(outputs):
            if not self._sight.sees_variable(name, None):
                raise ProgramError(
                    "program.unknown_output",
                    f"output `{name}` is no variable of the program"
                    + (
                        " outside of its bodies"
                        if name in {*self.new.variables, *self.new.hidden}
                        else ""
                    ),
                    path=f"{self._prefix}outputs[{index}]",
                )
            if name not in stands:
                stands.add(name)
                self.new.outputs.append(name)
        for name in objectives:
            if name not in stands:
                raise ProgramError(
                    "program.objective",
                    f"`{name}` has an objective, but is no output",
                    path=f"objectives.{name}",
                )
        self.objectives |= objectives

    # --- edges ----------------------------------------------------------------------------

    def _connect(self, max_edges: int) -> None:
        for number, slot in enumerate(self.new.numbered, self._base):
            found = {self._sight.producer(variable) for variable in (*slot.reads, *slot.sees)}
            sources = {source for source in found if source is not None}
            node = self.new.nodes[slot.node]
            if slot.index:
                sources.add(number - 1)
            else:
                sources |= self._lasts(node.after)
            if slot.index == GIVE and isinstance(node, Map | Loop):
                sources |= self._lasts(
                    earlier for _, each in walk(node.body, "") for earlier in each.after
                )
            # Sorted: the order of a set of names differs from process to process.
            self.edges += ((source, number) for source in sorted(sources))
        for node_id, place in self.new.places.items():
            self._connect_place(node_id, place)
        for variable, number in self.new.producers.items():
            waiting = self._standing.consumers.get(variable, ())
            for reader in (*waiting, *self._standing.seers.get(variable, ())):
                self.edges.append((number, reader))
                self.is_behind = False
        if self._standing.num_edges + len(self.edges) > max_edges:
            _refuse_size(f"a program may have {max_edges:,} edges")

    def _connect_place(self, node_id: str, place: Place) -> None:
        """A node in a body stands behind the gate, and before the end, of the node around it."""
        control = self.new.nodes.get(place.control) or self._standing.nodes.get(place.control)
        if control is None:
            return
        enter, close = gate(control)
        first = self.new.first.get(place.control)
        if first is not None:
            self.edges.append((first + enter, self.new.first[node_id]))
        else:
            first = self._standing.first[place.control]
        last = self.new.first[node_id] + len(self.new.slots[node_id]) - 1
        self.edges.append((last, first + close))

    def _sort(self) -> None:
        """Order the new slots, or say which nodes wait for each other."""
        base, behind_old = self._base, self._standing.behind
        added: dict[int, list[int]] = {}
        for source, target in self.edges:
            added.setdefault(source, []).append(target)

        def behind(number: int) -> Sequence[int]:
            more = added.get(number, ())
            return [*behind_old[number], *more] if number < base else more

        # A cycle must pass through something new, so what new slots reach is all to look at.
        numbers: Sequence[int] = range(base, base + len(self.new.numbered))
        if not self.is_behind:
            numbers = reach(numbers, behind)
        self.order = sort(numbers, behind)
        if len(self.order) == len(numbers):
            return
        cycle = find_cycle(set(numbers) - set(self.order), behind)
        names = [self._sight.slot(number).node for number in cycle]
        names = [name for i, name in enumerate(names) if name != names[i - 1]] or names[:1]
        first = next(node_id for node_id in self.new.nodes if node_id in names)
        raise ProgramError(
            "program.cycle",
            f"nodes wait for each other: {' -> '.join([*names, names[0]])}",
            path=self._paths[first],
        )

    def _lasts(self, nodes: Iterable[str]) -> set[int]:
        """The last slots of those nodes that are in this graph."""
        return {last for each in nodes if (last := self._last(each)) is not None}

    def _last(self, node_id: str) -> int | None:
        """The last slot of a node; None if it stands outside of this body."""
        if node_id in self.new.first:
            return self.new.first[node_id] + len(self.new.slots[node_id]) - 1
        first = self._standing.first.get(node_id)
        return None if first is None else first + len(self._standing.slots[node_id]) - 1


def check_growth(standing: Standing, num_more: int) -> None:
    """Make sure that so many instances may join.

    Raises:
        ProgramError: `program.too_large`.
    """
    if len(standing.nodes) + num_more > MAX_GROWN_NODES:
        _refuse_size(f"a program may grow to {MAX_GROWN_NODES:,} nodes")


def _refuse_size(message: str) -> NoReturn:
    raise ProgramError("program.too_large", message, status=413)


def _refuse_second(node_id: str, path: str) -> NoReturn:
    raise ProgramError(
        "program.duplicate_node", f"there are two nodes `{node_id}`", path=f"{path}.id"
    )


def _refuse_hiding(name: str, path: str) -> NoReturn:
    raise ProgramError(
        "program.hidden_name", f"`{name}` would hide another name that the body sees", path=path
    )
