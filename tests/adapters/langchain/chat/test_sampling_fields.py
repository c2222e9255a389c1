"""Settings that follow the sampling parameters of programs."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta
from pydantic import BaseModel, ValidationError

from conure.adapters.langchain.chat.sampling_fields import with_sampling_fields


class Parameters(msgspec.Struct):
    rate: Annotated[float, Meta(gt=0, le=2)] = 1.0
    words: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=2)] = []
    limit: Annotated[int, Meta(ge=1)] | None = None


class Settings(BaseModel):
    name: str = "default"


Model: Any = with_sampling_fields(Settings, Parameters)


def test_each_parameter_is_a_field_without_a_value() -> None:
    assert Model().model_dump() == {"name": "default", "rate": None, "words": None, "limit": None}


def test_values_within_the_bounds_are_kept() -> None:
    given = {"rate": 2.0, "words": ["a", "b"], "limit": 1}
    assert Model(**given).model_dump(exclude={"name"}) == given


@pytest.mark.parametrize(
    "given", [{"rate": 0}, {"rate": 2.5}, {"words": [""]}, {"words": ["a"] * 3}, {"limit": 0}]
)
def test_values_outside_the_bounds_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Model(**given)


def test_a_subclass_may_declare_a_field_again() -> None:
    class Declared(Model):  # type: ignore[misc]
        rate: float | None = None

    assert Declared(rate=5).rate == 5
