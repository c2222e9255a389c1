"""The jobs of a program that have a timeout, and their instances.

A job whose nodes are all in one body has an instance for each item, round or retry of this body,
and each instance has the whole time.

Invariant: the instances of a node depend on the submission and the appends only, so they are the
same after a restart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import takewhile
from typing import NamedTuple

from ..program.graph.graph import Graph, bodies_around
from ..program.ir import Job, Node
from ..program.nodes.bodies import BodyRef


class JobInstance(NamedTuple):
    """A job with a timeout in one instance of the innermost body that contains all its nodes."""

    job: str
    body: BodyRef | None
    """None: its nodes have no body in common."""


class TimedJobs:
    """The jobs with a timeout of one program."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._depths: dict[str, int] = {}
        """The number of bodies around each job."""

    def add(self, nodes: Iterable[Node]) -> None:
        """Note how many bodies are around each job.

        Nodes that are appended to a job later do not change that.
        """
        if any(job.timeout_s is not None for job in self._graph.jobs.values()):
            bodies: dict[str, tuple[BodyRef, ...]] = {}
            self._find_bodies(nodes, (), bodies)
            self._depths = {job: len(path) for job, path in bodies.items()} | self._depths

    def _find_bodies(
        self,
        nodes: Iterable[Node],
        path: tuple[BodyRef, ...],
        bodies: dict[str, tuple[BodyRef, ...]],
    ) -> None:
        for node in nodes:
            for job in self._jobs_of(node):
                bodies[job] = _common(bodies.get(job, path), path)
            for body in node.bodies():
                self._find_bodies(body.nodes, (*path, BodyRef(node.id, body.part)), bodies)

    def instances_of(self, node: Node) -> list[JobInstance]:
        """Return the instances of jobs with a timeout that contain a node of the graph."""
        jobs = self._jobs_of(node)
        if not jobs:
            return []
        bodies = [*bodies_around(self._graph, node.id)][::-1]
        # A node that was appended to a job may have fewer bodies around it.
        depths = {job: min(self._depths.get(job, 0), len(bodies)) for job in jobs}
        return [JobInstance(job, bodies[n - 1] if n else None) for job, n in depths.items()]

    def nodes_in(self, instance: JobInstance) -> Iterator[str]:
        """Iterate over the nodes of a job instance, outer nodes first."""
        nodes = self._graph.nodes
        for node_id in nodes if instance.body is None else self._nodes_in(instance.body):
            if instance in self.instances_of(nodes[node_id]):
                yield node_id

    def _nodes_in(self, body: BodyRef) -> Iterator[str]:
        for node_id in self._graph.body_nodes(body.control).get(body.part, ()):
            yield node_id
            yield from self._graph.descendants(node_id)

    def _jobs_of(self, node: Node) -> list[str]:
        jobs = self._graph.jobs
        return [job for job in enclosing_jobs(jobs, node.job) if jobs[job].timeout_s is not None]


def enclosing_jobs(jobs: Mapping[str, Job], job: str) -> Iterator[str]:
    """Yield a job and those around it. All jobs are below `main`."""
    while job != "main":
        yield job
        job = jobs[job].parent or "main"
    yield job


def _common(left: tuple[BodyRef, ...], right: tuple[BodyRef, ...]) -> tuple[BodyRef, ...]:
    """Return the longest common beginning of two paths."""
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    return tuple(body for body, _ in pairs)
