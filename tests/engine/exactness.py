"""Judges the engine with the local runner against transformers alone, logit by logit.

A `Session` drives the engine core by commands as the server would. A `Judge` forces the
reference along what came out, one context at a time and nothing beside it, and compares the
greedy choice and the logits of every step that sampled. `examine` puts a model through
everything that must not change an answer: prompts cut anywhere, prefixes shared by
arrival and by fork, small and large batches, a pool far too small.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedModel

from conure.engine import protocol
from conure.engine.config import EngineConfig
from conure.engine.core.engine import EngineCore
from conure.engine.runner.base import Handle, Runner, ScheduledSequence
from conure.engine.runner.torch_runner import TorchModelRunner

from . import shrunk

BLOCK = 4
NUM_BLOCKS = 512
EOS = 258
TIE = shrunk.TIE


class Recorder:
    """A runner that keeps the logits of every sampling row, by the ids before it."""

    def __init__(self, runner: TorchModelRunner) -> None:
        self._runner = runner
        self.limits = runner.limits
        self.logits: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        self._last: list[Tensor] = []
        forward = runner._forward

        def recording(*step: Any) -> Tensor:
            self._last.append(forward(*step))
            return self._last[-1]

        # Whichever forward pass the runner has chosen for the model.
        runner._forward = recording  # type: ignore[assignment, method-assign]  # to look over its shoulder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def start(self, rows: Sequence[ScheduledSequence], copies: Sequence[tuple[int, int]]) -> Handle:
        self._last.clear()
        handle = self._runner.start(rows, copies)
        sampling = [row for row in rows if row.sampling is not None]
        if sampling:
            (logits,) = self._last
            assert len(logits) == len(sampling)
            for row, scores in zip(sampling, logits, strict=True):
                self.logits[tuple(row.ids)].append(scores.float())
        return handle


@dataclass
class Context:
    """The server's record of a context."""

    ids: list[int]
    spans: list[tuple[int, int]] = field(default_factory=list)
    """Where each Generate began and ended."""
    is_ended: bool = False


class Session:
    """One life of the engine core over a loaded runner, checked after every step."""

    def __init__(self, runner: Recorder, **limits: int) -> None:
        full = runner._runner.limits
        runner.limits = msgspec.structs.replace(full, **{"max_sequences": 32, **limits})
        # What it does not define itself it takes from the runner behind it.
        self.engine = EngineCore(cast("Runner", runner), epoch=1)
        self.contexts: dict[int, Context] = {}

    def fill(self, tokens: list[int], parent: int | None = None, length: int = 0) -> int:
        name = len(self.contexts)
        before = [] if parent is None else self.contexts[parent].ids[:length]
        self.contexts[name] = Context([*before, *tokens])
        self.engine.apply(protocol.Fill(name, tokens, parent, length, rank=float(name)))
        return name

    def extend(self, name: int, tokens: list[int]) -> None:
        self.contexts[name].ids += tokens
        self.engine.apply(protocol.Fill(name, tokens, rank=float(name)))

    def generate(self, name: int, count: int) -> None:
        context = self.contexts[name]
        context.spans.append((len(context.ids), 0))
        context.is_ended = False
        self.engine.apply(
            protocol.GenerateCommand(
                name, protocol.SamplingParams(max_tokens=count), rank=float(name)
            )
        )

    def call(
        self, tokens: list[int], count: int, parent: int | None = None, length: int = 0
    ) -> int:
        name = self.fill(tokens, parent, length)
        self.generate(name, count)
        return name

    def step(self) -> bool:
        step = self.engine.step()
        self.engine.check()
        for report in step.reports if step is not None else ():
            match report:
                case protocol.Failed():
                    raise AssertionError(report.message)
                case protocol.Tokens():
                    self.contexts[report.context].ids += report.ids
                case protocol.Finished():
                    context = self.contexts[report.context]
                    begin, _ = context.spans[-1]
                    context.spans[-1] = (begin, len(context.ids))
                    context.is_ended = report.reason == "stop"
                case _:
                    pass
        return step is not None

    def run(self) -> None:
        while self.step():
            pass

    def close(self) -> None:
        """Free everything; nothing may stay held."""
        for name in self.contexts:
            self.engine.apply(protocol.Free(name))
        self.run()
        assert self.engine.status().num_held == 0


@dataclass
class Verdict:
    """What the judge found."""

    tokens: int = 0
    ties: int = 0
    difference: float = 0.0
    """Largest difference of a logit from the reference's."""
    errors: list[float] = field(default_factory=list)
    """Difference of each token's logits, as root mean square, in units of their spread."""
    recomputed: int = 0
    shared: int = 0
    cached: int = 0


class Judge:
    """Compares what sessions produced with the reference alone."""

    def __init__(self, runner: Recorder, reference: PreTrainedModel) -> None:
        self.verdict = Verdict()
        self._runner = runner
        self._reference = reference
        self._judged: set[tuple[int, ...]] = set()

    def judge(self, session: Session, *, tokens_too: bool = True) -> None:
        """Judge every context of a finished session, then close it."""
        for context in session.contexts.values():
            ids = [*context.ids, EOS] if context.is_ended else context.ids
            if context.spans and tuple(ids) not in self._judged:
                self._judged.add(tuple(ids))
                self._judge(ids, context, tokens_too)
        status = session.engine.status()
        self.verdict.recomputed += status.num_recomputed_tokens
        self.verdict.shared += status.num_shared_tokens
        self.verdict.cached += status.num_cached_tokens
        session.close()

    def _judge(self, ids: list[int], context: Context, tokens_too: bool) -> None:
        with torch.inference_mode():
            expected = self._reference(torch.tensor([ids[:-1]])).logits[0].float()
        for begin, end in context.spans:
            for position in range(begin, end + (context.is_ended and end == len(context.ids))):
                scores, token = expected[position - 1], ids[position]
                self._compare(tuple(ids[:position]), scores)
                self.verdict.tokens += 1
                gap = float(scores.max() - scores[token])
                if tokens_too and gap > 0:
                    assert gap <= TIE, f"position {position}: {token} lies {gap} below the best"
                    self.verdict.ties += 1

    def _compare(self, before: tuple[int, ...], expected: Tensor) -> None:
        found = self._runner.logits.get(before)
        assert found, "every generated token has logits"
        for scores in found:
            difference = scores - expected
            self.verdict.difference = max(self.verdict.difference, float(difference.abs().max()))
            self.verdict.errors.append(float(difference.square().mean().sqrt() / expected.std()))


def load(folder: Path, dtype: str) -> tuple[Recorder, Judge]:
    """Load a folder twice: as the engine does, and as transformers alone."""
    runner = TorchModelRunner(
        EngineConfig(
            model=str(folder), dtype=dtype, num_blocks=NUM_BLOCKS, block_size=BLOCK, threads=1
        ),
        min_saved=0,
    )
    recorder = Recorder(runner)
    return recorder, Judge(recorder, shrunk.load(folder, getattr(torch, dtype)))


def examine(runner: Recorder, judge: Judge, *, thorough: bool = False) -> Verdict:
    """Put a model in float32 through everything that must not change an answer.

    Raises:
        AssertionError: where it does.
    """
    count = 16 if thorough else 8
    for seed in range(2 if thorough else 1):
        for step_tokens in (1, 7, 512):
            judge.judge(_cut(runner, seed, step_tokens, count))
            if thorough:
                judge.judge(_forks(runner, seed, step_tokens, count))
                judge.judge(_arrivals(runner, seed, step_tokens, count, most=16))
        judge.judge(_forks(runner, seed, 16, count))
        for most in (1, 2, 4, 8, 16, 32) if thorough else (32,):
            judge.judge(_arrivals(runner, seed, 48, count, most=most))
        judge.judge(_starved(runner, seed, count))
    return judge.verdict


def measure(runner: Recorder, judge: Judge) -> Verdict:
    """Run a model in 16 bits and compare its logits; its tokens may differ."""
    judge.judge(_forks(runner, 0, 16, 8), tokens_too=False)
    judge.judge(_arrivals(runner, 0, 48, 8, most=16), tokens_too=False)
    return judge.verdict


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def _cut(runner: Recorder, seed: int, step_tokens: int, count: int) -> Session:
    """One context at a time, its prompt cut into chunks; then a second turn after it."""
    session = Session(runner, step_tokens=step_tokens)
    name = session.call(prompt(seed, 25), count)
    session.run()
    session.extend(name, prompt(seed + 1, 5))
    session.generate(name, count)
    session.run()
    # Gone, and found again in the cache.
    ids = session.contexts[name].ids
    session.engine.apply(protocol.Free(name, num_cached_tokens=len(ids)))
    session.call([*ids, 7], count)
    session.run()
    return session


def _forks(runner: Recorder, seed: int, step_tokens: int, count: int) -> Session:
    """Forks at any length, in mid block, of parents that fill or have generated."""
    session = Session(runner, step_tokens=step_tokens)
    root = session.fill(prompt(seed, 31))
    # The root still fills.
    for length in (8, 21, 30, 31):
        session.call(prompt(length, 3), count, root, length)
    session.step()
    session.generate(root, count)
    session.run()
    end = len(session.contexts[root].ids)
    children = [session.call(prompt(end, 1), count, root, length) for length in (end, end - 2)]
    for child in children:
        session.call(prompt(child, 2), count, child, end - 3)
    session.engine.apply(protocol.Free(root))
    session.run()
    return session


def _arrivals(runner: Recorder, seed: int, step_tokens: int, count: int, *, most: int) -> Session:
    """Contexts with a few common prefixes that arrive one by one and in groups, up to `most`."""
    rng = random.Random(seed)
    session = Session(runner, step_tokens=step_tokens)
    waiting = most
    while waiting:
        for _ in range(min(waiting, rng.choice((1, 1, 5, 16)))):
            waiting -= 1
            common = prompt(rng.randrange(3), rng.choice((4, 12, 22)))
            session.call([*common, *prompt(rng.getrandbits(32), rng.randrange(1, 8))], count)
        for _ in range(rng.randrange(3)):
            session.step()
    session.run()
    return session


def _starved(runner: Recorder, seed: int, count: int) -> Session:
    """A pool with a quarter of the requested memory, so that some context is always preempted."""
    length = 24
    num_contexts = 8
    demand = num_contexts * -(-(length + count) // BLOCK)
    session = Session(runner, num_blocks=demand // 4, step_tokens=32)
    for number in range(num_contexts):
        session.call(prompt(100 * seed + number, length - number % 3), count)
    session.run()
    assert session.engine.status().num_recomputed_tokens > 0, "nobody was preempted"
    return session
