"""Words of passages: generated names, places and numbers, and lists of ordinary words.

Names are generated from letters or syllables, so that a model cannot memorise them and has to copy.
One in eight, by a checksum of its spelling, is *held back*: training never uses it, and evaluation
uses only such names. The same applies to places and numbers. Dates, causes and nouns come from
short lists that training and evaluation share.

Invariant: the same generator state gives the same word on every machine.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

ONSETS: Final = (
    *(*"bdfghjklmnprstvwz",) * 3,
    *"br ch d dr f fl gr kl pr qu sch sh sk st str th tr y x".split(),
    "",
    "",
)
VOWELS: Final = (*"aaaeeeiiooouu", "ai", "ea", "ei", "ia", "oo", "ou", "y")
CODAS: Final = (*("",) * 6, *"lmnrstkx", "nd", "rk", "rt", "sk", "ll")
SURNAME_ENDS: Final = ("", "", "", "er", "son", "man", "ov", "ini", "berg", "wick", "sen", "y")
PLACE_ENDS: Final = ("", "", "", "ton", "ford", "by", "holm", "wood", "field", "bury", "dale", "ia")
ACCENTED: Final = {"a": "áäå", "e": "éè", "i": "í", "o": "öøó", "u": "üú"}

ADJECTIVES: Final = (
    *("broken loose cracked dirty wet frozen old blocked burnt missing hidden cheap worn").split(),
    *("faulty open heavy hot rotten wrong empty").split(),
)
THINGS: Final = (
    *(
        "valve pipe cable rail fuse brake wheel door roof ladder window pump tank motor hose"
    ).split(),
    *("chain lamp switch stove crane").split(),
)
TOOLS: Final = tuple("hammer saw drill rope spade axe file torch knife brush chisel bucket".split())
ANIMALS: Final = tuple("goat hen cow dog horse pig duck cat sheep goose mule rabbit".split())
FRUITS: Final = tuple("apple pear plum cherry lemon melon fig grape peach orange date lime".split())
MONTHS: Final = (
    *("January February March April May June July August September October").split(),
    *("November December").split(),
)
FIRST_NAMES: Final = (
    *("Anna Maria Sofia Emma Olivia Laura Julia Clara Ingrid Astrid Fatima Aisha Leila").split(),
    *("Priya Ananya Mei Yuki Hana Chloe Zoe Beatriz Carmen Lucia Katarzyna Agnieszka").split(),
    *("John Steven Michael Thomas William George Henry Oliver Lars Henrik Johan Mateusz").split(),
    *("Ivan Dmitri Omar Yusuf Rahul Arjun Wei Hiroshi Kenji Pablo Diego Joaquim Giovanni").split(),
)
SURNAMES: Final = (
    *("Smith Jones Taylor Brown Wright Walker Thompson Robinson Clarke Mitchell Campbell").split(),
    *("Andersson Nielsen Hansen Johansson Lindqvist Schmidt Fischer Weber Schneider").split(),
    *("Kowalski Nowak Petrov Ivanova Novak Horvat Rossi Ferrari Esposito Garcia Martinez").split(),
    *("Fernandes Oliveira Dubois Laurent Okafor Mensah Haddad Khan Patel Sharma Tanaka").split(),
)
TOWNS: Final = (
    *("London Paris Berlin Madrid Barcelona Lisbon Rome Milan Vienna Prague Warsaw Krakow").split(),
    *("Budapest Athens Istanbul Cairo Lagos Nairobi Mumbai Delhi Tokyo Osaka Kyoto Seoul").split(),
    *("Oslo Bergen Stockholm Uppsala Helsinki Copenhagen Hamburg Dresden Leipzig Zurich").split(),
    *("Geneva Lyon Toulouse Bristol Oxford Cardiff Glasgow Dublin Boston Chicago Denver").split(),
)


def is_held_back(word: str) -> bool:
    """Return whether a name, place or number is reserved for evaluation."""
    return zlib.crc32(word.lower().encode()) % 8 == 0


@dataclass(frozen=True, slots=True)
class Words:
    """Draws words that are not held back, or for evaluation only held-back ones."""

    rng: random.Random
    is_evaluation: bool = False
    drawn: set[str] = field(default_factory=set)
    """Names, places and numbers drawn so far."""

    def person(self) -> str:
        """Return a first name, usually with a surname."""
        first = self._draw(lambda: self._name(("",)))
        if self.rng.random() < 0.3:
            return first
        return f"{first} {self._draw(lambda: self._name(SURNAME_ENDS))}"

    def place(self) -> str:
        """Return the name of a village, a town or a street."""
        return self._draw(lambda: self._name(PLACE_ENDS))

    def number(self) -> str:
        """Return an integer of two to four digits."""
        return self._draw(lambda: str(self.rng.randrange(10, 10 ** self.rng.randint(2, 4))))

    def date(self) -> str:
        """Return a day and a month."""
        return f"{self.rng.randint(1, 30)} {self.rng.choice(MONTHS)}"

    def cause(self) -> str:
        """Return a thing with its defect."""
        return f"{self.rng.choice(ADJECTIVES)} {self.rng.choice(THINGS)}"

    def several(self, draw: Callable[[], str], minimum: int, maximum: int) -> list[str]:
        """Return between `minimum` and `maximum` different words."""
        num = self.rng.randint(minimum, maximum)
        words: list[str] = []
        while len(words) < num:
            word = draw()
            if word not in words:
                words.append(word)
        return words

    def _draw(self, draw: Callable[[], str]) -> str:
        while True:
            word = draw()
            if is_held_back(word) == self.is_evaluation:
                self.drawn.add(word)
                return word

    def _name(self, ends: tuple[str, ...]) -> str:
        rng = self.rng
        if rng.random() < 0.08:
            letters = [rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(3, 6))]
            return "".join(letters).capitalize()
        end = rng.choice(ends)
        count = 1 if end and rng.random() < 0.5 else rng.choice((1, 2, 2, 2, 2, 3))
        name = "".join(
            rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(count)
        )
        name += end
        if rng.random() < 0.04:
            name = "".join(rng.choice(ACCENTED.get(c, c)) for c in name)
        return name.capitalize() if 3 <= len(name) <= 11 else self._name(ends)


class RealWords(Words):
    """Draws names of real people and towns, for evaluation."""

    def person(self) -> str:
        """Return a first name, usually with a surname."""
        first = self._draw(lambda: self.rng.choice(FIRST_NAMES))
        if self.rng.random() < 0.3:
            return first
        return f"{first} {self._draw(lambda: self.rng.choice(SURNAMES))}"

    def place(self) -> str:
        """Return the name of a town."""
        return self._draw(lambda: self.rng.choice(TOWNS))

    def _draw(self, draw: Callable[[], str]) -> str:
        word = draw()
        self.drawn.add(word)
        return word
