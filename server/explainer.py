"""Explains programs before and after their runs."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from .program.decoding.typed_json import decode_record
from .program.errors import NotFoundError
from .program.explanation.explain import ModelLimits, explain, with_actual
from .program.explanation.records import ProgramExplanation
from .program.graph.graph import graph_of
from .program.ir import ProcedureNode, Submission
from .program.nodes.bodies import walk
from .runtime.admission.intake import ProgramIntake
from .runtime.calls.pins import PinKeeper
from .runtime.persistence.program_directory import ProgramDirectory
from .runtime.services import RuntimeServices

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
        explanation = await asyncio.to_thread(explain, submission, graph, self._limits())
        return self._with_pins(explanation, submission, tenant)

    async def explain_run(self, program: str, *, tenant: str) -> ProgramExplanation:
        """Explain a submitted program with its figures."""
        status = await self._programs.status(program, tenant)
        stored = await self._programs.journal.load_program(tenant, program)
        if stored is None:
            raise NotFoundError("program.not_found", f"there is no program {program}")
        submission = decode_record(stored.body, Submission)
        graph = graph_of(submission)
        explanation = await asyncio.to_thread(explain, submission, graph, self._limits())
        return with_actual(self._with_pins(explanation, submission, tenant), status)

    def _with_pins(
        self, explanation: ProgramExplanation, submission: Submission, tenant: str
    ) -> ProgramExplanation:
        """Return an explanation with the pins of the procedures that a program calls or is."""
        called = [
            node.procedure.partition("@")[2]
            for _, node in walk(submission.program.nodes, "")
            if isinstance(node, ProcedureNode)
        ]
        pins = self._pins.costs_of(tenant, [*called, explanation.version])
        return msgspec.structs.replace(explanation, pins=pins)

    def _limits(self) -> ModelLimits:
        model = self._services.model

        def count_tokens(text: str) -> int:
            starts = range(0, len(text), COUNTED_CHARS)
            parts = (text[start : start + COUNTED_CHARS] for start in starts)
            return sum(len(model.tokenizer.encode_text(part)) for part in parts)

        return ModelLimits(count_tokens, model.max_len)
