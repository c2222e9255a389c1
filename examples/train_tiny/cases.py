"""Cases of training and evaluation: a system prompt, a user prompt and the one right answer.

All prompt templates are here. Cases about one passage are generated together, as their prompts
begin with the same text.

Invariant: the answer follows from the prompt alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from passages import CHECK, NOBODY, VERDICT, Fact, Question, Task, joined, passage
from words import Words

RULES: Final = (
    "You read reports.",
    "You are a careful reader.",
    "You are a helpful assistant.",
    "Answer briefly.",
    "Answer from the report alone.",
    "Use only what the report says.",
    "Give names as they are written.",
    "Do not explain.",
    "Do not guess.",
    "Say what is asked and nothing else.",
    "Keep to the facts.",
    "You write for a newspaper.",
    "Be exact with numbers and dates.",
    "Never add a word of your own.",
)
LAYOUTS: Final = (
    ("{passage}\n\n", "{question}"),
    ("Report: {passage}\n\n", "{question}"),
    ("Report: {passage}\n\n", "Question: {question}"),
)
COPY_FORMS: Final = (
    "Repeat this sentence: {text}",
    "Copy this sentence: {text}",
    "Write this sentence again: {text}",
)
PASSIVE_FORMS: Final = ("Rewrite in the passive: {text}", "Put this into the passive: {text}")
LETTER_FORMS: Final = (
    "Ask {person} to come to {place}.",
    "Write a line that asks {person} to come to {place}.",
)
REDUCE_FORMS: Final = (
    "Join these findings into one sentence:",
    "Join the findings:",
    "Put these findings together:",
)
SAME_FORMS: Final = ("Is this the same?", "Are these the same?", "Do these findings agree?")
MARKS: Final = ("- {text}", "{number}. {text}", "Report {number}: {text}")
VERBS: Final = tuple(
    "repaired painted opened closed cleaned moved checked loaded washed locked".split()
)
OBJECTS: Final = tuple("pump gate boat bridge house wagon door lamp bell clock roof well".split())


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt and its right answer."""

    task: Task
    system: str | None
    opening: str
    """Beginning of the user prompt, the same for all cases about one passage."""
    question: str
    """Rest of the user prompt."""
    answer: str

    def messages(self) -> list[dict[str, str]]:
        """Return the conversation as chat messages."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.opening + self.question}]


def about_passage(words: Words, num_facts: int, num_cases: int) -> list[Case]:
    """Return cases that share a system prompt and a passage."""
    rng = words.rng
    facts = passage(words, num_facts)
    opening, closing = rng.choice(LAYOUTS)
    opening = opening.format(passage=" ".join(fact.sentence for fact in facts))
    questions = [question for fact in facts for question in fact.questions]
    fields = [fact for fact in facts if fact.wrong is not None]
    questions += [_check(words, fact, facts) for fact in fields if rng.random() < 0.7]
    rng.shuffle(questions)
    questions = questions[:num_cases]
    if fields and rng.random() < 0.5:
        questions[0] = _as_json(words, fields)
    system = system_prompt(words)
    return [
        Case(
            question.task,
            system,
            opening,
            closing.format(question=rng.choice(question.wordings)),
            question.answer,
        )
        for question in questions
    ]


def about_texts(words: Words, num_cases: int) -> list[Case]:
    """Return cases without a passage that share a system prompt."""
    system = system_prompt(words)
    makers = (_copy, _passive, _letter, _same, _same, *(_reduce,) * 4)
    return [words.rng.choice(makers)(words, system) for _ in range(num_cases)]


def system_prompt(words: Words) -> str | None:
    """Return a few rules in random order, or None."""
    if words.rng.random() < 0.4:
        return None
    return " ".join(words.rng.sample(RULES, words.rng.randint(1, 4)))


def _check(words: Words, fact: Fact, facts: Sequence[Fact]) -> Question:
    """Ask whether an answer is right. Wrong ones are other values of the passage, or new ones."""
    rng = words.rng
    others = [each.value for each in facts if each.wrong is not None and each.value != fact.value]
    claimed = fact.value
    if rng.random() < 0.5:
        claimed = rng.choice(others) if others and rng.random() < 0.6 else str(fact.wrong)
    question = rng.choice(fact.questions[0].wordings)
    verdict = "yes" if claimed == fact.value else "no"
    return Question(
        Task.CHECK,
        (CHECK.format(question=question, answer=claimed),),
        VERDICT.format(value=fact.value, verdict=verdict),
    )


def _as_json(words: Words, fields: Sequence[Fact]) -> Question:
    chosen = words.rng.sample(fields, min(len(fields), words.rng.randint(1, 3)))
    keys = joined([f'"{fact.key}"' for fact in chosen])
    # Compact, like JSON under a schema constraint.
    values = {fact.key: fact.value for fact in chosen}
    answer = json.dumps(values, ensure_ascii=False, separators=(",", ":"))
    wordings = (f"Give JSON with the keys {keys}.", f"Write JSON with the keys {keys}.")
    return Question(Task.JSON, wordings, answer)


def _copy(words: Words, system: str | None) -> Case:
    rng = words.rng
    text = rng.choice(passage(words, 1)).sentence
    if rng.random() < 0.5:
        text = f"{words.person()} {rng.choice(VERBS)} the {rng.choice(OBJECTS)} in {words.place()}."
    return Case(Task.COPY, system, "", rng.choice(COPY_FORMS).format(text=text), text)


def _passive(words: Words, system: str | None) -> Case:
    rng = words.rng
    person, verb, thing = words.person(), rng.choice(VERBS), rng.choice(OBJECTS)
    prompt = rng.choice(PASSIVE_FORMS).format(text=f"{person} {verb} the {thing}.")
    return Case(Task.REWRITE, system, "", prompt, f"The {thing} was {verb} by {person}.")


def _letter(words: Words, system: str | None) -> Case:
    person, place = words.person(), words.place()
    prompt = words.rng.choice(LETTER_FORMS).format(person=person, place=place)
    return Case(Task.REWRITE, system, "", prompt, f"Dear {person}, please come to {place}.")


def _same(words: Words, system: str | None) -> Case:
    """Ask whether two findings are the same."""
    rng = words.rng
    draw = rng.choice((words.person, words.person, words.place, words.cause, words.number))
    first, second = words.several(draw, 2, 2)
    verdict = rng.choice(("yes", "no"))
    mark = rng.choice(MARKS)
    findings = (first, first if verdict == "yes" else second)
    lines = [mark.format(number=number, text=text) for number, text in enumerate(findings, 1)]
    prompt = "\n".join([rng.choice(SAME_FORMS), *lines])
    return Case(Task.SAME, system, "", prompt, verdict)


def _reduce(words: Words, system: str | None) -> Case:
    rng = words.rng
    draw = rng.choice((words.person, words.person, words.place, words.cause, words.number))
    findings = words.several(draw, 2, 5)
    if rng.random() < 0.3:
        for _ in range(rng.randint(1, 2)):
            findings[rng.randrange(len(findings))] = NOBODY
    names = [text for text in findings if text != NOBODY] or [NOBODY]
    mark = rng.choice(MARKS)
    lines = [mark.format(number=number, text=text) for number, text in enumerate(findings, 1)]
    prompt = "\n".join([rng.choice(REDUCE_FORMS), *lines])
    return Case(Task.REDUCE, system, "", prompt, f"{joined(names)}.")
