"""Random constrained outputs always match their constraint.

Two models generate them. The random model runs completely, with weights and sampler, at a
temperature that makes nearly every token possible. A runner without weights returns random
logits over a byte-pair vocabulary trained by the test, so that tokens cross the boundaries of
grammar terminals.
"""

from __future__ import annotations

import ast
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jsonschema
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from conure.engine import protocol
from conure.engine.config import EngineConfig
from conure.engine.runner.base import CompletedStep, Runner, ScheduledSequence
from conure.engine.runner.torch_runner import TorchModelRunner
from conure.engine.sampling.batch import sample

from ..constraint_harness import ConstraintHarness, lark, schema

CHOICES = ("Yes", "No", "Yes, but", 'a "quoted"\nline', "né🦜", "")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["x", "y", "zz"]}, "maxItems": 3},
        "near": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/point"}]},
    },
    "required": ["name", "age", "near"],
    "additionalProperties": False,
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "number", "minimum": -5, "maximum": 5}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
STRINGS = {
    "type": "array",
    "items": {"type": "string", "maxLength": 8},
    "minItems": 1,
    "maxItems": 4,
}
SCALARS = {"anyOf": [{"type": "boolean"}, {"type": "integer"}, {"type": "number"}]}
DATE = r"[12][0-9]{3}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])( [a-zé]+)?"
LINE = r"[^\n]{1,20}\n"
ARITHMETIC = r"""
start: sum
sum: product (("+" | "-") product)*
product: atom ("*" atom)*
atom: NUMBER | "(" sum ")"
NUMBER: /[1-9][0-9]{0,3}/
"""


class Language(NamedTuple):
    """A constraint, and an independent check of which texts match it."""

    constraint: str
    belongs: Callable[[str], object]


def fits(content: Any) -> Callable[[str], object]:
    return lambda text: jsonschema.Draft202012Validator(content).is_valid(json.loads(text))


def is_sum(text: str) -> bool:
    ast.parse(text, mode="eval")
    return re.fullmatch(r"[0-9+*()-]+", text) is not None


KINDS = {
    "choices": Language(
        lark("start: X\nX: " + " | ".join(map(json.dumps, CHOICES))), CHOICES.count
    ),
    "date": Language(lark(f"start: /{DATE}/"), re.compile(DATE).fullmatch),
    "line": Language(lark(f"start: /{LINE}/"), re.compile(LINE).fullmatch),
    "object": Language(schema(PERSON), fits(PERSON)),
    "list": Language(schema(STRINGS), fits(STRINGS)),
    "scalar": Language(schema(SCALARS), fits(SCALARS)),
    "lark": Language(lark(ARITHMETIC), is_sum),
}
ROUND = 16
MAX_TOKENS = 100


def walk(harness: ConstraintHarness, num_walks: int, seed: int) -> dict[str, int]:
    """Run random calls of all languages together; return how many of each were complete.

    An output that ended at max_tokens must be reported as cut. All others must match.
    """
    draw = random.Random(seed)
    num_met = dict.fromkeys(KINDS, 0)
    for begin in range(0, num_walks, ROUND):
        calls = {}
        for number in range(begin, min(begin + ROUND, num_walks)):
            name = list(KINDS)[number % len(KINDS)]
            context = harness.start(
                [draw.randrange(32, 127) for _ in range(draw.randrange(1, 9))],
                KINDS[name].constraint,
                max_tokens=MAX_TOKENS,
                temperature=draw.choice((0.7, 1.5, 4.0)),
                top_p=draw.choice((1.0, 0.9)),
                seed=draw.randrange(2**40),
            )
            calls[context] = name
        harness.run()
        for context, name in calls.items():
            outcome = harness.outcomes.pop(context)
            end = outcome.finished
            assert outcome.text == end.text
            if end.constraint == "cut":
                assert end.reason == "length"
                assert len(outcome.ids) == MAX_TOKENS
            else:
                assert end.constraint == "met"
                assert KINDS[name].belongs(end.text), (name, end.text)
                num_met[name] += 1
            harness.free(context)
    return num_met


class NoiseRunner(Runner):
    """Returns random logits over its own vocabulary, without weights or KV."""

    model = "noise"
    chat_template = ""
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = (0,)
    capabilities: tuple[str, ...] = ("tokens", "logprobs")
    description = "noise"
    limits = protocol.EngineLimits(512, 16, 1024, 256, 32)

    def __init__(self, num_tokens: int, seed: int) -> None:
        self.special_tokens: dict[str, str] = {}
        self._generator = torch.Generator().manual_seed(seed)
        self.tokenizer_json = train(num_tokens)
        self.num_ids = tokenizers.Tokenizer.from_str(self.tokenizer_json).get_vocab_size() + 5

    def start(
        self, rows: Sequence[ScheduledSequence], copies: Sequence[tuple[int, int]]
    ) -> CompletedStep:
        sampling = [row for row in rows if row.sampling is not None]
        logits = torch.randn(len(sampling), self.num_ids, generator=self._generator)
        return CompletedStep(sample(logits * 3, sampling, self.eos_ids) if sampling else [])


def train(num_tokens: int) -> str:
    """Train a byte-level BPE tokenizer whose tokens span quotes, digits and brackets."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    draw = random.Random(7)
    words = ['"name":', '{"', '"}', "],", '":"', "Yes", "No", "2024-", "(1+2)*", "é", "🦜", ", "]
    texts = ["".join(draw.choices([*words, *"abcxyz0123456789"], k=60)) for _ in range(300)]
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return str(tokenizer.to_str())


@pytest.fixture(scope="module")
def seeded() -> Iterator[ConstraintHarness]:
    harness = ConstraintHarness(
        TorchModelRunner(EngineConfig(model="seeded", context_len=256, num_blocks=512, threads=1))
    )
    yield harness
    harness.close()


def test_random_model_outputs_match_their_constraints(seeded: ConstraintHarness) -> None:
    num_met = walk(seeded, 140, seed=1)
    assert min(num_met.values()) > 0
    assert seeded.engine.status().num_held == 0


def test_byte_pair_outputs_match_their_constraints() -> None:
    harness = ConstraintHarness(NoiseRunner(1000, seed=3))
    num_met = walk(harness, 350, seed=2)
    assert min(num_met.values()) > 0
    harness.close()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_outputs_of_the_random_model(seeded: ConstraintHarness) -> None:
    num_met = walk(seeded, 10_000, seed=0)
    assert min(num_met.values()) > 500
