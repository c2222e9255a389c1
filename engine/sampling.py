"""What the sampling of a step's rows means for their logits, and what came of it.

`plan` reads what each row's `Sampling`, mask and tokens say and writes it down as the arrays
that `choosing` obeys on the device; `read` takes home what came out. A row that takes its
largest logit as it stands needs nothing of this.

The repetition penalty counts the whole context, the other two count what this Generate
produced. A row's mask says all about end tokens; without one they are banned until
`min_tokens` are there, or for good under `ignore_eos`.

Knows ids and `Sampling`; refuses to know text, stop strings and when a row is over. Kept
true: a row's result is the same in any batch, and there is no state to lose.

Shapes: S sampling rows - V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .api import Chance, Sampling
from .choosing import Edits, choose
from .runner import Row
from .seen import Seen, has_penalty

Words = NDArray[np.uint64]

_GOLDEN: Final = 0x9E3779B97F4A7C15
_MASK: Final = 2**64 - 1
_BANNED: Final = float("-inf")


class Wishes(NamedTuple):
    """What the rows of a step want besides their largest logit."""

    edits: Edits[NDArray[Any]]
    num_top: int
    """Likeliest tokens that some row wants told."""


@torch.inference_mode()
def sample(logits: Tensor, rows: Sequence[Row], eos_ids: Sequence[int]) -> list[int]:
    """Return the next id of each row; what `plan`, `choose` and `read` do, on the CPU.

    Args:
        logits: [S, V], any float dtype, on the CPU. Overwritten where a row is not plainly
            greedy.
        rows: The sampling rows in the order of `logits`, each with `sampling` set.
        eos_ids: Tokens that end a text; masked where a row's sampling says so.
    """
    wishes = plan(rows, eos_ids, logits.shape[1])
    if wishes is None:
        return read(choose(logits, None).tolist(), rows, None)
    edits = Edits(*(torch.from_numpy(array) for array in wishes.edits))
    return read(choose(logits, edits, wishes.num_top).tolist(), rows, wishes)


def plan(rows: Sequence[Row], eos_ids: Sequence[int], width: int) -> Wishes | None:
    """Write down what the rows want; None where all take their largest logit.

    Args:
        rows: The sampling rows, each with `sampling` set.
        eos_ids: Tokens that end a text.
        width: V.
    """
    sampled = [_sampling(row) for row in rows]
    if all(_is_plain(one, row) for one, row in zip(sampled, rows, strict=True)):
        return None
    factored: list[NDArray[np.int64]] = [_integers(())]
    factors: list[NDArray[np.float32]] = [np.zeros(0, np.float32)]
    raises: dict[int, float] = {}
    for index, (one, row) in enumerate(zip(sampled, rows, strict=True)):
        first = index * width
        seen = _counted(one, row)
        if one.repetition_penalty != 1:
            factored.append(first + np.array(seen.distinct, np.int64))
            factors.append(np.full(len(factored[-1]), one.repetition_penalty, np.float32))
        for token, amount in _additions(one, row, seen, eos_ids):
            if 0 <= token < width:
                raises[first + token] = raises.get(first + token, 0.0) + amount
    masked = [index for index, row in enumerate(rows) if row.mask is not None]
    drawn = [index for index, one in enumerate(sampled) if one.temperature > 0]
    random = [sampled[index] for index in drawn]
    cut = [index for index, one in enumerate(random) if _has_cut(one)]
    told = [index for index, one in enumerate(sampled) if one.logprobs is not None]
    edits: Edits[NDArray[Any]] = Edits(
        factored=np.concatenate(factored),
        factors=np.concatenate(factors),
        raised=_integers(raises),
        raises=np.fromiter(raises.values(), np.float32, len(raises)),
        masked=_integers(masked),
        masks=_masks([rows[index].mask or b"" for index in masked], width),
        drawn=_integers(drawn),
        temperatures=np.array([one.temperature for one in random], np.float64),
        keys=np.array(
            [_key(one.seed, rows[index].length) for index, one in zip(drawn, random, strict=True)],
            np.uint64,
        ).view(np.int64),
        cut=_integers(cut),
        top_k=_integers(max(random[index].top_k, 0) or width for index in cut),
        top_p=np.array([random[index].top_p for index in cut], np.float64),
        min_p=np.array([random[index].min_p for index in cut], np.float64),
        told=_integers(told),
    )
    num_top = max((sampled[index].logprobs or 0 for index in told), default=0)
    return Wishes(edits, min(num_top, width))


def read(found: list[float] | list[int], rows: Sequence[Row], wishes: Wishes | None) -> list[int]:
    """Return the ids in what `choose` returned; give rows the chances that they want told."""
    if wishes is None:
        return [int(token) for token in found]
    told: list[int] = wishes.edits.told.tolist()
    num, top = len(rows), wishes.num_top
    logprobs = found[num : num + len(told)]
    values = found[num + len(told) : num + len(told) * (1 + top)]
    tokens = found[num + len(told) * (1 + top) :]
    for place, index in enumerate(told):
        wanted = slice(place * top, place * top + (_sampling(rows[index]).logprobs or 0))
        wanted = slice(wanted.start, min(wanted.stop, (place + 1) * top))
        likeliest = zip(map(int, tokens[wanted]), values[wanted], strict=True)
        rows[index].chance = Chance(logprobs[place], list(likeliest))
    return [int(token) for token in found[:num]]


def mix(words: Words) -> Words:
    """Return splitmix64's finaliser of each word: all bits of the input reach all of the output."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def uniforms(seed: int, stream: int, count: int) -> NDArray[np.float64]:
    """Return `count` numbers in (0, 1) that only (seed, stream) decide, the same everywhere.

    Args:
        seed: Any integer; taken modulo 2**64.
        stream: Which of the seed's sequences, such as a position; modulo 2**64.
        count: Numbers wanted; number i does not depend on it.
    """
    counters = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    # 52 bits, so that adding a half is exact and neither 0 nor 1 comes out.
    bits = mix(counters + np.uint64(_key(seed, stream))) >> np.uint64(12)
    return (bits.astype(np.float64) + 0.5) * 2.0**-52


def _key(seed: int, stream: int) -> int:
    """Return the 64 bits by which two numbers decide all noise of a row."""
    return _mixed(_mixed(seed + _GOLDEN) ^ _mixed((stream + 1) * _GOLDEN))


def _mixed(word: int) -> int:
    """Return what `mix` makes of one word, which may be any integer."""
    word &= _MASK
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _MASK
    return word ^ (word >> 31)


def _integers(numbers: Any) -> NDArray[np.int64]:
    return np.fromiter(numbers, np.int64)


def _sampling(row: Row) -> Sampling:
    assert row.sampling is not None, "only sampling rows have logits"
    return row.sampling


def _is_plain(sampling: Sampling, row: Row) -> bool:
    """Say whether the largest logit is the answer as it stands."""
    return (
        sampling.temperature == 0
        and not has_penalty(sampling)
        and not sampling.ignore_eos
        and not sampling.logit_bias
        and sampling.logprobs is None
        and row.mask is None
        and row.length - row.num_prompt >= sampling.min_tokens
    )


def _counted(sampling: Sampling, row: Row) -> Seen:
    """Return what a row's penalties go by; nothing is counted where there are none."""
    seen = Seen(row.num_prompt) if row.seen is None else row.seen
    if has_penalty(sampling):
        seen.count(row.ids)
    return seen


def _additions(
    sampling: Sampling, row: Row, seen: Seen, eos_ids: Sequence[int]
) -> Iterator[tuple[int, float]]:
    """Yield what is added to which logits of a row; a token may come more than once."""
    presence, frequency = sampling.presence_penalty, sampling.frequency_penalty
    if presence != 0 or frequency != 0:
        for token, count in seen.generated.items():
            yield token, -(presence + frequency * count)
    yield from sampling.logit_bias
    if row.mask is not None:
        return
    is_early = row.length - row.num_prompt < sampling.min_tokens
    if is_early or sampling.ignore_eos:
        yield from ((token, _BANNED) for token in eos_ids)
    if is_early:
        yield from ((token, _BANNED) for token in sampling.stop_token_ids)


def _has_cut(sampling: Sampling) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0


def _masks(masks: Sequence[bytes], width: int) -> NDArray[np.uint8]:
    """Return masks as bits [M, W] for `width` tokens: those beyond a mask are not allowed."""
    num_bytes = -(-width // 8)
    found = np.zeros((len(masks), num_bytes), np.uint8)
    for row, mask in enumerate(masks):
        taken = mask[:num_bytes]
        found[row, : len(taken)] = np.frombuffer(taken, np.uint8)
    return found
