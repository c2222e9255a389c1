"""Explains programs before and after their runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import msgspec

from .program.decoding.typed_json import decode_record
from .program.errors import NotFoundError
from .program.explanation.explain import ModelLimits, explain, with_actual
from .program.explanation.records import ProgramExplanation
from .program.graph.graph import graph_of
from .program.ir import ProcedureNode, Submission
from .program.nodes.bodies import walk
from .program.status import NodeStatus, ProgramStatus
from .runtime.admission.intake import ProgramIntake
from .runtime.calls.pins import PinKeeper
from .runtime.persistence.program_directory import ProgramDirectory
from .runtime.program_run import MAX_NODES_INLINE, ProgramRun
from .runtime.reporting.status import node_status, program_status, stored_status
from .runtime.services import RuntimeServices
from .store.journal import StoredProgram

COUNTED_CHARS: Final = 65_536
"""Characters whose tokens are counted at once, so that memory is bounded. A longer text is
counted in parts, each of which may have a token more."""


class ProgramExplainer:
    """Implements `ExplanationService`."""

    def __init__(
        self,
        intake: ProgramIntake,
        programs: ProgramDirectory,
        services: RuntimeServices,
        pins: PinKeeper,
    ) -> None:
        self._intake = intake
        self._programs = programs
        self._services = services
        self._pins = pins

    async def explain(
        self, submission: Submission, *, body: bytes, tenant: str
    ) -> ProgramExplanation:
        """Explain a program without running it."""
        submission, graph = await self._intake.check(submission, body, tenant)
        limits = self._limits()
        explanation, called = await self._services.turns.in_thread(
            lambda: (explain(submission, graph, limits), _called_versions(submission))
        )
        return self._with_pins(explanation, called, tenant)

    async def explain_run(self, program: str, *, tenant: str) -> ProgramExplanation:
        """Explain a submitted program with its figures."""
        run = self._programs.find(program, tenant)
        stored = await self._load(program, tenant, is_live=run is not None)
        live = None if run is None else await _live_status(run)
        limits = self._limits()

        def explain_stored() -> tuple[ProgramExplanation, list[str]]:
            submission = decode_record(stored.body, Submission)
            explanation = explain(submission, graph_of(submission), limits)
            status = stored_status(stored) if live is None else live
            return with_actual(explanation, status), _called_versions(submission)

        explanation, called = await self._services.turns.in_thread(explain_stored)
        return self._with_pins(explanation, called, tenant)

    async def _load(self, program: str, tenant: str, *, is_live: bool) -> StoredProgram:
        """Return a program from the journal; one that is not in memory has ended.

        Raises:
            NotFoundError: `program.not_found`.
        """
        if not is_live:
            return await self._programs.load(program, tenant)
        stored = await self._programs.journal.load_program(tenant, program)
        if stored is None:
            raise NotFoundError("program.not_found", f"there is no program {program}")
        return stored

    def _with_pins(
        self, explanation: ProgramExplanation, called: Sequence[str], tenant: str
    ) -> ProgramExplanation:
        """Return an explanation with the pins of the procedures that a program calls or is."""
        pins = self._pins.costs_of(tenant, [*called, explanation.version])
        return msgspec.structs.replace(explanation, pins=pins)

    def _limits(self) -> ModelLimits:
        model = self._services.model

        def count_tokens(text: str) -> int:
            starts = range(0, len(text), COUNTED_CHARS)
            parts = (text[start : start + COUNTED_CHARS] for start in starts)
            return sum(len(model.tokenizer.encode_text(part)) for part in parts)

        return ModelLimits(count_tokens, model.max_len)


def _called_versions(submission: Submission) -> list[str]:
    """Return the versions of the procedures that a program calls."""
    return [
        node.procedure.partition("@")[2]
        for _, node in walk(submission.program.nodes, "")
        if isinstance(node, ProcedureNode)
    ]


async def _live_status(run: ProgramRun) -> ProgramStatus:
    """Return the status of a program in memory without variables. Other requests run meanwhile."""
    receipt = run.receipt if run.outbox.has_ended else None
    head = program_status(run.state, run.outbox.durable_variables, receipt, names=(), nodes=())
    nodes: dict[str, NodeStatus] = {}
    for i, (node_id, state) in enumerate(list(run.state.nodes.items())):
        if i % MAX_NODES_INLINE == 0:
            await asyncio.sleep(0)
        nodes[node_id] = node_status(state)
    return msgspec.structs.replace(head, nodes=nodes)
