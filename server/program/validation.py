"""One node on its own: is it well formed, and what do its slots read and write?

Knows the records of `ir` and the rules that types cannot say (exactly one of these fields,
none of those). Refuses to know other nodes: whether a name exists is `graph`'s business.

Kept true: paths in errors are relative to the node (`prompt[1].input`); a node that passes
has well-formed names and expressions everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NoReturn

from msgspec import UNSET, Struct

from .errors import ProgramError
from .expression import check, input_expression, variables
from .ir import (
    NAME_PATTERN,
    Call,
    Client,
    Constraint,
    Expr,
    Expression,
    Generate,
    If,
    Loop,
    Map,
    Message,
    Output,
    Placed,
    Sampling,
    Segment,
    Try,
    Wait,
    Yield,
)
from .partial import as_whole
from .tools import read_tools

_NAME = re.compile(NAME_PATTERN)
_INDICES = re.compile(r"(\.r*\d+)*")
"""What stands behind the name of an instance of a body."""
MAX_NAME = 128


class Slot(Struct, frozen=True):
    """The unit of execution: it starts when what it reads is there, and writes at its end.

    A growing prompt has one slot per output, any other node has one. Slots of a node run in
    order of `index`.
    """

    node: str
    index: int
    reads: frozenset[str]
    writes: tuple[str, ...]
    sees: frozenset[str] = frozenset()
    """What it may come to read, or what its node's bodies read: it does not wait for these, but
    nothing that they wait for may wait for it."""


def is_name(name: str) -> bool:
    """Whether a text may name a variable, a node or a job."""
    return len(name) <= MAX_NAME and _NAME.match(name) is not None


def make_slots(node: Generate | Call | Client | Expr) -> tuple[Slot, ...]:
    """Check a node without bodies and take it apart into its slots.

    Raises:
        ProgramError: `program.name`, `program.segment`, `program.constraint`,
            `program.sampling`, `program.expression`, `program.tools`; the path is relative to
            the node.
    """
    check_name(node.id, "id")
    check_name(node.job, "job")
    reads = set() if node.when is UNSET else check_input(node.when, "when")
    if isinstance(node, Generate):
        if node.prompt is not UNSET:
            return _prompt_slots(node, reads)
        return (_chat_slot(node, reads),)
    if isinstance(node, Call | Client):
        for name, expression in node.args.items():
            reads |= check_expression(expression, f"args.{name}")
    else:
        reads |= check_expression(node.expr, "expr")
    if node.output is UNSET:
        return (Slot(node.id, 0, frozenset(reads), ()),)
    check_name(node.output, "output")
    return (Slot(node.id, 0, frozenset(reads), (node.output,)),)


def check_name(name: str, path: str) -> None:
    """Raises ProgramError `program.name` if a text may name neither anything nor an instance."""
    if is_name(name):
        return
    base, dot, indices = name.partition(".")
    if not is_name(base) or not _INDICES.fullmatch(dot + indices):
        raise ProgramError(
            "program.name",
            f"{name[:140]!r} is no name: a letter or _, then letters, digits or _, "
            f"{MAX_NAME} characters at most",
            path=path,
        )


def check_expression(expression: Expression, path: str) -> frozenset[str]:
    """Check an expression where a string is text, and return what it reads.

    Raises:
        ProgramError: `program.expression`.
    """
    check(expression, path)
    return variables(expression)


def find_read(node: Placed, variable: str) -> str:
    """Where a checked node first reads a variable; the path is relative to the node."""
    return next(path for path, expression in _reads(node) if variable in variables(expression))


def find_write(node: Placed, variable: str) -> str:
    """Where a checked node writes a variable; the path is relative to the node."""
    if isinstance(node, Generate) and node.prompt is not UNSET:
        outputs = [segment.output for segment in node.prompt]
        return f"prompt[{outputs.index(variable)}].output"
    match node:
        case Generate():
            return "output.variable"
        case Map():
            return f"collect.{variable}"
        case If() | Try():
            return f"merge.{variable}"
        case Loop():
            return f"carry.{variable}"
        case _:
            return "output"


def tail_reads(node: Placed) -> frozenset[str] | None:
    """What a prompt names behind its last output, where no slot reads it. None: no such tail."""
    if not isinstance(node, Generate) or node.prompt is UNSET:
        return None
    if node.prompt[-1].output is not UNSET:
        return None
    found: frozenset[str] = frozenset()
    for segment in reversed(node.prompt):
        if segment.output is not UNSET:
            break
        if segment.input is not UNSET:
            found |= variables(input_expression(segment.input))
    return found


def _reads(node: Placed) -> Iterator[tuple[str, Expression]]:
    if node.when is not UNSET:
        yield "when", input_expression(node.when)
    if isinstance(node, Generate):
        if node.prompt is not UNSET:
            yield from _segment_reads(node.prompt, "prompt")
        for index, message in enumerate(() if node.messages is UNSET else node.messages):
            if message.splice is not UNSET:
                yield f"messages[{index}].splice", input_expression(message.splice)
            elif isinstance(message.content, list):
                yield from _segment_reads(message.content, f"messages[{index}].content")
    elif isinstance(node, Call | Client):
        yield from ((f"args.{name}", expression) for name, expression in node.args.items())
    elif isinstance(node, Expr):
        yield "expr", node.expr
    else:
        yield from _control_reads(node)


def _control_reads(node: Placed) -> Iterator[tuple[str, Expression]]:
    match node:
        case Map():
            yield "items", input_expression(node.items)
        case If():
            yield "cond", input_expression(node.cond)
        case Loop():
            if node.items is not UNSET:
                yield "items", input_expression(node.items)
            if node.count is not UNSET:
                yield "count", node.count
            yield from ((f"carry.{name}[0]", init) for name, (init, _) in node.carry.items())
        case Wait():
            yield from ((f"variables[{i}]", {"var": name}) for i, name in enumerate(node.variables))
        case Yield():
            yield "value", as_whole(node.value)
        case _:
            pass


def _segment_reads(segments: Iterable[Segment], path: str) -> Iterator[tuple[str, Expression]]:
    for index, segment in enumerate(segments):
        if segment.input is not UNSET:
            yield f"{path}[{index}].input", input_expression(segment.input)


def _prompt_slots(node: Generate, reads: set[str]) -> tuple[Slot, ...]:
    assert node.prompt is not UNSET
    for field, stands in (("messages", node.messages), ("output", node.output)):
        if stands is not UNSET:
            _refuse(f"a node with `prompt` has its outputs in it and no `{field}`", field)
    if node.tools is not UNSET:
        _refuse("`tools` go through a chat template: they need `messages`", "tools")
    slots: list[Slot] = []
    written: set[str] = set()
    for index, segment in enumerate(node.prompt):
        path = f"prompt[{index}]"
        if segment.output is UNSET:
            reads |= _check_segment(segment, path)
            continue
        _check_output_segment(segment, path)
        if segment.output in written:
            raise ProgramError(
                "program.two_producers",
                f"variable `{segment.output}` is written twice by node `{node.id}`",
                path=f"{path}.output",
            )
        written.add(segment.output)
        slots.append(Slot(node.id, len(slots), frozenset(reads), (segment.output,)))
        reads = set()
    if not slots:
        _refuse("a `prompt` needs at least one output", "prompt")
    return tuple(slots)


def _chat_slot(node: Generate, reads: set[str]) -> Slot:
    if node.messages is UNSET:
        _refuse("a generate node needs `prompt`, or `messages` and `output`", "")
    if node.output is UNSET:
        _refuse("a node with `messages` needs an `output`", "output")
    if not node.messages:
        _refuse("`messages` is empty", "messages")
    for index, message in enumerate(node.messages):
        reads |= _check_message(message, f"messages[{index}]")
    check_name(node.output.variable, "output.variable")
    check_constraint(node.output.constraint, "output.constraint")
    _check_sampling(node.output, "output")
    if read_tools(node) is not None and node.output.form != "message":
        _refuse("an answer under `tools` is a message: it needs `as: message`", "output.as")
    return Slot(node.id, 0, frozenset(reads), (node.output.variable,))


def _check_message(message: Message, path: str) -> set[str]:
    if message.splice is not UNSET:
        if message != Message(splice=message.splice):
            _refuse("`splice` stands alone: the value brings role and content", path)
        return check_input(message.splice, f"{path}.splice")
    if message.role is UNSET:
        _refuse("a message has a `role`, or is a `splice`", path)
    reads: set[str] = set()
    for index, segment in enumerate(message.content if isinstance(message.content, list) else ()):
        place = f"{path}.content[{index}]"
        if segment.output is not UNSET:
            _refuse("an output stands in a `prompt`, or beside `messages`", f"{place}.output")
        if segment.special:
            _refuse("text in `messages` never yields special tokens", f"{place}.special")
        reads |= _check_segment(segment, place)
    return reads


def _check_segment(segment: Segment, path: str) -> set[str]:
    """Check a segment that is no output, and return what it reads."""
    if segment.text is not UNSET:
        bare = Segment(text=segment.text, special=segment.special)
    elif segment.input is not UNSET:
        bare = Segment(input=segment.input)
    elif segment.part is not UNSET:
        bare = Segment(part=segment.part)
    else:
        _refuse("a segment is one of `text`, `input`, `output`, `part`", path)
    # Everything but the one field must have its default; one comparison says so.
    if segment != bare:
        _refuse_mixed(segment, path)
    return set() if segment.input is UNSET else check_input(segment.input, f"{path}.input")


def _check_output_segment(segment: Segment, path: str) -> None:
    if not (segment.text is segment.input is segment.part is UNSET) or segment.special:
        _refuse_mixed(segment, path)
    assert segment.output is not UNSET
    check_name(segment.output, f"{path}.output")
    check_constraint(segment.constraint, f"{path}.constraint")
    _check_sampling(segment, path)


def _refuse_mixed(segment: Segment, path: str) -> NoReturn:
    kinds = [
        name for name in ("text", "input", "output", "part") if getattr(segment, name) is not UNSET
    ]
    if len(kinds) > 1:
        _refuse(f"a segment is one thing, this one has {_listed(kinds)}", path)
    if segment.special:
        _refuse(f"`special` belongs to a text, not to `{kinds[0]}`", f"{path}.special")
    fields = [*Sampling.__struct_fields__, "constraint", "form"]
    default = Segment()
    extra = [name for name in fields if getattr(segment, name) != getattr(default, name)]
    extra = ["as" if name == "form" else name for name in extra]
    _refuse(f"{_listed(extra)} belongs to an output, not to `{kinds[0]}`", f"{path}.{extra[0]}")


def check_input(expression: Expression, path: str) -> set[str]:
    """Check an expression where a bare string is a variable, and return what it reads.

    Raises:
        ProgramError: `program.name`, `program.expression`.
    """
    if isinstance(expression, str):
        check_name(expression, path)
        return {expression}
    check(expression, path)
    return set(variables(expression))


def check_constraint(constraint: Constraint | None, path: str) -> None:
    """Refuse a constraint that is not exactly one thing.

    Raises:
        ProgramError: `program.constraint`.
    """
    if constraint is None:
        return
    fields: Mapping[str, object] = {
        name: getattr(constraint, name) for name in Constraint.__struct_fields__
    }
    present = [name for name, content in fields.items() if content is not UNSET]
    if len(present) != 1:
        raise ProgramError(
            "program.constraint",
            f"a constraint is exactly one of {_listed(fields)}, "
            f"this one has {_listed(present) or 'none of them'}",
            path=path,
        )


def _check_sampling(sampling: Output | Segment, path: str) -> None:
    most = sampling.max_tokens
    if most is not None and sampling.min_tokens > most:
        raise ProgramError(
            "program.sampling",
            f"min_tokens {sampling.min_tokens} is more than max_tokens {most}",
            path=f"{path}.min_tokens",
        )
    if sampling.logprobs is not None and sampling.form != "message":
        raise ProgramError(
            "program.sampling",
            "`logprobs` are told in a message: they need `as: message`",
            path=f"{path}.logprobs",
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _refuse(message: str, path: str) -> NoReturn:
    raise ProgramError("program.segment", message, path=path)
