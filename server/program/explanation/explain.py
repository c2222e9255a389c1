"""The explanation of a program, before or after its run.

Out of scope: engines, and what they have in their caches.

Invariant: the same program, inputs and tokenizer give the same explanation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec import UNSET

from ..graph.graph import Graph
from ..graph.objectives import PerformanceObjective, get_perf_objective
from ..ir import Deadline, Objective, Submission
from ..nodes import GenerateNode, Node
from ..nodes.bodies import walk
from ..nodes.control.base import TemplateNode
from ..procedures import version_of
from ..status import NodeStatus, OutputTokens, ProgramStatus, PromptTokens
from .advice import advise
from .prompts import CallPrompt, CountTokens, PromptReader, prompt_tokens, shared_spans
from .records import Edge, ExplainedNode, ProgramExplanation, WorstCase
from .worst_case import Repetition, known_values, largest, repetitions


class ModelLimits(NamedTuple):
    """What an explanation needs of the model."""

    count_tokens: CountTokens
    max_len: int
    """Tokens of context."""


def explain(submission: Submission, graph: Graph, model: ModelLimits) -> ProgramExplanation:
    """Return the explanation of a checked program.

    Args:
        submission: the program with its inputs; procedure calls are expanded.
        graph: its graph.
        model: the model that runs it.
    """
    program, inputs = submission.program, submission.inputs
    known = known_values(program.nodes, inputs)
    runs = repetitions(program.nodes, known)
    reader = PromptReader(inputs, graph.definitions, model.count_tokens)
    calls = [node for _, node in walk(program.nodes, "") if isinstance(node, GenerateNode)]
    prompts = {
        node.id: reader.read(node, runs.times[node.id], runs.varying[node.id]) for node in calls
    }
    objectives = get_perf_objective(graph)
    nodes = _explain_nodes(program.nodes, prompts, runs, objectives, model)
    groups: dict[str, list[str]] = {}
    for node in nodes:
        if node.group is not None:
            groups.setdefault(node.group, []).append(node.id)
    return ProgramExplanation(
        name=program.name,
        version=version_of(program),
        outputs={name: _objective_text(each) for name, each in graph.objectives.items()},
        nodes=nodes,
        edges=_edges(graph),
        groups=groups,
        shared=shared_spans(prompts.values()),
        worst_case=_worst_case(program.nodes, runs, prompts, model),
        advice=advise(graph, program.nodes, list(prompts.values())),
    )


def with_actual(explanation: ProgramExplanation, status: ProgramStatus) -> ProgramExplanation:
    """Return the explanation with the figures of a run; instances count for their template."""
    sums: dict[str, list[NodeStatus]] = {}
    for node_id, node in status.nodes.items():
        sums.setdefault(node_id.partition(".")[0], []).append(node)
    nodes = [_with_figures(node, sums.get(node.id, [])) for node in explanation.nodes]
    return msgspec.structs.replace(explanation, nodes=nodes, receipt=status.receipt)


def _with_figures(node: ExplainedNode, instances: Sequence[NodeStatus]) -> ExplainedNode:
    prompts = [each.prompt_tokens for each in instances if each.prompt_tokens is not UNSET]
    outputs = [each.output_tokens for each in instances if each.output_tokens is not UNSET]
    num_runs = sum(each.attempt > 0 for each in instances)
    if node.op != "generate":
        return msgspec.structs.replace(node, actual_runs=num_runs)
    return msgspec.structs.replace(
        node,
        actual_runs=num_runs,
        actual_prompt=PromptTokens(
            logical=sum(each.logical for each in prompts),
            computed=sum(each.computed for each in prompts),
            shared=sum(each.shared for each in prompts),
        ),
        actual_output=OutputTokens(
            decoded=sum(each.decoded for each in outputs),
            forced=sum(each.forced for each in outputs),
            discarded=sum(each.discarded for each in outputs),
        ),
    )


def _objective_text(objective: Objective) -> str:
    if isinstance(objective, Deadline):
        return f"deadline {objective.deadline_s:g} s"
    return objective


def _explain_nodes(
    nodes: Sequence[Node],
    prompts: Mapping[str, CallPrompt],
    runs: Repetition,
    objectives: Mapping[str, PerformanceObjective],
    model: ModelLimits,
    inside: str | None = None,
    template: str | None = None,
) -> list[ExplainedNode]:
    """Return the nodes in order, each followed by those in its bodies."""
    explained: list[ExplainedNode] = []
    for node in nodes:
        slots = node.make_slots()
        reads = {name for slot in slots for name in slot.reads}
        described = ExplainedNode(
            id=node.id,
            op=node.op(),
            inside=inside,
            job=node.job,
            reads=sorted(reads - {name for slot in slots for name in slot.writes}),
            writes=[name for name in node.written_variables() if "." not in name],
            after=list(node.after),
            times=runs.times[node.id],
        )
        if isinstance(node, GenerateNode):
            objective = objectives.get(node.id)
            described = msgspec.structs.replace(
                described,
                # The calls of a template are grouped with its instances.
                objective="latency" if objective is None else objective.kind,
                group=template if objective is None else objective.group,
                calls_after=0 if objective is None else objective.depth,
                prompt=prompt_tokens(prompts[node.id]),
                max_output_tokens=_max_output(node, model),
            )
        explained.append(described)
        is_template = isinstance(node, TemplateNode)
        for body in node.bodies():
            explained += _explain_nodes(
                body.nodes,
                prompts,
                runs,
                objectives,
                model,
                node.id,
                node.id if is_template else template,
            )
    return explained


def _max_output(node: GenerateNode, model: ModelLimits) -> int:
    """Return the largest number of tokens that the outputs of a call may have."""
    if node.prompt is not UNSET:
        limits = [each.max_tokens for each in node.prompt if each.output is not UNSET]
    else:
        limits = [] if node.output is UNSET else [node.output.max_tokens]
    # Without a limit, an output may have what its prompt leaves of the context.
    total = sum(model.max_len if limit is None else limit for limit in limits)
    return min(total, model.max_len)


def _edges(graph: Graph) -> list[Edge]:
    found = {
        (slot.node, later.node)
        for slot in graph.topological()
        for later in graph.successors(slot)
        if slot.node != later.node
    }
    return [Edge(source=source, target=target) for source, target in sorted(found)]


def _worst_case(
    nodes: Sequence[Node],
    runs: Repetition,
    prompts: Mapping[str, CallPrompt],
    model: ModelLimits,
) -> WorstCase:
    generated = {
        name: _max_output(prompt.node, model)
        for prompt in prompts.values()
        for name in prompt.node.written_variables()
    }
    prompt_cost: dict[str, int] = {}
    for node_id, prompt in prompts.items():
        known = prompt_tokens(prompt)
        values = sum(generated.get(name, model.max_len) for name in known.values)
        num_outputs = len(prompt.node.make_slots())
        prompt_cost[node_id] = min(known.tokens + values, model.max_len) * num_outputs
    return WorstCase(
        calls=largest(nodes, runs.rounds, dict.fromkeys(prompts, 1)),
        output_tokens=largest(
            nodes,
            runs.rounds,
            {key: _max_output(each.node, model) for key, each in prompts.items()},
        ),
        prompt_tokens=largest(nodes, runs.rounds, prompt_cost),
    )
