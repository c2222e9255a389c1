"""Explains programs before and after their runs."""

from __future__ import annotations

import asyncio

import msgspec

from .program.errors import NotFoundError
from .program.explanation.explain import ModelLimits, explain, with_actual
from .program.explanation.records import ProgramExplanation
from .program.graph.graph import graph_of
from .program.ir import Submission
from .runtime.admission.intake import ProgramIntake
from .runtime.persistence.program_directory import ProgramDirectory
from .runtime.services import RuntimeServices


class ProgramExplainer:
    """Implements `ExplanationService`."""

    def __init__(
        self, intake: ProgramIntake, programs: ProgramDirectory, services: RuntimeServices
    ) -> None:
        self._intake = intake
        self._programs = programs
        self._services = services

    async def explain(
        self, submission: Submission, *, body: bytes, tenant: str
    ) -> ProgramExplanation:
        """Explain a program without running it."""
        submission, graph = await self._intake.check(submission, body, tenant)
        return await asyncio.to_thread(explain, submission, graph, self._limits())

    async def explain_run(self, program: str, *, tenant: str) -> ProgramExplanation:
        """Explain a submitted program with its figures."""
        status = await self._programs.status(program, tenant)
        stored = await self._programs.journal.load_program(tenant, program)
        if stored is None:
            raise NotFoundError("program.not_found", f"there is no program {program}")
        submission = msgspec.json.decode(stored.body, type=Submission)
        graph = graph_of(submission)
        explanation = await asyncio.to_thread(explain, submission, graph, self._limits())
        return with_actual(explanation, status)

    def _limits(self) -> ModelLimits:
        model = self._services.model

        def count_tokens(text: str) -> int:
            return len(model.tokenizer.encode_text(text)) if text else 0

        return ModelLimits(count_tokens, model.max_len)
