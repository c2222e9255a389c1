"""What a program at work needs of the server around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from ..engines.engine import Engine
from ..prompts.model import Model
from ..scheduling.scheduler import Scheduler
from ..store.journal import Journal
from .encoder import Encoder
from .room import Room


class World(Protocol):
    """The server, as far as one of its programs sees it."""

    scheduler: Scheduler
    encoder: Encoder
    room: Room
    functions: Mapping[str, Callable[..., Any]]
    function_threads: ThreadPoolExecutor

    @property
    def journal(self) -> Journal:
        """Where everything is written."""
        ...

    @property
    def model(self) -> Model:
        """The model of the engines."""
        ...

    def engine(self, name: str) -> Engine | None:
        """The engine of that name, if it is alive."""
        ...
