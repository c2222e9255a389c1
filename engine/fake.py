"""A scripted model behind the real engine: text without weights, KV memory that is checked.

Everything above the runner is what a real model runs on: contexts, blocks, prefix tree,
batcher and frames. Only the model is played, so a wrong data flow shows as a wrong text and
a wrong block as an error.

**Text.** `default_text(ids)` of the prompt's ids: a published function, so a test can say
what every call must answer. Or a callable from the prompt's text, or a script: a list of
`{"match": regex, "text": "..."}`, of which the first that is found in the prompt's text
counts; an entry without `match` is the default, and without one `default_text` is. Texts
end with EOS. Where EOS is not wanted (`ignore_eos`, fewer than `min_tokens`), the text goes
on from its beginning after a space.

Under a mask the text is forced into it: next comes the first character, from where the
output has got to in the text, that the mask allows. Where it allows none of the rest: EOS,
else one that closes what is open (`"`, `]`, `}`), else any, a digit or a letter if it can be;
every fourth time whichever. An output is thus a function of prompt and grammar.

**Chances.** An id that is told has probability 1/2, the likeliest others, in order of ids,
half of the one before.

**Time.** A step takes `time_per_prompt_token` for every token that is no decoding, plus
`time_per_output_token` if any row samples (a batch decodes in parallel), plus
`time_per_call` if any row samples its first id. All in seconds, passed to `sleep`, which may
be `VirtualClock().sleep`.

**Memory.** Every slot of every block holds the token whose KV would lie there, and every
full block a hash over itself and all before it, since KV depends on the whole prefix. Each
row first finds exactly `ids[:start]` in its blocks, then writes its own tokens, as a model
would that reads wrong KV silently. Copies are checked not to depend on their order.

Refuses to know contexts beyond a bounded memory of what it would have to derive again from
ids. Loads no torch.
"""

from __future__ import annotations

import math
import re
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Final

import msgspec

from .api import Chance, EngineError, Limits, Sampling
from .bytelevel import (
    CHAT_TEMPLATE,
    END_OF_TEXT,
    EOS_IDS,
    NUM_BYTES,
    SPECIAL_TOKENS,
    TURN_END,
    TURN_START,
    tokenizer_json,
)
from .fakememory import FakeMemory
from .runner import Done, Handle, Row, Runner

# fmt: off
WORDS: Final = (
    "amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron",
    "iris", "jade", "kelp", "larch", "maple", "north", "ocean", "pearl",
    "quartz", "river", "stone", "tulip", "umber", "vale", "willow", "xenon",
    "yarrow", "zinc", "acorn", "basil", "coral", "dune", "elm", "fern",
)
# fmt: on
"""The 32 words of `default_text`."""

DEFAULT_LIMITS: Final = Limits(
    context_len=8192, block_size=16, num_blocks=8192, step_tokens=2048, max_sequences=256
)

_ALNUM: Final = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_SPECIALS: Final = (END_OF_TEXT, TURN_START, TURN_END)


def default_text(ids: Sequence[int]) -> str:
    """Return the answer to a prompt of these ids: two to five words of `WORDS`.

    With `d` the BLAKE2b digest (8 bytes) of the ids as little-endian 32-bit numbers, the
    answer has `2 + d[0] % 4` words, the i-th of them `WORDS[d[i + 1] % 32]`, joined by spaces.
    """
    packed = array("I", ids)
    if packed.itemsize != 4:  # pragma: no cover - no platform we know of
        packed = array("L", ids)
    digest = blake2b(packed.tobytes(), digest_size=8).digest()
    return " ".join(WORDS[byte % len(WORDS)] for byte in digest[1 : 3 + digest[0] % 4])


class ScriptEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a script: what to answer to prompts in which `match` is found."""

    text: str
    match: str | None = None


Answer = Callable[[str], str | None]
"""From a prompt's text to an answer; None for the default text."""


def load_script(path: Path) -> Answer:
    """Read a script file: a JSON list of `{"match": regex, "text": "..."}`.

    Raises:
        EngineError: if the file cannot be read or is no script (`engine.bad_script`).
    """
    try:
        entries = msgspec.json.decode(path.read_bytes(), type=list[ScriptEntry])
        rules = [(re.compile(e.match or "", re.DOTALL), e.text) for e in entries]
    except (OSError, msgspec.MsgspecError, re.error) as error:
        raise EngineError("engine.bad_script", f"script {path}: {error}") from error

    def answer(prompt: str) -> str | None:
        return next((text for rule, text in rules if rule.search(prompt)), None)

    return answer


class VirtualClock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        """Let `seconds` pass at once."""
        self.now += seconds


class FakeRunner(Runner):
    """A runner that answers by script."""

    def __init__(
        self,
        *,
        model: str = "fake",
        limits: Limits = DEFAULT_LIMITS,
        answer: Answer | None = None,
        time_per_call: float = 0.0,
        time_per_prompt_token: float = 0.0,
        time_per_output_token: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
        is_checked: bool = True,
    ) -> None:
        """Make a runner with empty memory; `is_checked` false leaves memory out."""
        self.model = model
        self.tokenizer_json = tokenizer_json()
        self.chat_template = CHAT_TEMPLATE
        self.special_tokens = dict(SPECIAL_TOKENS)
        self.bos_id: int | None = None
        self.eos_ids: tuple[int, ...] = EOS_IDS
        self.limits = limits
        self.capabilities: tuple[str, ...] = ("tokens", "logprobs")
        self.description = "scripted text, no model"
        self._answer = answer
        self._time_per_call = time_per_call
        self._time_per_prompt_token = time_per_prompt_token
        self._time_per_output_token = time_per_output_token
        self._sleep = sleep
        self._memory = FakeMemory(limits) if is_checked else None
        # Answers by (context, length of the prompt): within one life of an engine that names
        # the prompt's ids. Forgotten ones are derived again.
        self._scripts: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._max_scripts = 4 * limits.max_sequences
        self._last: list[int] = []

    def start(self, rows: Sequence[Row], copies: Sequence[tuple[int, int]]) -> Handle:
        """Check and write memory, pass the time, find the next id of every sampling row.

        Raises:
            AssertionError: if a block does not hold what a row would read from it.
        """
        if any(row.follows is not None for row in rows):
            rows = [self._whole(row) for row in rows]
        if self._memory is not None:
            self._memory.run(rows, copies)
        sampled: list[int] = []
        num_prompt_tokens = 0
        has_first = False
        for row in rows:
            sampling = row.sampling
            if sampling is None:
                num_prompt_tokens += row.num_new
                continue
            num_output = len(row.ids) - row.num_prompt
            if num_output == 0:
                has_first = True
                num_prompt_tokens += row.num_new
            else:
                num_prompt_tokens += row.num_new - 1
            next_id = self._next_id(row, sampling, num_output)
            sampled.append(next_id)
            if sampling.logprobs is not None:
                row.chance = _chance(next_id, sampling.logprobs)
        duration = (
            num_prompt_tokens * self._time_per_prompt_token
            + has_first * self._time_per_call
            + bool(sampled) * self._time_per_output_token
        )
        if duration > 0:
            self._sleep(duration)
        self._last = sampled
        return Done(sampled)

    def _whole(self, row: Row) -> Row:
        """Return a row with the id that only this runner knows."""
        if row.follows is None:
            return row
        assert len(row.ids) == row.start, "a row that follows lacks one token"
        return replace(row, ids=[*row.ids, self._last[row.follows]])

    def _next_id(self, row: Row, sampling: Sampling, num_output: int) -> int:
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
            # Once round is the text and the space before the next round.
            at = num_output % (len(script) + 1)
            next_id = script[at] if at < len(script) else 0x20
        if num_output < sampling.min_tokens and next_id in sampling.stop_token_ids:
            return next(i for i in range(0x20, NUM_BYTES) if i not in sampling.stop_token_ids)
        return next_id

    def _write_script(self, row: Row) -> bytes:
        prompt_ids = row.ids[: row.num_prompt]
        text = self._answer(_text_of(prompt_ids)) if self._answer is not None else None
        script = (default_text(prompt_ids) if text is None else text).encode()
        self._scripts[row.context, row.num_prompt] = script
        if len(self._scripts) > self._max_scripts:
            self._scripts.popitem(last=False)
        return script


def _next_allowed(script: bytes, output: Sequence[int], mask: bytes) -> int:
    """Return the next id of a text that is forced into a mask; see the head of this file."""
    rest = script[_reached(script, output) :]
    for byte in rest:
        if _is_allowed(mask, byte):
            return byte
    allowed = [token_id for token_id in range(8 * len(mask)) if _is_allowed(mask, token_id)]
    assert allowed, "a mask that allows nothing"
    liked = [i for i in (*EOS_IDS, *b'"]}', *_ALNUM, *range(0x20, 0x7F)) if i in allowed]
    if not liked or (liked[0] not in EOS_IDS and len(output) % 4 == 3):
        # A language may allow what we like for ever, and want something else for its end.
        return allowed[len(output) * 7919 % len(allowed)]
    return int(liked[0])


def _reached(script: bytes, output: Sequence[int]) -> int:
    """Return how far a text has got: each id of the output moves on to its next occurrence."""
    at = 0
    for token_id in output:
        if token_id < NUM_BYTES:
            at = script.find(token_id, at) + 1 or at
    return at


def _is_allowed(mask: bytes, token_id: int) -> bool:
    return token_id >> 3 < len(mask) and bool(mask[token_id >> 3] >> (token_id & 7) & 1)


def _chance(token_id: int, num_top: int) -> Chance:
    likeliest = [token_id, *(i for i in range(num_top) if i != token_id)][:num_top]
    top = [(each, -math.log(2) * (rank + 1)) for rank, each in enumerate(likeliest)]
    return Chance(-math.log(2), top)


def _text_of(ids: Sequence[int]) -> str:
    """Return the text of ids, special tokens included."""
    parts = bytearray()
    for token_id in ids:
        if token_id < NUM_BYTES:
            parts.append(token_id)
        else:
            parts.extend(_SPECIALS[token_id - NUM_BYTES].encode())
    return parts.decode(errors="replace")
