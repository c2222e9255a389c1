"""Passages: short reports made of facts, with questions about each fact.

A fact is one sentence that names its key before its value ("The guard was Mira Tosk."). A passage
is a few facts with different keys in random order.

Invariant: no two facts of a passage answer the same question.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from words import ANIMALS, FRUITS, TOOLS, Words


class Task(StrEnum):
    """Kind of question."""

    EXTRACT = "extract"
    LIST = "list"
    YES_NO = "yes_no"
    CHECK = "check"
    SAME = "same"
    COPY = "copy"
    REWRITE = "rewrite"
    REDUCE = "reduce"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a passage, in several wordings, and its answer."""

    task: Task
    wordings: tuple[str, ...]
    answer: str


@dataclass(frozen=True, slots=True)
class Fact:
    """One sentence of a passage and the questions that it answers."""

    key: str
    """Subject of the fact, and its key in JSON."""
    sentence: str
    value: str
    questions: tuple[Question, ...]
    wrong: str | None = None
    """Another value of the same kind. None if the value is not used in checks and JSON."""


ROLES: Final = (
    *(
        "inspector driver guard captain owner nurse pilot clerk engineer farmer teacher guide"
    ).split(),
    *("cook mayor judge porter").split(),
)
ROLE_SENTENCES: Final = (
    "The {role} was {value}.",
    "The {role} on duty was {value}.",
    "The {role} is called {value}.",
    "The name of the {role} is {value}.",
)
ROLE_QUESTIONS: Final = (
    "Who was the {role}?",
    "Who is the {role}?",
    "What is the name of the {role}?",
    "Name the {role}.",
)
PLACE_SENTENCES: Final = ("It happened in {value}.", "The place was {value}.")
PLACE_QUESTIONS: Final = ("Where did it happen?", "What was the place?", "Name the place.")
DATE_SENTENCES: Final = ("The date was {value}.", "The report was written on {value}.")
DATE_QUESTIONS: Final = ("What was the date?", "When was the report written?", "Name the date.")
CAUSE_SENTENCES: Final = ("The cause was a {value}.", "It was caused by a {value}.")
CAUSE_QUESTIONS: Final = ("What was the cause?", "What caused it?", "Name the cause.")
COST_SENTENCES: Final = ("The damage was {value}.", "The damage came to {value}.")
COST_QUESTIONS: Final = ("How much was the damage?", "What was the damage?", "Name the damage.")
COUNTED: Final = ("barrels", "boxes", "letters", "tickets", "tables", "bottles")
COUNT_SENTENCES: Final = ("The number of {role} was {value}.",)
COUNT_QUESTIONS: Final = ("How many {role} were there?", "What was the number of {role}?")
HURT_SENTENCES: Final = ("One person was hurt: {value}.", "The accident hurt {value}.")
HURT_QUESTIONS: Final = ("Who was hurt?", "Name the person who was hurt.")
HURT_CHECKS: Final = ("Was anyone hurt?", "Was somebody hurt?")
NOBODY: Final = "nobody"

LISTS: Final = ("witnesses", "guests", "passengers", "helpers", "stops", "villages")
NOUN_LISTS: Final = {"tools": TOOLS, "animals": ANIMALS, "fruits": FRUITS}
LIST_SENTENCES: Final = ("The {role} were {value}.", "These were the {role}: {value}.")
LIST_QUESTIONS: Final = ("List the {role}.", "Name all {role}.", "Give a list of the {role}.")

DIRECTORY_ROLES: Final = ("doctor", "baker", "smith", "plumber", "priest")

FLAGS: Final = (
    ("road", "The road was closed.", "The road stayed open.", "Was the road closed?"),
    ("police", "The police came.", "The police did not come.", "Did the police come?"),
    ("alarm", "The alarm rang.", "The alarm stayed silent.", "Did the alarm ring?"),
    ("gate", "The gate was locked.", "The gate was not locked.", "Was the gate locked?"),
    ("train", "The train was late.", "The train was on time.", "Was the train late?"),
    ("lights", "The lights were on.", "The lights were off.", "Were the lights on?"),
    ("letter", "A letter was found.", "No letter was found.", "Was a letter found?"),
    ("repair", "The repair is finished.", "The repair is not finished.", "Is the repair finished?"),
    ("bridge", "The bridge is safe.", "The bridge is not safe.", "Is the bridge safe?"),
    (
        "insurance",
        "The insurance will pay.",
        "The insurance will not pay.",
        "Will the insurance pay?",
    ),
)
CHECK: Final = (
    "The question was: {question}\nThe answer was: {answer}\nWhat is right, and is that the same?"
)
VERDICT: Final = "{value}, so {verdict}."
"""The right answer precedes the verdict, so that the model can attend to it."""


def joined(values: Sequence[str]) -> str:
    """Return the values as an enumeration: "a, b and c"."""
    return values[0] if len(values) == 1 else f"{', '.join(values[:-1])} and {values[-1]}"


def passage(words: Words, num_facts: int) -> list[Fact]:
    """Return the facts of a report, in the order of its sentences."""
    rng = words.rng
    makers = (
        *(_role,) * 6,
        *(_simple,) * 4,
        *(_hurt,) * 2,
        *(_list,) * 3,
        *(_flag,) * 3,
        _directory,
    )
    facts: list[Fact] = []
    keys: set[str] = set()
    while len(facts) < num_facts:
        new = rng.choice(makers)(words)
        new_keys = {fact.key.partition(" ")[0] for fact in new}
        if not keys & new_keys:
            keys |= new_keys
            facts += new
    rng.shuffle(facts)
    return facts


def _filled(forms: Sequence[str], **values: str) -> tuple[str, ...]:
    return tuple(form.format(**values) for form in forms)


def _single(
    words: Words,
    key: str,
    value: str,
    sentences: Sequence[str],
    questions: Sequence[str],
    other: str,
) -> Fact:
    """Return a fact with one value, which questions, checks and JSON can use."""
    wordings = _filled(questions, role=key)
    sentence = words.rng.choice(sentences).format(role=key, value=value)
    return Fact(key, sentence, value, (Question(Task.EXTRACT, wordings, value),), other)


def _role(words: Words) -> list[Fact]:
    key = words.rng.choice(ROLES)
    return [_single(words, key, words.person(), ROLE_SENTENCES, ROLE_QUESTIONS, words.person())]


def _simple(words: Words) -> list[Fact]:
    """Return a fact about a place, a date, a cause, a cost or a number."""
    kind = words.rng.choice(("place", "place", "date", "cause", "damage", "number"))
    draw, sentences, questions = _simple_kinds(words)[kind]
    if kind == "number":
        kind = words.rng.choice(COUNTED)
    return [_single(words, kind, draw(), sentences, questions, draw())]


def _simple_kinds(
    words: Words,
) -> dict[str, tuple[Callable[[], str], tuple[str, ...], tuple[str, ...]]]:
    """Return, for each kind: how to draw a value, sentences, questions."""
    return {
        "place": (words.place, PLACE_SENTENCES, PLACE_QUESTIONS),
        "date": (words.date, DATE_SENTENCES, DATE_QUESTIONS),
        "cause": (words.cause, CAUSE_SENTENCES, CAUSE_QUESTIONS),
        "damage": (lambda: f"{words.number()} crowns", COST_SENTENCES, COST_QUESTIONS),
        "number": (words.number, COUNT_SENTENCES, COUNT_QUESTIONS),
    }


def _hurt(words: Words) -> list[Fact]:
    is_hurt = words.rng.random() < 0.5
    value = words.person() if is_hurt else NOBODY
    sentence = "Nobody was hurt."
    if is_hurt:
        sentence = words.rng.choice(HURT_SENTENCES).format(value=value)
    questions = (
        Question(Task.EXTRACT, HURT_QUESTIONS, value),
        Question(Task.YES_NO, HURT_CHECKS, "yes" if is_hurt else "no"),
    )
    return [Fact("hurt", sentence, value, questions)]


def _flag(words: Words) -> list[Fact]:
    key, true, false, wording = words.rng.choice(FLAGS)
    is_true = words.rng.random() < 0.5
    question = Question(Task.YES_NO, (wording,), "yes" if is_true else "no")
    return [Fact(key, true if is_true else false, question.answer, (question,))]


def _list(words: Words) -> list[Fact]:
    rng = words.rng
    kind = rng.choice((*LISTS, *NOUN_LISTS))
    if kind in NOUN_LISTS:
        values = words.several(lambda: rng.choice(NOUN_LISTS[kind]), 2, 4)
    elif kind in ("stops", "villages"):
        values = words.several(words.place, 2, 4)
    else:
        values = words.several(words.person, 2, 4)
    sentence = rng.choice(LIST_SENTENCES).format(role=kind, value=joined(values))
    question = Question(Task.LIST, _filled(LIST_QUESTIONS, role=kind), ", ".join(values))
    return [Fact(kind, sentence, question.answer, (question,))]


def _directory(words: Words) -> list[Fact]:
    """Return facts about people with the same job in several places."""
    role = words.rng.choice(DIRECTORY_ROLES)
    facts = []
    for place in words.several(words.place, 2, 3):
        value = words.person()
        wordings = (f"Who is the {role} in {place}?", f"Name the {role} in {place}.")
        questions = (Question(Task.EXTRACT, wordings, value),)
        facts.append(
            Fact(f"{role} {place}", f"The {role} in {place} is {value}.", value, questions)
        )
    return facts
