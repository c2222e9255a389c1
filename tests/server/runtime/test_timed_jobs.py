"""The instances of jobs with a timeout."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from conure.server.program.graph.instances import BodyTemplate
from conure.server.program.ir import Append
from conure.server.program.nodes.bodies import BodyRef
from conure.server.program.nodes.control.base import TemplateNode
from conure.server.runtime.program_state import ProgramState
from conure.server.runtime.timed_jobs import JobInstance

from ..inprocess import client
from .test_program_state import execute

JOBS = {"j": {"timeout_s": 4}, "outer": {"timeout_s": 9}, "free": {"parent": "j"}}


def map_(name: str, *body: Any, **fields: Any) -> dict[str, Any]:
    return {"id": name, "op": "map", "items": [1, 2], "as": f"{name}_x", "body": body, **fields}


def add_item(state: ProgramState, node_id: str, index: int) -> None:
    node = state.graph.nodes[node_id]
    assert isinstance(node, TemplateNode)
    template = BodyTemplate(node_id, node.bodies()[0].nodes)
    state.grow(template.instantiate(str(index), f".{index}", {f"{node_id}_x": index}))


def instances(state: ProgramState, node_id: str) -> dict[str, BodyRef | None]:
    return dict(state.timed_jobs.instances_of(state.graph.nodes[node_id]))


@pytest.mark.parametrize(
    ("job", "found"),
    [
        ("j", {"j": BodyRef("inner.1", "0")}),
        ("free", {"j": BodyRef("inner.1", "0")}),
        ("outer", {"outer": BodyRef("m", "1")}),
        ("main", {}),
    ],
)
def test_a_job_has_an_instance_in_each_instance_of_the_body_around_it(
    job: str, found: dict[str, BodyRef]
) -> None:
    inner = map_("inner", client("a", "x", job=job))
    state = execute([map_("m", inner, client("b", "y", job="outer"))], jobs=JOBS)
    add_item(state, "m", 1)
    add_item(state, "inner.1", 0)
    assert instances(state, "a.1.0") == found
    for name, body in found.items():
        assert "a.1.0" in state.timed_jobs.nodes_in(JobInstance(name, body))


def test_a_job_that_nodes_outside_of_a_body_share_has_one_instance() -> None:
    nodes = [map_("m", client("a", "x", job="j")), client("b", "y", job="j")]
    state = execute(nodes, jobs=JOBS)
    add_item(state, "m", 0)
    assert instances(state, "a.0") == instances(state, "b") == {"j": None}
    assert list(state.timed_jobs.nodes_in(JobInstance("j", None))) == ["b", "a.0"]


def test_a_job_keeps_its_instances_if_nodes_are_appended_to_it() -> None:
    state = execute([map_("m", client("a", "x", job="j"))], jobs=JOBS, is_open=True)
    add_item(state, "m", 0)
    state.append(msgspec.convert({"nodes": [client("b", "y", job="j")]}, Append))
    assert instances(state, "a.0") == {"j": BodyRef("m", "0")}
    assert instances(state, "b") == {"j": None}
