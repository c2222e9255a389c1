"""The constraint validator: what an engine's answer about a constraint means for a program."""

from __future__ import annotations

from typing import Any, cast

import pytest

from conure.engine import protocol
from conure.engine.core.engine import EngineCore
from conure.engine.testing.scripted_runner import FakeRunner
from conure.server.engines.constraint_validator import ConstraintValidator
from conure.server.engines.protocol import Engine
from conure.server.program.errors import ProgramError, UnavailableError

FAILURES = ["constraint.unavailable", "constraint.failed"]


class AnsweringEngine:
    """An engine that gives the same answer about every constraint."""

    is_alive = True

    def __init__(self, code: str) -> None:
        self.code = code
        self.num_requests = 0
        hello = EngineCore(FakeRunner(), 1).hello()
        hello.capabilities.append("constraints")
        self.hello = hello

    async def validate_constraint(self, constraint: str, text: str | None) -> protocol.Checked:
        self.num_requests += 1
        return protocol.Checked(1, self.code, "a reason")


def validator_of(engine: AnsweringEngine) -> ConstraintValidator:
    return ConstraintValidator(lambda: [cast(Engine, engine)])


async def rejection(validator: ConstraintValidator) -> tuple[Any, ...]:
    with pytest.raises(ProgramError) as caught:
        await validator.validate([("nodes.a", "a grammar")])
    return caught.value.code, caught.value.path


async def test_fault_of_a_constraint_is_cached_and_rejects_programs() -> None:
    engine = AnsweringEngine("constraint.too_complex")
    validator = validator_of(engine)
    for _ in range(2):
        assert await rejection(validator) == ("constraint.too_complex", "nodes.a")
    assert engine.num_requests == 1


@pytest.mark.parametrize("code", FAILURES)
async def test_failed_validation_rejects_no_program_and_is_not_cached(code: str) -> None:
    engine = AnsweringEngine(code)
    validator = validator_of(engine)
    await validator.validate([("nodes.a", "a grammar")])
    engine.code = "constraint.invalid"
    assert await rejection(validator) == ("constraint.invalid", "nodes.a")


@pytest.mark.parametrize("text", [None, "a text"])
@pytest.mark.parametrize("code", FAILURES)
async def test_failed_validation_is_no_answer_about_a_constraint(
    code: str, text: str | None
) -> None:
    with pytest.raises(UnavailableError) as caught:
        await validator_of(AnsweringEngine(code)).match("a grammar", text)
    assert (caught.value.code, caught.value.message) == (code, "a reason")
