"""A model as the server knows it: how text becomes its tokens, and what fits.

Built from an engine's hello and kept while engines come and go, so that prompts can be
encoded and checked while none is there.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from conure.engine import api

from ..program.errors import ProgramError, PromptError
from ..program.ir import Generate, Segment
from .chat_template import ChatTemplate
from .tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Model:
    """One model behind one or more engines."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate
    tokenizer_hash: str
    limits: api.Limits
    capabilities: frozenset[str]
    description: str
    loaded_at: float

    @classmethod
    def of(cls, hello: api.Hello) -> Model:
        """What an engine says of itself, made usable."""
        tokenizer = Tokenizer(
            hello.tokenizer_json, bos_id=hello.bos_id, special_tokens=hello.special_tokens
        )
        return cls(
            name=hello.model,
            tokenizer=tokenizer,
            template=ChatTemplate(
                hello.chat_template,
                hello.special_tokens,
                spells_special=tokenizer.spells_special,
            ),
            tokenizer_hash=hello.tokenizer_hash,
            limits=hello.limits,
            capabilities=frozenset(hello.capabilities),
            description=hello.description,
            loaded_at=time.time(),
        )

    @property
    def max_len(self) -> int:
        """Tokens of prompt and output together at most."""
        return min(self.limits.context_len, self.limits.num_blocks * self.limits.block_size)

    def answers_to(self, name: str) -> bool:
        """Whether a program that names this model means this one."""
        return name in {"default", self.name}

    def check(self, node: Generate, path: str) -> None:
        """Refuse what the model's engines cannot do, before any work.

        Raises:
            ProgramError: `model.unknown` or `engine.unsupported_*`, with the path of the field.
        """
        names = [node.model] if isinstance(node.model, str) else node.model
        if not any(map(self.answers_to, names)):
            raise ProgramError(
                "model.unknown",
                f"no engine serves {', '.join(names)}; this server has {self.name}",
                path=f"{path}.model",
            )
        if node.tools:
            raise ProgramError(
                "engine.unsupported_tools",
                f"model {self.name} cannot call tools",
                path=f"{path}.tools",
            )
        for where, constraint in _constraints(node, path):
            if constraint and "constraints" not in self.capabilities:
                raise ProgramError(
                    "engine.unsupported_constraint",
                    f"the engine of model {self.name} cannot constrain its output",
                    path=where,
                )
        for where, segment in _segments(node, path):
            if segment.part and "parts" not in self.capabilities:
                raise ProgramError(
                    "engine.unsupported_part",
                    f"model {self.name} reads text only",
                    path=f"{where}.part",
                )

    def output_budget(self, num_prompt: int, max_tokens: int | None, where: str) -> int:
        """How many tokens an output may have after a prompt of this length.

        Raises:
            PromptError: `prompt.too_long` if the prompt, or the prompt with the output that
                was asked for, does not fit. Nothing is ever cut silently.
        """
        limit = self.max_len
        wanted = 1 if max_tokens is None else max_tokens
        if num_prompt + wanted > limit:
            raise PromptError(
                "prompt.too_long",
                f"{where}: {num_prompt} prompt tokens and {wanted} output tokens exceed the limit "
                f"of {limit} tokens; shorten the prompt, lower max_tokens, or start the server "
                f"with a larger {self._limiting_flag()}",
            )
        return min(DEFAULT_MAX_TOKENS, limit - num_prompt) if max_tokens is None else max_tokens

    def _limiting_flag(self) -> str:
        in_memory = self.limits.num_blocks * self.limits.block_size
        if in_memory < self.limits.context_len:
            return f"--num-blocks (now {self.limits.num_blocks} of {self.limits.block_size} tokens)"
        return f"--context-len (now {self.limits.context_len})"


def _constraints(node: Generate, path: str) -> list[tuple[str, object]]:
    if isinstance(node.prompt, list):
        return [
            (f"{path}.prompt[{i}].constraint", segment.constraint)
            for i, segment in enumerate(node.prompt)
        ]
    return [(f"{path}.output.constraint", node.output.constraint if node.output else None)]


def _segments(node: Generate, path: str) -> list[tuple[str, Segment]]:
    if isinstance(node.prompt, list):
        return [(f"{path}.prompt[{i}]", segment) for i, segment in enumerate(node.prompt)]
    return [
        (f"{path}.messages[{i}].content[{j}]", segment)
        for i, message in enumerate(node.messages or [])
        if isinstance(message.content, list)
        for j, segment in enumerate(message.content)
    ]
