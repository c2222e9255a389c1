"""The fake engine's runner: scripted text without a model, over checked KV memory.

Everything above the runner is the same as with a real model: contexts, blocks, prefix tree, batch
scheduler and frames. A wrong data flow therefore shows as a wrong text, and a wrong block as an
error.

**Text.** By default `default_text(ids)` of the prompt, a public function, so tests can predict
every answer. Alternatively a callable of the prompt's text, or a script: a list of
`{"match": regex, "text": "..."}` whose first match in the prompt's text answers it. An entry
without `match` always matches. Texts end with EOS. Where EOS is not allowed (`ignore_eos`, fewer
than `min_tokens`), the text is repeated after a space.

Under a mask, the text is forced into the constraint: the next id is the first allowed character of
the rest of the text. If none is allowed, it is EOS, otherwise a character that closes something
(`"`, `]`, `}`), otherwise any allowed id, preferably a digit or a letter. At every fourth position,
any allowed id is chosen instead, so that outputs end. An output is thus a function of prompt and
grammar.

**Logprobs.** The sampled id has probability 1/2, and each further id, in order of ids, half of the
probability of the one before.

**Embeddings.** The hidden state of a token is `hidden_state(id)`, so that texts with the same bytes
have the same embedding.

**Time.** A step takes `time_per_prompt_token` for every prompt token, plus `time_per_output_token`
if any row samples (a batch decodes in parallel), plus `time_per_call` if any row samples its first
id. All in seconds, passed to `sleep`, which may be `VirtualClock().sleep`.

**Memory.** See `token_memory`.

Loads no torch. Keeps no state of a context except bounded caches of values derived from ids.
"""

from __future__ import annotations

import math
import re
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Final

import msgspec
from cachetools import LRUCache

from ..config import EngineConfig
from ..protocol import EngineError, EngineLimits, SamplingParams, TokenLogprob
from ..runner.base import CompletedStep, Handle, Runner, ScheduledSequence
from ..text.byte_tokenizer import (
    CHAT_TEMPLATE,
    END_OF_TEXT,
    EOS_IDS,
    NUM_BYTES,
    SPECIAL_TOKENS,
    TURN_END,
    TURN_START,
    VOCAB_SIZE,
    tokenizer_json,
)
from .token_memory import TokenMemory

# fmt: off
WORDS: Final = (
    "amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron",
    "iris", "jade", "kelp", "larch", "maple", "north", "ocean", "pearl",
    "quartz", "river", "stone", "tulip", "umber", "vale", "willow", "xenon",
    "yarrow", "zinc", "acorn", "basil", "coral", "dune", "elm", "fern",
)
# fmt: on
"""The 32 words of `default_text`."""

DEFAULT_LIMITS: Final = EngineLimits(
    context_len=8192, block_size=16, num_blocks=8192, step_tokens=2048, max_sequences=256
)

HIDDEN_SIZE: Final = 64

_ALNUM: Final = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_SPECIALS: Final = (END_OF_TEXT, TURN_START, TURN_END)


def default_text(ids: Sequence[int]) -> str:
    """Return the default answer to a prompt: two to five words of `WORDS`.

    With `d` the 8-byte BLAKE2b digest of the ids as little-endian 32-bit numbers, the answer has
    `2 + d[0] % 4` words, joined by spaces. Word i is `WORDS[d[i + 1] % 32]`.
    """
    packed = array("I", ids)
    if packed.itemsize != 4:  # pragma: no cover - no known platform
        packed = array("L", ids)
    digest = blake2b(packed.tobytes(), digest_size=8).digest()
    return " ".join(WORDS[byte % len(WORDS)] for byte in digest[1 : 3 + digest[0] % 4])


def hidden_state(token_id: int) -> list[float]:
    """Return the state [`HIDDEN_SIZE`] of a token: 1 at the id modulo the size, otherwise 0."""
    return [float(token_id % HIDDEN_SIZE == index) for index in range(HIDDEN_SIZE)]


class ScriptEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of a script: the answer to prompts that `match` is found in."""

    text: str
    match: str | None = None


Answer = Callable[[str], str | None]
"""Maps a prompt's text to an answer, or to None for the default text."""


def load_script(path: Path) -> Answer:
    """Read a script file: a JSON list of `{"match": regex, "text": "..."}`.

    Raises:
        EngineError: `engine.bad_script` if the file cannot be read or is malformed.
    """
    try:
        entries = msgspec.json.decode(path.read_bytes(), type=list[ScriptEntry])
        rules = [(re.compile(e.match or "", re.DOTALL), e.text) for e in entries]
    except (OSError, msgspec.MsgspecError, re.error) as error:
        raise EngineError("engine.bad_script", f"cannot read script {path}: {error}") from error

    def answer(prompt: str) -> str | None:
        return next((text for rule, text in rules if rule.search(prompt)), None)

    return answer


def create_runner(config: EngineConfig) -> FakeRunner:
    """Return a runner with the options of a fake engine.

    Raises:
        EngineError: as `load_script`.
    """
    limits = {
        name: value
        for name in EngineLimits.__struct_fields__
        if (value := getattr(config, name)) is not None
    }
    return FakeRunner(
        limits=msgspec.structs.replace(DEFAULT_LIMITS, **limits),
        answer=load_script(config.script) if config.script is not None else None,
        time_per_call=config.time_per_call,
        time_per_prompt_token=config.time_per_prompt_token,
        time_per_output_token=config.time_per_output_token,
        has_embeddings=config.embeddings,
    )


class VirtualClock:
    """A clock that advances only by `sleep`."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        """Advance the clock without waiting."""
        self.now += seconds


class FakeRunner(Runner):
    """A runner whose answers are scripted."""

    def __init__(
        self,
        *,
        model: str = "fake",
        limits: EngineLimits = DEFAULT_LIMITS,
        answer: Answer | None = None,
        time_per_call: float = 0.0,
        time_per_prompt_token: float = 0.0,
        time_per_output_token: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
        is_checked: bool = True,
        has_embeddings: bool = True,
    ) -> None:
        """Create a runner with empty memory; without `is_checked`, memory is not simulated."""
        self.model = model
        self.tokenizer_json = tokenizer_json()
        self.chat_template = CHAT_TEMPLATE
        self.special_tokens = dict(SPECIAL_TOKENS)
        self.bos_id: int | None = None
        self.eos_ids: tuple[int, ...] = EOS_IDS
        self.num_ids = VOCAB_SIZE
        self.limits = limits
        embeddings = ("embeddings",) if has_embeddings else ()
        self.capabilities: tuple[str, ...] = ("tokens", "logprobs", *embeddings)
        self.description = "scripted text, no model"
        self.purpose = "test"
        self._answer = answer
        self._time_per_call = time_per_call
        self._time_per_prompt_token = time_per_prompt_token
        self._time_per_output_token = time_per_output_token
        self._sleep = sleep
        self._memory = TokenMemory(limits) if is_checked else None
        # Answers by context and prompt length, which identify the prompt's ids within an epoch.
        self._scripts: LRUCache[tuple[int, int], bytes] = LRUCache(4 * limits.max_sequences)
        self._previous_ids: list[int] = []

    def start(self, rows: Sequence[ScheduledSequence], copies: Sequence[tuple[int, int]]) -> Handle:
        """Check and write memory, sleep, and compute the next id of every sampling row.

        Raises:
            AssertionError: if a block does not contain the tokens that a row attends to.
        """
        given = rows
        if any(row.previous_id_index is not None for row in rows):
            rows = [self._with_previous_id(row) for row in rows]
        if self._memory is not None:
            self._memory.run(rows, copies)
        sampling_rows = [
            (row, given_row)
            for row, given_row in zip(rows, given, strict=True)
            if row.sampling is not None
        ]
        for row, given_row in zip(rows, given, strict=True):
            if row.pool_from is not None:
                given_row.hidden_sum = _hidden_sum(row)
        self._spend(rows)
        if any(row.is_deferred for row in rows):
            return _DeferredIds(lambda: self._sample(sampling_rows))
        return CompletedStep(self._sample(sampling_rows))

    def _spend(self, rows: Sequence[ScheduledSequence]) -> None:
        """Sleep for the duration of a step."""
        num_prompt_tokens = 0
        has_first = samples = False
        for row in rows:
            if row.sampling is None:
                num_prompt_tokens += row.num_new
                continue
            samples = True
            if len(row.ids) == row.num_prompt:
                has_first = True
                num_prompt_tokens += row.num_new
            else:
                num_prompt_tokens += row.num_new - 1
        duration = (
            num_prompt_tokens * self._time_per_prompt_token
            + has_first * self._time_per_call
            + samples * self._time_per_output_token
        )
        if duration > 0:
            self._sleep(duration)

    def _sample(self, rows: Sequence[tuple[ScheduledSequence, ScheduledSequence]]) -> list[int]:
        """Return the next ids of rows, each given with all its ids and as the core sent it."""
        sampled: list[int] = []
        for row, given_row in rows:
            sampling = row.sampling
            assert sampling is not None
            row.mask = given_row.mask
            next_id = self._next_id(row, sampling, len(row.ids) - row.num_prompt)
            sampled.append(next_id)
            if sampling.logprobs is not None:
                given_row.logprob = _logprob(next_id, sampling.logprobs)
        self._previous_ids = sampled
        return sampled

    def _with_previous_id(self, row: ScheduledSequence) -> ScheduledSequence:
        """Append the id of the previous step that the host has not read yet."""
        if row.previous_id_index is None:
            return row
        assert len(row.ids) == row.start, "a row that follows must lack exactly one token"
        return replace(row, ids=[*row.ids, self._previous_ids[row.previous_id_index]])

    def _next_id(self, row: ScheduledSequence, sampling: SamplingParams, num_output: int) -> int:
        script = self._scripts.get((row.context, row.num_prompt))
        if script is None:
            script = self._write_script(row)
        if row.mask is not None:
            return _next_allowed(script, row.ids[row.num_prompt :], row.mask)
        if num_output < len(script):
            next_id = script[num_output]
        elif not sampling.ignore_eos and num_output >= sampling.min_tokens:
            return EOS_IDS[0]
        else:
            # One round is the text and the space before the next round.
            position = num_output % (len(script) + 1)
            next_id = script[position] if position < len(script) else 0x20
        if num_output < sampling.min_tokens and next_id in sampling.stop_token_ids:
            return next(i for i in range(0x20, NUM_BYTES) if i not in sampling.stop_token_ids)
        return next_id

    def _write_script(self, row: ScheduledSequence) -> bytes:
        prompt_ids = row.ids[: row.num_prompt]
        text = self._answer(_text_of(prompt_ids)) if self._answer is not None else None
        script = (default_text(prompt_ids) if text is None else text).encode()
        self._scripts[row.context, row.num_prompt] = script
        return script


class _DeferredIds:
    """A step that is sampled when the previous one was read; see `base.Handle`."""

    is_ready = False

    def __init__(self, sample: Callable[[], list[int]]) -> None:
        self._sample = sample
        self._ids: list[int] = []

    def sample(self) -> None:
        """Compute the ids."""
        self._ids = self._sample()

    def read(self) -> list[int]:
        """Return the ids."""
        return self._ids


def _hidden_sum(row: ScheduledSequence) -> list[float] | None:
    assert row.pool_from is not None
    ids = row.ids[max(row.start, row.pool_from) : row.length]
    states = [hidden_state(token_id) for token_id in ids]
    return [sum(values) for values in zip(*states, strict=True)] if states else None


def _next_allowed(script: bytes, output: Sequence[int], mask: bytes) -> int:
    """Return the next id of a text under a mask; see the module docstring."""
    rest = script[_position(script, output) :]
    for byte in rest:
        if _is_allowed(mask, byte):
            return byte
    allowed = [token_id for token_id in range(8 * len(mask)) if _is_allowed(mask, token_id)]
    assert allowed, "the mask allows no id"
    preferred = [i for i in (*EOS_IDS, *b'"]}', *_ALNUM, *range(0x20, 0x7F)) if i in allowed]
    if not preferred or (preferred[0] not in EOS_IDS and len(output) % 4 == 3):
        # A grammar may allow the preferred ids forever, and need another one to end.
        return allowed[len(output) * 7919 % len(allowed)]
    return int(preferred[0])


def _position(script: bytes, output: Sequence[int]) -> int:
    """Return the position in a text after an output: each id advances to its next occurrence."""
    position = 0
    for token_id in output:
        if token_id < NUM_BYTES:
            position = script.find(token_id, position) + 1 or position
    return position


def _is_allowed(mask: bytes, token_id: int) -> bool:
    return token_id >> 3 < len(mask) and bool(mask[token_id >> 3] >> (token_id & 7) & 1)


def _logprob(token_id: int, num_top: int) -> TokenLogprob:
    likeliest = [token_id, *(i for i in range(num_top) if i != token_id)][:num_top]
    top = [(each, -math.log(2) * (rank + 1)) for rank, each in enumerate(likeliest)]
    return TokenLogprob(-math.log(2), top)


def _text_of(ids: Sequence[int]) -> str:
    """Return the text of ids, including special tokens."""
    parts = bytearray()
    for token_id in ids:
        if token_id < NUM_BYTES:
            parts.append(token_id)
        else:
            parts.extend(_SPECIALS[token_id - NUM_BYTES].encode())
    return parts.decode(errors="replace")
