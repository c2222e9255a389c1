"""The backend that computes the attention of a forward pass.

Models reach it through `CURRENT`: those of `llama` directly, those of transformers through the hook
of `attention_hook`.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Final, Protocol

from torch import Tensor, nn

ATTENTION: Final = "conure"
"""The name of the backend among transformers' attention implementations."""


class AttentionBackend(Protocol):
    """Computes the attention of a forward pass."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attend for one layer: heads-first [1, H, T, D] in, [1, T, H, E] out."""
        ...


CURRENT: Final[ContextVar[AttentionBackend]] = ContextVar("attention_backend")
"""The backend of the running forward pass. A context variable, because some models drop extra
arguments on the way to the hook."""
