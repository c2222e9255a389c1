"""The KV manager under random load: every text is the same as without other calls.

The server double computes every expected answer from a plain dictionary, and checks the engine's
invariants after every command. The runner checks that each block contains what a row reads.
Commands come from a seeded generator, not from a shrinking strategy: interesting states (a fork
of a fork of a filling context, with all blocks in use) need many commands, which shrinking
strategies rarely generate.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from conure.engine import protocol

from ..server_double import ServerDouble

NUM_COMMANDS = 120
CONTEXT_LENS = (24, 48)


class RandomLoad:
    """Random commands from one seed, mostly over one letter so that prefixes are shared."""

    def __init__(self, seed: int, *, late: bool) -> None:
        rng = self.rng = random.Random(seed)
        block_size = rng.choice([1, 2, 4, 5])
        self.context_len = rng.choice(CONTEXT_LENS)
        num_blocks = -(-self.context_len // block_size) + rng.choice([0, 1, 3, 10, 60])
        self.server = ServerDouble(
            protocol.EngineLimits(
                context_len=self.context_len,
                block_size=block_size,
                num_blocks=num_blocks,
                step_tokens=rng.choice([1, 3, 7, 30, 200]),
                max_sequences=rng.choice([1, 3, 50]),
            ),
            late=late,
        )
        self.keeps = rng.random() < 0.7
        self.fails = rng.random() < 0.3

    def run(self) -> None:
        """Send random commands, run all calls to their end, and free all contexts."""
        actions = [self.fill, self.fork, self.extend, self.generate, self.free, self.abort]
        for _ in range(NUM_COMMANDS):
            action = self.rng.choices(
                [*actions, self.update, self.step], [35, 15, 10, 5, 10, 3, 5, 17]
            )[0]
            action()
        self.server.run()
        for context in list(self.server.known):
            self.server.free(context)
        status = self.server.engine.status()
        assert (status.num_held, status.num_contexts) == (0, 0)
        assert status.num_free + status.num_cached == status.num_blocks
        assert self.keeps or status.num_cached == 0
        assert {failed.code for failed in self.server.failed} <= {"engine.step"}

    def fill(self) -> None:
        server, rng = self.server, self.rng
        parent, parent_len, salt = None, 0, rng.choice(["", "", "x"])
        if server.known and rng.random() < 0.6:
            parent = rng.choice(list(server.known))
            parent_len = rng.randint(0, len(server.known[parent].ids))
            salt = server.known[parent].salt if rng.random() < 0.9 else salt
        tokens = self._tokens(min(14, self.context_len - 4 - parent_len))
        context = server.fill(tokens, parent, parent_len, rank=self._rank(), salt=salt)
        if server.known[context].ids and rng.random() < 0.7:
            server.generate(context, rank=self._rank(), **self._sampling())
        if parent is not None and rng.random() < 0.3:
            self._free(parent)

    def fork(self) -> None:
        parent = self._pick()
        if parent is not None and (ids := self.server.known[parent].ids):
            parent_len = self.rng.randint(1, len(ids))
            self.server.fork_generate(parent, parent_len, rank=self._rank(), **self._sampling())

    def extend(self) -> None:
        context = self._pick(is_idle=True)
        if context is not None:
            room = self.context_len - len(self.server.known[context].ids)
            self.server.extend(context, self._tokens(min(6, room)), rank=self._rank())
            if self.rng.random() < 0.5 and self.server.known[context].ids:
                self.server.generate(context, **self._sampling())

    def generate(self) -> None:
        context = self._pick(is_idle=True)
        if context is not None and self.server.known[context].ids:
            self.server.generate(context, rank=self._rank(), **self._sampling())

    def free(self) -> None:
        context = self._pick()
        if context is not None:
            self._free(context)

    def abort(self) -> None:
        context = self._pick()
        if context is not None:
            self.server.abort(context)

    def update(self) -> None:
        context = self._pick()
        if context is not None:
            next_use = self.rng.choice([None, 1.0, 2.0])
            self.server.apply(protocol.Update(context, self._rank(), next_use))

    def step(self) -> None:
        runner = self.server.runner
        runner.fails = self.fails and self.rng.random() < 0.1
        runner.fails_late = self.fails and self.rng.random() < 0.1
        self.server.step()
        runner.fails = runner.fails_late = False

    def _free(self, context: int) -> None:
        keep = self.rng.choice([0, 0, 3, 100]) if self.keeps else 0
        keep = min(keep, len(self.server.known[context].ids))
        self.server.free(context, keep, self.rng.randint(0, keep))

    def _pick(self, *, is_idle: bool = False) -> int | None:
        known = self.server.known
        choices = [c for c in known if not is_idle or known[c].prompt is None]
        return self.rng.choice(choices) if choices else None

    def _tokens(self, most: int) -> list[int]:
        length = self.rng.randint(0, max(most, 0))
        return [98 if self.rng.random() < 0.05 else 97 for _ in range(length)]

    def _rank(self) -> float:
        return self.rng.choice([0.0, 0.0, 1.0, 2.0])

    def _sampling(self) -> dict[str, Any]:
        return {
            "max_tokens": self.rng.choice([0, 1, 2, 5, 9, 40]),
            "min_tokens": self.rng.choice([0, 0, 0, 3]),
            "stop": self.rng.choice([(), (), ("r", "al"), ("e ",), ("er", "mb")]),
            "ignore_eos": self.rng.random() < 0.3,
            # The text does not depend on it, but when a step is sampled does.
            "repetition_penalty": self.rng.choice([1.0, 1.0, 1.2]),
        }


def load_all(seeds: range, caplog: pytest.LogCaptureFixture, *, late: bool) -> None:
    for seed in seeds:
        load = RandomLoad(seed, late=late)
        try:
            load.run()
        except BaseException as error:
            error.add_note(f"seed {seed}, {load.server.limits}")
            raise
        caplog.clear()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_random_commands_give_correct_texts_and_lose_no_block(
    first: int, late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    load_all(range(first, first + 20), caplog, late=late)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("late", [False, True])
def test_a_thousand_more_random_command_sequences(
    late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    load_all(range(200, 1200), caplog, late=late)
