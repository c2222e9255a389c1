"""Values are sent as JSON and decode to equal values, or are rejected."""

from __future__ import annotations

import datetime
import math
from collections import Counter, OrderedDict
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.prompt_values import StringPromptValue
from pydantic import BaseModel, PrivateAttr, RootModel

from conure.adapters.langchain.chat.json_values import EncodedValue, LocalValues, decode, encode
from conure.server.program.errors import ProgramError

CALL = {"name": "add", "args": {"a": 1}, "id": "c1", "type": "tool_call"}


class Order(BaseModel):
    tea: str
    boxes: tuple[int, ...]
    inner: Order | None = None


@dataclass(frozen=True)
class Point:
    x: int
    label: tuple[str, int]


class Colour(Enum):
    RED = "red"


@dataclass
class Sentence:
    text: str

    def __post_init__(self) -> None:
        self.words = self.text.split()


@dataclass
class Measured:
    text: str

    @cached_property
    def length(self) -> int:
        return len(self.text)


class Note(HumanMessage):
    """A message class of an application."""


class Patch(BaseModel):
    name: str | None = None
    age: int | None = None


class Open(Patch, extra="allow"):
    @cached_property
    def length(self) -> int:
        return len(self.name or "")


class Names(RootModel[list[str]]):
    pass


class Counted(BaseModel):
    words: list[str]
    _num_words: int = PrivateAttr(0)

    def model_post_init(self, context: Any) -> None:
        self.words.append("end")
        self._num_words = len(self.words)


class Secret(BaseModel):
    """Does not equal its copies."""

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = None  # type: ignore[assignment]  # as pydantic has it


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)
VALUES = st.recursive(
    JSON,
    lambda inner: st.tuples(inner, inner) | st.dictionaries(st.integers(), inner, max_size=3),
)


@given(JSON)
def test_json_is_sent_as_it_is(value: Any) -> None:
    assert encode(value, what="it") == value
    assert encode(value, what="it", is_plain=True) == value


@given(VALUES)
def test_decoded_values_are_equal(value: Any) -> None:
    assert decode(encode(value, what="it")) == value


@pytest.mark.parametrize(
    "value",
    [
        {"history": [HumanMessage("a", name="n"), AIMessage("b", tool_calls=[CALL])]},
        [Document(page_content="x", metadata={"page": (1, 2)}, id="7")],
        Order(tea="oolong", boxes=(1, 2), inner=Order(tea="sencha", boxes=())),
        Point(1, ("a", 2)),
        {"colour": Colour.RED},
        StringPromptValue(text="prompt"),
        {1: "one", (2, 3): "pair"},
        AIMessage("x", additional_kwargs={"range": (1, 2)}),
        ToolMessage("x", tool_call_id="1", artifact=Point(1, ("a", 2))),
        Note(content="x"),
        Open(name="Ann", city="Oslo"),  # type: ignore[call-arg]  # an extra field
        Names(["Ann"]),
        Counted(words=["a"]),
    ],
)
def test_decoded_objects_have_their_class(value: Any) -> None:
    sent = msgspec.json.encode(encode(value, what="it"))
    restored = decode(msgspec.json.decode(sent))
    assert restored == value
    assert type(restored) is type(value)
    with pytest.raises(ProgramError, match="for a prompt"):
        encode([value], what="it", is_plain=True)


def test_a_decoded_object_has_the_fields_that_were_set() -> None:
    for value in (Patch(name="Ann"), Open(age=3, city="Oslo"), Patch(name=None, age=None)):  # type: ignore[call-arg]  # an extra field
        restored = decode(encode(value, what="it"))
        assert restored.model_dump(exclude_unset=True) == value.model_dump(exclude_unset=True)
        assert restored.model_fields_set == value.model_fields_set


def test_hooks_of_a_decoded_object_do_not_run_again() -> None:
    restored = decode(encode(Counted(words=["a"]), what="it"))
    assert (restored.words, restored._num_words) == (["a", "end"], 2)


def test_a_cached_property_of_an_object_is_no_field() -> None:
    value = Open(name="Ann")
    assert value.length == 3
    assert decode(encode(value, what="it")).model_extra == {}


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({1, 2}, "set"),
        (b"x", "bytes"),
        (math.nan, "float"),
        (datetime.date(2020, 1, 1), "date"),
        (Secret(), "Secret"),
        (Sentence("a b"), "Sentence"),
    ],
)
def test_other_values_are_rejected_or_stay_in_the_process(value: Any, kind: str) -> None:
    with pytest.raises(ProgramError, match=rf"it\['a'\]\[1\] is a {kind}"):
        encode({"a": [0, value]}, what="it")
    local = LocalValues()
    with local.active():
        sent = encode({"a": [0, value]}, what="it")
        assert decode(sent)["a"][1] is value
    with pytest.raises(ProgramError, match="known to the process"):
        decode(sent)
    with LocalValues().active(), pytest.raises(ProgramError, match="another run"):
        decode(sent)


@pytest.mark.parametrize(
    "value",
    [
        {"__langchain_tuple__": [1, 2]},
        {"__langchain_object__": "builtins:object", "value": {}},
        [{"__langchain_local__": "a", "other": {"__langchain_items__": 3}}],
    ],
)
def test_dict_with_a_reserved_key_decodes_to_a_dict(value: Any) -> None:
    assert decode(encode(value, what="it")) == value
    assert encode(value, what="it", is_plain=True) == value


def test_encoded_value_is_not_converted_again() -> None:
    row = encode((1, 2), what="it")
    assert decode(encode(EncodedValue([row]), what="it")) == [(1, 2)]


def test_number_of_a_subclass_is_sent_as_a_number() -> None:
    class Score(float):
        pass

    assert msgspec.json.encode(encode([Score(1.5)], what="it")) == b"[1.5]"


@pytest.mark.parametrize("value", [Counter("aab"), OrderedDict(a=1), 2**64, -(2**63) - 1])
def test_value_that_json_would_change_stays_in_the_process(value: Any) -> None:
    assert encode([value], what="it") == [value], "as JSON, if it leaves the process"
    with LocalValues().active():
        assert decode(encode([value], what="it"))[0] is value
        assert encode([value], what="it", is_plain=True) == [value]


@pytest.mark.parametrize("value", [2**64 - 1, -(2**63), True, {"a": "é"}])
def test_value_that_json_has_is_sent_from_within_the_process(value: Any) -> None:
    with LocalValues().active():
        assert encode(value, what="it") == value


@pytest.mark.parametrize("value", ["a\ud83d", {"a\ud83d": 1}])
def test_half_of_a_surrogate_pair_is_named_or_stays_in_the_process(value: Any) -> None:
    with pytest.raises(ProgramError, match=r"it\[0\].* has half of a surrogate pair"):
        encode([value], what="it")
    with LocalValues().active():
        assert decode(encode([value], what="it")) == [value]


def test_cached_property_is_computed_again() -> None:
    value = Measured("tea")
    assert value.length == 3
    restored = decode(encode(value, what="it"))
    assert (restored, restored.length) == (value, 3)


def test_content_of_a_message_that_json_cannot_carry_is_named() -> None:
    message = ToolMessage("x", tool_call_id="1", artifact={1, 2})
    with pytest.raises(ProgramError, match=r"it\['data'\]\['artifact'\] is a set"):
        encode(message, what="it")
    with LocalValues().active():
        assert decode(encode(message, what="it")) == message


def test_class_that_is_not_loaded_is_named() -> None:
    with pytest.raises(ProgramError, match="not loaded the class nowhere:Nothing"):
        decode({"__langchain_object__": "nowhere:Nothing", "value": {}})
