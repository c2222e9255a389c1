"""`generate`: an LLM call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeVar

from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import force_setattr, replace

from ..checks import check_constraint, check_name, listed
from ..content import MAX_TEXT, Expression, Json, Message, Output, Sampling, Segment
from ..errors import ProgramError
from ..expressions.evaluate import input_expression, variables
from ..expressions.placeholders import MAX_SEGMENTS, parse_prompt, segment_paths, variable_path
from ..expressions.renaming import Renaming
from ..seed import seed_of_name
from ..slot import Slot, SlotInputs
from ..tools import read_tools
from .base import Node

T = TypeVar("T", Output, Segment)


class GenerateNode(Node, frozen=True, kw_only=True, tag="generate"):
    """One LLM call: a growing `prompt` with outputs in it, or `messages` and an `output`."""

    model: (
        Annotated[str, Meta(min_length=1, max_length=256)]
        | Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=16)]
    ) = "default"
    """A name, or a list of alternatives."""
    if TYPE_CHECKING:
        prompt: list[Segment] | UnsetType = UNSET
    else:
        prompt: (
            Annotated[list[Segment], Meta(min_length=1, max_length=MAX_SEGMENTS)]
            | Annotated[str, Meta(max_length=MAX_TEXT)]
            | UnsetType
        ) = UNSET
    """Segments; or one text with `{{name}}` and an `output`, which is replaced by its segments
    when the record is created."""
    messages: Annotated[list[Message], Meta(max_length=10_000)] | UnsetType = UNSET
    prompt_ids: (
        Annotated[
            list[Annotated[int, Meta(ge=0, lt=2**31)]], Meta(min_length=1, max_length=4_194_304)
        ]
        | UnsetType
    ) = UNSET
    """Token ids before the text of `prompt`. No BOS is added to them."""
    template_options: dict[str, Json] = {}
    """Variables for the chat template, with `messages` only."""
    output: Output | UnsetType = UNSET
    tools: Annotated[list[Json], Meta(max_length=1_000)] | UnsetType = UNSET
    tool_choice: Json | UnsetType = UNSET
    parallel_tool_calls: bool = True
    """False: an answer has at most one tool call."""

    def __post_init__(self) -> None:
        prompt: object = self.prompt
        if isinstance(prompt, str):
            force_setattr(self, "prompt", parse_prompt(prompt, self.output))
            force_setattr(self, "output", UNSET)

    def _make_slots(self, inputs: SlotInputs) -> tuple[Slot, ...]:
        if self.prompt is not UNSET:
            return self._prompt_slots(self.prompt, inputs)
        return (self._chat_slot(inputs),)

    def _prompt_slots(self, prompt: list[Segment], inputs: SlotInputs) -> tuple[Slot, ...]:
        for name, content in (("messages", self.messages), ("output", self.output)):
            if content is not UNSET:
                _refuse(f"a node with `prompt` cannot have `{name}`: outputs go in `prompt`", name)
        if self.tools is not UNSET:
            _refuse("`tools` need a chat template: use `messages` instead of `prompt`", "tools")
        if self.template_options:
            _refuse(
                "`template_options` are for the chat template: use `messages` instead of `prompt`",
                "template_options",
            )
        slots: list[Slot] = []
        written: set[str] = set()
        for index, (path, segment) in enumerate(zip(segment_paths(prompt), prompt, strict=True)):
            name_path = variable_path(prompt, index)
            if segment.output is UNSET:
                _check_segment(segment, path, name_path, inputs)
                continue
            check_name(segment.output, name_path)
            _check_output_segment(segment, path)
            if segment.output in written:
                raise ProgramError(
                    "program.two_producers",
                    f"node `{self.id}` writes variable `{segment.output}` twice",
                    path=name_path,
                )
            written.add(segment.output)
            slots.append(inputs.slot(self.id, len(slots), (segment.output,)))
            inputs = SlotInputs()
        if not slots:
            _refuse("a `prompt` needs at least one output", "prompt")
        return tuple(slots)

    def _chat_slot(self, inputs: SlotInputs) -> Slot:
        if self.messages is UNSET:
            _refuse("a generate node needs `prompt`, or `messages` and `output`", "")
        if self.output is UNSET:
            _refuse("a node with `messages` needs an `output`", "output")
        if self.prompt_ids is not UNSET:
            _refuse("`prompt_ids` go with `prompt`, not with `messages`", "prompt_ids")
        if not self.messages:
            _refuse("`messages` is empty: add at least one message", "messages")
        for index, message in enumerate(self.messages):
            _check_message(message, f"messages[{index}]", inputs)
        check_name(self.output.variable, "output.variable")
        check_constraint(self.output.constraint, "output.constraint")
        _check_sampling(self.output, "output")
        if read_tools(self) is not None and self.output.form != "message":
            _refuse("an output of a node with `tools` needs `as: message`", "output.as")
        return inputs.slot(self.id, 0, (self.output.variable,))

    def trailing_reads(self) -> frozenset[str] | None:
        if self.prompt is UNSET or self.prompt[-1].output is not UNSET:
            return None
        reads: frozenset[str] = frozenset()
        for segment in reversed(self.prompt):
            if segment.output is not UNSET:
                break
            if segment.input is not UNSET:
                reads |= variables(input_expression(segment.input))
        return reads

    def submitted_names(self) -> Iterable[tuple[str, Expression]]:
        return (
            (f"messages[{index}].splice", message.splice)
            for index, message in enumerate(self.messages or ())
            if message.splice is not UNSET
        )

    def write_path(self, variable: str) -> str:
        if self.prompt is UNSET:
            return "output.variable"
        outputs = [segment.output for segment in self.prompt]
        return variable_path(self.prompt, outputs.index(variable))

    def _expressions(self) -> Iterator[tuple[str, Expression]]:
        if self.prompt is not UNSET:
            for index, segment in enumerate(self.prompt):
                if segment.input is not UNSET:
                    yield variable_path(self.prompt, index), input_expression(segment.input)
        for index, message in enumerate(self.messages or ()):
            path = f"messages[{index}]"
            if message.splice is not UNSET:
                yield f"{path}.splice", input_expression(message.splice)
            elif isinstance(message.content, list):
                for number, segment in enumerate(message.content):
                    if segment.input is not UNSET:
                        here = f"{path}.content[{number}].input"
                        yield here, input_expression(segment.input)

    def _renamed_fields(self, renaming: Renaming) -> dict[str, object]:
        if self.prompt is not UNSET:
            return {"prompt": [_rename_segment(segment, renaming) for segment in self.prompt]}
        assert self.messages is not UNSET
        assert self.output is not UNSET
        output = replace(self.output, variable=renaming.name(self.output.variable))
        return {
            "messages": [_rename_message(message, renaming) for message in self.messages],
            "output": _reseed(output, renaming),
        }


# --- checks -----------------------------------------------------------------------------------


def _check_message(message: Message, path: str, inputs: SlotInputs) -> None:
    if message.splice is not UNSET:
        if message != Message(splice=message.splice):
            _refuse("`splice` cannot be combined with `role` or `content`", path)
        inputs.add_reference(message.splice, f"{path}.splice")
        return
    if message.role is UNSET:
        _refuse("a message needs a `role`, or a `splice` instead", path)
    if message.content is UNSET and not message.tool_calls:
        _refuse(
            "a message needs `content`: without it the prompt would contain an empty turn", path
        )
    content = message.content if isinstance(message.content, list) else []
    for index, segment in enumerate(content):
        here = f"{path}.content[{index}]"
        if segment.output is not UNSET:
            _refuse("put `output` inside `prompt`, or next to `messages`", f"{here}.output")
        if segment.special:
            _refuse(
                "text in `messages` cannot have special tokens: remove `special`",
                f"{here}.special",
            )
        _check_segment(segment, here, f"{here}.input", inputs)


def _check_segment(segment: Segment, path: str, input_path: str, inputs: SlotInputs) -> None:
    """Check a segment that is not an output."""
    if segment.text is not UNSET:
        bare = Segment(text=segment.text, special=segment.special)
    elif segment.input is not UNSET:
        bare = Segment(input=segment.input)
    elif segment.part is not UNSET:
        bare = Segment(part=segment.part)
    else:
        _refuse("a segment needs one of `text`, `input`, `output`, `part`", path)
    # All other fields must have their defaults.
    if segment != bare:
        _refuse_mixed(segment, path)
    if segment.input is not UNSET:
        inputs.add_reference(segment.input, input_path)


def _check_output_segment(segment: Segment, path: str) -> None:
    if not (segment.text is segment.input is segment.part is UNSET) or segment.special:
        _refuse_mixed(segment, path)
    check_constraint(segment.constraint, f"{path}.constraint")
    _check_sampling(segment, path)


def _refuse_mixed(segment: Segment, path: str) -> NoReturn:
    kinds = [
        name for name in ("text", "input", "output", "part") if getattr(segment, name) is not UNSET
    ]
    if len(kinds) > 1:
        _refuse(f"a segment has {listed(kinds)}: split it into one segment for each", path)
    if segment.special:
        _refuse(f"`special` belongs to a text, not to `{kinds[0]}`", f"{path}.special")
    fields = [*Sampling.__struct_fields__, "constraint", "form"]
    default = Segment()
    extra = [name for name in fields if getattr(segment, name) != getattr(default, name)]
    extra = ["as" if name == "form" else name for name in extra]
    _refuse(f"{listed(extra)} belongs to an output, not to `{kinds[0]}`", f"{path}.{extra[0]}")


def _check_sampling(sampling: Output | Segment, path: str) -> None:
    limit = sampling.max_tokens
    if limit is not None and sampling.min_tokens > limit:
        raise ProgramError(
            "program.sampling",
            f"min_tokens {sampling.min_tokens} is greater than max_tokens {limit}",
            path=f"{path}.min_tokens",
        )
    if sampling.logprobs is not None and sampling.form != "message":
        raise ProgramError(
            "program.sampling",
            "`logprobs` are returned in a message: add `as: message`",
            path=f"{path}.logprobs",
        )


def _refuse(message: str, path: str) -> NoReturn:
    raise ProgramError("program.segment", message, path=path)


# --- instances --------------------------------------------------------------------------------


def _rename_segment(segment: Segment, renaming: Renaming) -> Segment:
    if segment.input is not UNSET:
        return replace(segment, input=renaming.reference(segment.input))
    if segment.output is UNSET:
        return segment
    return _reseed(replace(segment, output=renaming.name(segment.output)), renaming)


def _rename_message(message: Message, renaming: Renaming) -> Message:
    if message.splice is not UNSET:
        return replace(message, splice=renaming.reference(message.splice))
    if not isinstance(message.content, list):
        return message
    content = [_rename_segment(segment, renaming) for segment in message.content]
    return replace(message, content=content)


def _reseed(output: T, renaming: Renaming) -> T:
    """Derive the seed of an instance from a given seed and the instance's suffix."""
    if output.seed is None or renaming.keeps_seeds:
        return output
    return replace(output, seed=seed_of_name(f"{output.seed}{renaming.suffix}"))
