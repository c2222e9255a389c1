"""A served model from the server's point of view: its tokenizer, chat template and limits.

Built from an engine's hello, and kept while engines restart, so that prompts can be encoded and
checked without an engine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import UNSET

from conure.engine import protocol

from ..program.errors import ProgramError, PromptError
from ..program.expressions.placeholders import segment_paths
from ..program.ir import GenerateNode, Json, Message, Output, Segment
from .chat_template import ChatTemplate
from .model_notices import UNTRAINED_TOOLS
from .prompt import render_chat
from .tokenizer import EncodedText, PromptPiece, Tokenizer, TooManyTokensError
from .tool_format import ToolFormat, find_tool_format

logger = logging.getLogger(__name__)

MAX_EXCESS_TOKENS = 65_536
"""Tokens beyond a model's limit that are still counted, for errors that state their number."""
EXPECTED_OUTPUT_TOKENS = 512
"""The length of an output without `max_tokens`, as the scheduler estimates it."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that one or more engines run."""

    name: str
    aliases: tuple[str, ...]
    """Other names that programs may use."""
    tokenizer: Tokenizer
    template: ChatTemplate
    tool_format: ToolFormat | None
    """None if the model cannot be made to call tools."""
    tokenizer_hash: str
    num_ids: int
    """Ids that both the tokenizer and the model have."""
    limits: protocol.EngineLimits
    """Those of the smallest engine."""
    capabilities: frozenset[str]
    description: str
    purpose: protocol.ModelPurpose
    loaded_at: float
    logged: set[str] = field(default_factory=set, compare=False)
    """The notices that were logged: each is logged once."""

    @classmethod
    def of(cls, hello: protocol.Hello) -> ServedModel:
        """Build a model from an engine's hello."""
        tokenizer = Tokenizer(
            hello.tokenizer_json, bos_id=hello.bos_id, special_tokens=hello.special_tokens
        )
        template = ChatTemplate(
            hello.chat_template,
            hello.special_tokens,
            spells_special=tokenizer.spells_special,
        )
        tool_format = find_tool_format(template)
        if tool_format is not None and not _is_visible(tool_format, tokenizer):
            tool_format = None
        return cls(
            name=hello.model,
            aliases=hello.aliases,
            tokenizer=tokenizer,
            template=template,
            tool_format=tool_format,
            tokenizer_hash=hello.tokenizer_hash,
            num_ids=min(tokenizer.num_tokens, hello.num_ids),
            limits=hello.limits,
            capabilities=frozenset(hello.capabilities),
            description=hello.description,
            purpose=hello.purpose,
            loaded_at=time.time(),
        )

    @property
    def max_len(self) -> int:
        """Return the maximum number of tokens of prompt and output together."""
        return min(self.limits.context_len, self.limits.num_blocks * self.limits.block_size)

    def serves(self, name: str) -> bool:
        """Return whether a program that names this model means this one."""
        return name in ("default", self.name, *self.aliases)

    def check_name(self, names: Sequence[str], path: str) -> None:
        """Reject a list of models without this one.

        Raises:
            ProgramError: `model.unknown`.
        """
        if not any(map(self.serves, names)):
            raise ProgramError(
                "model.unknown",
                f"no engine serves {', '.join(names)}; this server has {self.name}",
                path=path,
            )

    def tokenize(
        self,
        prompt: str | list[Message],
        *,
        tools: list[dict[str, Json]],
        bos: bool,
        template_options: dict[str, Json],
    ) -> list[int]:
        """Return the ids of a text, or of messages as a call sends them. May run in a thread.

        Args:
            prompt: the text, or messages without variables.
            tools: that the messages may call.
            bos: whether a text begins with the model's BOS.
            template_options: options of the chat template.

        Raises:
            ProgramError: if a message is malformed or reads a variable, or the model cannot call
                tools.
            PromptError: if the prompt cannot be encoded.
        """
        if isinstance(prompt, str):
            pieces = (PromptPiece(prompt, special=False),)
            return self._encode("the text", pieces, bos=bos).ids
        answer = Output(variable="answer", form="message")
        node = GenerateNode(
            id="tokenize",
            messages=prompt,
            output=answer,
            tools=tools or UNSET,
            template_options=template_options,
        )
        [slot] = node.make_slots()
        if slot.reads:
            names = ", ".join(sorted(slot.reads))
            message = f"the messages read variables ({names}), which have no values here"
            raise ProgramError("tokenize.prompt", message, path="messages")
        if tools:
            self._check_tools("tools")
        rendered = render_chat(node, {}, self.template)
        return self._encode("the messages", rendered.pieces, bos=False).ids

    def check(self, node: GenerateNode, path: str) -> None:
        """Reject a node that the model's engines cannot run, before any work is done.

        Raises:
            ProgramError: `model.unknown` or `engine.unsupported_*`, with the path of the field.
        """
        names = [node.model] if isinstance(node.model, str) else node.model
        self.check_name(names, f"{path}.model")
        if node.tools:
            self._check_tools(path)
            if self.purpose == "demonstration" and UNTRAINED_TOOLS not in self.logged:
                self.logged.add(UNTRAINED_TOOLS)
                logger.warning("model %s: %s", self.name, UNTRAINED_TOOLS)
        if node.prompt_ids is not UNSET:
            self.check_id(max(node.prompt_ids, default=0), f"{path}.prompt_ids")
        for location, output in outputs_of(node, path):
            self._check_output(output, location)
        for location, segment in _segments(node, path):
            if segment.part and "parts" not in self.capabilities:
                raise ProgramError(
                    "engine.unsupported_part",
                    f"model {self.name} accepts text only; remove the "
                    f"{segment.part.get('type', 'unknown')!r} part, or use a multimodal model",
                    path=f"{location}.part",
                )

    def _check_tools(self, path: str) -> None:
        if self.tool_format is None:
            raise ProgramError(
                "engine.unsupported_tools",
                f"model {self.name} cannot call tools: its chat template does not support them, or "
                "writes calls with control tokens or arguments that are not JSON",
                path=f"{path}.tools",
            )
        if "constraints" not in self.capabilities:
            raise ProgramError(
                "engine.unsupported_tools",
                f"the engine of model {self.name} cannot restrict outputs to the tools' schemas",
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
                f"the engine of model {self.name} does not support logprobs",
                path=f"{path}.logprobs",
            )
        self.check_id(max(output.logit_bias, default=0), f"{path}.logit_bias")

    def check_id(self, token_id: int, path: str) -> None:
        """Raise a ProgramError if the model does not have a token; `path` is the id's."""
        if token_id >= self.num_ids:
            raise ProgramError(
                "program.sampling",
                f"model {self.name} does not have token {token_id}; its ids are below "
                f"{self.num_ids}",
                path=path,
            )

    def encode(self, node: GenerateNode, slot: int, pieces: Sequence[PromptPiece]) -> EncodedText:
        """Return the ids that an output of a node appends to its context before it generates.

        Args:
            node: a checked node.
            slot: index of the output.
            pieces: the rendered text before the output, from the previous output on.

        Raises:
            PromptError: as `Tokenizer.encode`; `prompt.too_long` if the text is so much longer than
                the limit that its tokens are not counted.
        """
        location = f"node {node.id}"
        is_start = slot == 0 and isinstance(node.prompt, list)
        if not is_start or node.prompt_ids is UNSET:
            return self._encode(location, pieces, bos=is_start, continues=slot > 0)
        given = node.prompt_ids
        text = self._encode(location, pieces, bos=False, continues=bool(given))
        # Given ids precede the text, as a BOS does.
        return EncodedText([*given, *text.ids], [*[0] * len(given), *text.ends])

    def _encode(
        self, location: str, pieces: Sequence[PromptPiece], *, bos: bool, continues: bool = False
    ) -> EncodedText:
        limit = self.max_len
        try:
            return self.tokenizer.encode(
                pieces, bos=bos, continues=continues, max_tokens=limit + MAX_EXCESS_TOKENS
            )
        except TooManyTokensError as error:
            raise PromptError(
                "prompt.too_long",
                f"{location}: more than {error.max_tokens} prompt tokens exceed the limit of "
                f"{limit} tokens; shorten the prompt, or start the server with {self._remedy()}",
            ) from None

    def output_budget(
        self, num_prompt: int, max_tokens: int | None, location: str, *, is_clipped: bool = False
    ) -> int:
        """Return how many tokens an output may have after a prompt of this length.

        Args:
            num_prompt: tokens of the prompt.
            max_tokens: the requested limit; None for what the context leaves.
            location: names the call in errors.
            is_clipped: whether the requested limit is reduced to what the context leaves.

        Raises:
            PromptError: `prompt.too_long` if the prompt, or the prompt with the requested output,
                does not fit. Nothing is truncated silently.
        """
        limit = self.max_len
        num_requested = 1 if max_tokens is None or is_clipped else max_tokens
        if num_prompt + num_requested > limit:
            raise PromptError(
                "prompt.too_long",
                f"{location}: {num_prompt} prompt tokens and {num_requested} output tokens exceed "
                f"the limit of {limit} tokens; shorten the prompt, lower max_tokens, or start the "
                f"server with {self._remedy()}",
            )
        num_left = limit - num_prompt
        return num_left if max_tokens is None else min(max_tokens, num_left)

    def _remedy(self) -> str:
        """Return the setting that raises the limit. Only engines check whether the model supports
        more.
        """
        limits = self.limits
        num_tokens = limits.num_blocks * limits.block_size
        blocks = f"a larger --num-blocks (now {limits.num_blocks} of {limits.block_size} tokens)"
        if num_tokens < limits.context_len:
            return blocks
        if num_tokens == limits.context_len:
            return f"{blocks}, or with more free memory"
        longer = "a larger --context-len, if the model supports more"
        return f"{longer} (now {limits.context_len})"


def _is_visible(tool_format: ToolFormat, tokenizer: Tokenizer) -> bool:
    """Return whether a tool call is visible in the text of an answer without control tokens."""
    call = tool_format.render_calls(
        [("name", {}), ("name", {})] if tool_format.separator else [("name", {})]
    )
    return tokenizer.is_visible(call)


def outputs_of(node: GenerateNode, path: str) -> list[tuple[str, Output | Segment]]:
    """Return the outputs of a node, each with its path in the submission."""
    if isinstance(node.prompt, list):
        return [
            (f"{path}.{where}", segment)
            for where, segment in zip(segment_paths(node.prompt), node.prompt, strict=True)
            if segment.output is not UNSET
        ]
    return [(f"{path}.output", node.output)] if isinstance(node.output, Output) else []


def _segments(node: GenerateNode, path: str) -> list[tuple[str, Segment]]:
    if isinstance(node.prompt, list):
        return [
            (f"{path}.{where}", segment)
            for where, segment in zip(segment_paths(node.prompt), node.prompt, strict=True)
        ]
    return [
        (f"{path}.messages[{i}].content[{j}]", segment)
        for i, message in enumerate(node.messages or [])
        if isinstance(message.content, list)
        for j, segment in enumerate(message.content)
    ]
