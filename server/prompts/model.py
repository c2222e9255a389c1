"""A model as the server knows it: how text becomes its tokens, and what fits.

Built from an engine's hello and kept while engines come and go, so that prompts can be
encoded and checked while none is there.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from msgspec import UNSET

from conure.engine import api

from ..program.errors import ProgramError, PromptError
from ..program.ir import Generate, Output, Segment
from .chat_template import ChatTemplate
from .tokenizer import Tokenizer
from .tool_format import ToolFormat, find_tool_format

DEFAULT_MAX_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Model:
    """One model behind one or more engines."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate
    tool_format: ToolFormat | None
    """None: it cannot be made to call tools."""
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
        template = ChatTemplate(
            hello.chat_template,
            hello.special_tokens,
            spells_special=tokenizer.spells_special,
        )
        tool_format = find_tool_format(template)
        if tool_format is not None and not _is_shown(tool_format, tokenizer):
            tool_format = None
        return cls(
            name=hello.model,
            tokenizer=tokenizer,
            template=template,
            tool_format=tool_format,
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
            self._check_tools(path)
        for where, output in outputs_of(node, path):
            self._check_output(output, where)
        for where, segment in _segments(node, path):
            if segment.part and "parts" not in self.capabilities:
                raise ProgramError(
                    "engine.unsupported_part",
                    f"model {self.name} reads text only",
                    path=f"{where}.part",
                )

    def _check_tools(self, path: str) -> None:
        if self.tool_format is None:
            raise ProgramError(
                "engine.unsupported_tools",
                f"model {self.name} cannot call tools: its chat template shows none, or writes "
                "calls with control tokens or in a form that is not JSON",
                path=f"{path}.tools",
            )
        if "constraints" not in self.capabilities:
            raise ProgramError(
                "engine.unsupported_tools",
                f"the engine of model {self.name} cannot hold an answer to the tools' schemas",
                path=f"{path}.tools",
            )

    def _check_output(self, output: Output | Segment, path: str) -> None:
        if output.constraint and "constraints" not in self.capabilities:
            raise ProgramError(
                "engine.unsupported_constraint",
                f"the engine of model {self.name} cannot constrain its output",
                path=f"{path}.constraint",
            )
        if output.logprobs is not None and "logprobs" not in self.capabilities:
            raise ProgramError(
                "engine.unsupported_logprobs",
                f"the engine of model {self.name} does not tell logprobs",
                path=f"{path}.logprobs",
            )
        last = max(output.logit_bias, default=None)
        if last is not None and last >= (num_tokens := self.tokenizer.num_tokens):
            raise ProgramError(
                "program.sampling",
                f"model {self.name} has no token {last}; its ids are below {num_tokens}",
                path=f"{path}.logit_bias",
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
                f"with {self._remedy()}",
            )
        return min(DEFAULT_MAX_TOKENS, limit - num_prompt) if max_tokens is None else max_tokens

    def _remedy(self) -> str:
        """What would let more tokens in. A model that was made for no more is known to engines."""
        limits = self.limits
        if limits.num_blocks * limits.block_size < limits.context_len:
            return f"a larger --num-blocks (now {limits.num_blocks} of {limits.block_size} tokens)"
        longer = "a larger --context-len, if the model was made for more"
        return f"{longer} (now {limits.context_len})"


def _is_shown(form: ToolFormat, tokenizer: Tokenizer) -> bool:
    """Whether all of a call can be read in the text of an answer, which has no control tokens."""
    call = form.spell([("name", {}), ("name", {})] if form.joint else [("name", {})])
    return tokenizer.is_shown(call)


def outputs_of(node: Generate, path: str) -> list[tuple[str, Output | Segment]]:
    """The outputs of a node, each with its path in the submission."""
    if isinstance(node.prompt, list):
        return [
            (f"{path}.prompt[{i}]", segment)
            for i, segment in enumerate(node.prompt)
            if segment.output is not UNSET
        ]
    return [(f"{path}.output", node.output)] if isinstance(node.output, Output) else []


def _segments(node: Generate, path: str) -> list[tuple[str, Segment]]:
    if isinstance(node.prompt, list):
        return [(f"{path}.prompt[{i}]", segment) for i, segment in enumerate(node.prompt)]
    return [
        (f"{path}.messages[{i}].content[{j}]", segment)
        for i, message in enumerate(node.messages or [])
        if isinstance(message.content, list)
        for j, segment in enumerate(message.content)
    ]
