"""Ids to text while they come, without half characters and without half stop strings.

A token is not text: one character may span several tokens, and what a token says may depend
on the one before it (a leading space, a run of raw bytes). So a small window of tokens is
decoded whole, once with and once without the newest one, and the difference is the new
text. Text that ends in U+FFFD may be a character that is not complete yet and is held back;
text that may be the beginning of a stop string is held back too. Nothing is held at the end.

Knows a tokenizer and stop strings. Refuses to know EOS, limits and contexts. Kept true: the
texts that `push` and `finish` return, joined, are `text`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final, Protocol, cast

REPLACEMENT: Final = "\ufffd"
NUM_CONTEXT: Final = 4
"""Tokens of the prompt that the first window begins with."""
MAX_HELD: Final = 3
"""Tokens that a character can lack: it has four bytes at most."""
MAX_WINDOW: Final = 64
"""Tokens without one complete character after which a window is given up."""


class Tokenizer(Protocol):
    """What this file needs of `tokenizers.Tokenizer`."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids."""
        ...


def load_tokenizer(tokenizer_json: str) -> Tokenizer:
    """Build the tokenizer of a tokenizer.json text."""
    # Imported here: the contract files of this folder must load without the library.
    import tokenizers

    return cast(Tokenizer, tokenizers.Tokenizer.from_str(tokenizer_json))


class Detokenizer:
    """The text of one Generate."""

    def __init__(self, tokenizer: Tokenizer, prompt_tail: list[int], stop: Sequence[str]) -> None:
        """Start after a prompt whose last `NUM_CONTEXT` ids (or fewer) are `prompt_tail`."""
        self.text = ""
        """Everything decoded; cut at the stop string once one is found."""
        self.stop: str | None = None
        """The stop string that was found."""
        self._tokenizer = tokenizer
        self._window = list(prompt_tail)
        self._num_read = len(self._window)
        self._num_sent = len(self._decode(self._window)) if self._window else 0
        self._stop = tuple(s for s in stop if s)
        self._max_stop = max(map(len, self._stop), default=0)
        self._ends: list[int] = []
        self._num_pushed = 0
        self._num_shown = 0
        self._search_from = 0

    def push(self, token_id: int, *, can_stop: bool = True) -> str:
        """Take the next id; return what of the text is certain and was not returned yet.

        With `can_stop` false no stop string is looked for, nor later in this part.
        """
        self._window.append(token_id)
        self._num_pushed += 1
        delta = self._read()
        if not self._stop:
            self.text += delta
            return delta
        search_from = max(self._search_from, len(self.text) - self._max_stop + 1)
        self.text += delta
        if len(self._window) == self._num_read:
            # The window ends in a whole character: what was pending ends here with it.
            self._ends.extend([len(self.text)] * (self._num_pushed - len(self._ends)))
        if not can_stop:
            self._search_from = len(self.text)
            return self._show(len(self.text))
        self._cut(search_from)
        return self._show(len(self.text) - self._num_held())

    def finish(self) -> str:
        """End the text: return all that was held back, incomplete characters as U+FFFD."""
        rest = ""
        if self.stop is None and len(self._window) > self._num_read:
            rest = self._decode(self._window)[self._num_sent :]
            self.text += rest
        return self._show(len(self.text)) if self._stop else rest

    def kept(self) -> tuple[int, str]:
        """Return how many ids lie wholly inside `text`, and the tail of it after them.

        A token of an incomplete character lies where the character ends. Without a stop
        string every id lies inside.
        """
        if self.stop is None:
            return self._num_pushed, ""
        num_kept = bisect_right(self._ends, len(self.text))
        return num_kept, self.text[self._ends[num_kept - 1] if num_kept else 0 :]

    def _read(self) -> str:
        """Return the text that the newest token completes."""
        window = self._window
        text = self._decode(window)
        num_sent = self._num_sent
        if text.endswith(REPLACEMENT) and len(window) <= MAX_WINDOW:
            if len(window) - self._num_read <= MAX_HELD:
                return ""
            # Too many tokens for one character: these bytes are no text. Only the last
            # replacement can still become a character.
            self._num_sent = max(num_sent, len(text) - 1)
            return text[num_sent:-1]
        del window[: self._num_read]
        self._num_read = len(window)
        self._num_sent = len(self._decode(window))
        return text[num_sent:]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def _cut(self, search_from: int) -> None:
        """Look for the stop string that begins first; among those, the one given first."""
        found: tuple[int, str] | None = None
        for stop in self._stop:
            at = self.text.find(stop, search_from)
            if at >= 0 and (found is None or at < found[0]):
                found = at, stop
        if found is not None:
            self.text = self.text[: found[0]]
            self.stop = found[1]

    def _num_held(self) -> int:
        """Length of the longest tail that may be the beginning of a stop string."""
        if self.stop is not None:
            return 0
        longest = min(self._max_stop - 1, len(self.text) - self._search_from)
        for length in range(longest, 0, -1):
            tail = self.text[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0

    def _show(self, end: int) -> str:
        begin, self._num_shown = self._num_shown, max(self._num_shown, end)
        return self.text[begin:end]
