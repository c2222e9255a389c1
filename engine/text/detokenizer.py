"""Turns ids into text as they arrive, without partial characters or partial stop strings.

Tokens do not map to text one by one: a character may span several tokens, and the text of a
token may depend on the token before it (a leading space, a run of raw bytes). So a small window
of tokens is decoded twice, with and without the newest token, and the difference is the new
text. Text that ends in U+FFFD may be an incomplete character and is withheld. Text that may be
the beginning of a stop string is withheld, too. `finish` releases all of it.

Out of scope: EOS, limits and contexts.

Invariants: the concatenated results of `push` and `finish` are `text`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final, Protocol, cast

REPLACEMENT: Final = "\ufffd"
MAX_PENDING: Final = 3
"""Tokens that may be missing from a character: it has at most four bytes."""
_MIN_CONTEXT: Final = 4
"""Prompt tokens at the start of the first window."""
NUM_CONTEXT: Final = _MIN_CONTEXT + MAX_PENDING
"""Prompt tokens that a detokenizer chooses its first window from."""
MAX_WINDOW: Final = 64
"""Tokens of a window above which its text is final even if it ends in U+FFFD."""


class DecodingTokenizer(Protocol):
    """The part of `tokenizers.Tokenizer` that the detokenizer needs."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids."""
        ...


def load_tokenizer(tokenizer_json: str) -> DecodingTokenizer:
    """Load the tokenizer from the text of a tokenizer.json."""
    # Imported here: this module must load without the library.
    import tokenizers

    return cast(DecodingTokenizer, tokenizers.Tokenizer.from_str(tokenizer_json))


class Detokenizer:
    """The text of one Generate."""

    def __init__(
        self,
        tokenizer: DecodingTokenizer,
        prompt_tail: list[int],
        stop: Sequence[str],
        lengths: dict[int, int] | None = None,
    ) -> None:
        """Start after a prompt whose last `NUM_CONTEXT` ids (or fewer) are `prompt_tail`.

        Args:
            tokenizer: decodes ids.
            prompt_tail: the end of the prompt.
            stop: strings that end the text.
            lengths: characters of ids that were decoded alone; shared by all texts of a tokenizer.
        """
        self.text = ""
        """The decoded text, truncated at the stop string once one is found."""
        self.stop: str | None = None
        """The stop string that was found."""
        self._tokenizer = tokenizer
        self._lengths = {} if lengths is None else lengths
        self._window = self._first_window(prompt_tail)
        self._num_complete_tokens = len(self._window)
        """Tokens at the start of the window that form complete characters."""
        self._num_decoded_chars = len(self._decode(self._window)) if self._window else 0
        """Characters of the window's text that are already part of `text` or of the prompt."""
        self._stop = tuple(s for s in stop if s)
        self._max_stop = max(map(len, self._stop), default=0)
        self._ends: list[int] = []
        """For each complete id, the position in `text` where its text ends."""
        self._num_pushed = 0
        self._num_returned = 0
        self._search_from = 0
        self._can_stop = True

    def push(self, token_id: int, *, can_stop: bool = True) -> str:
        """Add the next id. Return text that is final and was not returned before.

        With `can_stop` false, the text so far is never searched for stop strings.
        """
        self._window.append(token_id)
        self._num_pushed += 1
        self._can_stop = can_stop
        delta = self._decode_newest()
        if not self._stop:
            self.text += delta
            return delta
        search_from = self._next_search()
        self.text += delta
        if len(self._window) == self._num_complete_tokens:
            # The window ends in a complete character: all pending ids end here.
            self._ends.extend([len(self.text)] * (self._num_pushed - len(self._ends)))
        if not can_stop:
            self._search_from = len(self.text)
            return self._return_until(len(self.text))
        self._find_stop(search_from)
        return self._return_until(len(self.text) - self._num_withheld())

    def finish(self) -> str:
        """End the text. Return all withheld text, with U+FFFD for incomplete characters.

        It may contain a stop string, before an incomplete character.
        """
        rest = ""
        if self.stop is None and len(self._window) > self._num_complete_tokens:
            search_from = self._next_search()
            rest = self._decode(self._window)[self._num_decoded_chars :]
            self.text += rest
            if self._can_stop:
                self._find_stop(search_from)
        return self._return_until(len(self.text)) if self._stop else rest

    def split_at_text_end(self) -> tuple[int, str]:
        """Return how many ids are entirely in `text`, and the tail of `text` after them.

        A token of an incomplete character ends where the character ends. Without a stop string,
        all ids are in the text.
        """
        if self.stop is None:
            return self._num_pushed, ""
        num_kept = bisect_right(self._ends, len(self.text))
        return num_kept, self.text[self._ends[num_kept - 1] if num_kept else 0 :]

    def has_text(self, token_id: int) -> bool:
        """Return whether an id has text. A special token has none."""
        return self._num_chars([token_id]) > 0

    def _first_window(self, prompt_tail: list[int]) -> list[int]:
        """Return the last tokens of a prompt, from the beginning of a character on.

        From within a character on, some decoders turn all bytes that follow into U+FFFD.
        """
        windows = [prompt_tail[-num:] for num in range(_MIN_CONTEXT, NUM_CONTEXT + 1)]
        return min(windows, key=lambda window: self._decode(window).count(REPLACEMENT))

    def _decode_newest(self) -> str:
        """Decode the window, and return the text that the newest token completes."""
        window = self._window
        text = self._decode_window()
        num_decoded = self._num_decoded_chars
        if text.endswith(REPLACEMENT) and len(window) <= MAX_WINDOW:
            if len(window) - self._num_complete_tokens <= MAX_PENDING:
                return ""
            # Too many tokens for one character: these bytes are not text. Only the last
            # replacement can still become a character.
            self._num_decoded_chars = max(num_decoded, len(text) - 1)
            return text[num_decoded:-1]
        if len(text) == num_decoded and len(window) <= MAX_WINDOW:
            # The text of the next token may depend on the tokens before this one.
            self._num_complete_tokens = len(window)
            return ""
        del window[: self._num_complete_tokens]
        self._num_complete_tokens = len(window)
        self._num_decoded_chars = self._num_chars(window)
        return text[num_decoded:]

    def _decode_window(self) -> str:
        """Return the text of the window. Remove its complete characters if later bytes change them.

        Some decoders turn a run of bytes into U+FFFD if it is not UTF-8 as a whole.
        """
        window = self._window
        text = self._decode(window)
        if REPLACEMENT in text[: self._num_decoded_chars]:
            complete = self._decode(window[: self._num_complete_tokens])
            if not text.startswith(complete):
                del window[: self._num_complete_tokens]
                self._num_complete_tokens = 0
                self._num_decoded_chars -= len(complete)
                return self._decode(window)
        return text

    def _num_chars(self, ids: list[int]) -> int:
        """Return the number of characters of ids. Mostly there is only the newest id."""
        if len(ids) != 1:
            return len(self._decode(ids))
        known = self._lengths.get(ids[0])
        if known is None:
            known = self._lengths[ids[0]] = len(self._decode(ids))
        return known

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def _next_search(self) -> int:
        """Return the first position of a stop string that is not searched for yet."""
        return max(self._search_from, len(self.text) - self._max_stop + 1)

    def _find_stop(self, search_from: int) -> None:
        """Truncate `text` at the first stop string; at equal positions, the one listed first."""
        first: tuple[int, str] | None = None
        for stop in self._stop:
            at = self.text.find(stop, search_from)
            if at >= 0 and (first is None or at < first[0]):
                first = at, stop
        if first is not None:
            self.text = self.text[: first[0]]
            self.stop = first[1]

    def _num_withheld(self) -> int:
        """Return the length of the longest tail that may be the beginning of a stop string."""
        if self.stop is not None:
            return 0
        text, end = self.text, len(self.text)
        first = end  # where the longest tail so far begins
        for stop in self._stop:
            # Only tails that begin like the stop string: there are few.
            begin = text.find(stop[0], max(self._search_from, end - len(stop) + 1), first)
            while begin >= 0:
                if stop.startswith(text[begin:]):
                    first = begin
                    break
                begin = text.find(stop[0], begin + 1, first)
        return end - first

    def _return_until(self, end: int) -> str:
        begin, self._num_returned = self._num_returned, max(self._num_returned, end)
        return self.text[begin:end]
