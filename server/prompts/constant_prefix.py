"""The beginning that all prompts of a call have in common, whatever the inputs of its program are.

The call is cut before its first variable, and then rendered and encoded like any other call.

Out of scope: blocks of KV. The last token may differ from that of a whole prompt, because it may
continue in the text behind the cut.
"""

from __future__ import annotations

from itertools import takewhile

import msgspec
from msgspec import UNSET

from ..program.errors import ConureError
from ..program.expressions.symbolic import LiteralText, VariableDefinitions
from ..program.ir import GenerateNode, Message, Segment
from ..program.prompt_prefix import Piece, SymbolicSplice, boundary_pieces, chat_messages
from .prompt import render_chat, render_slot
from .served_model import ServedModel


def constant_prefix(
    node: GenerateNode, definitions: VariableDefinitions, model: ServedModel
) -> list[int]:
    """Return the token ids with which every prompt of a call begins.

    Args:
        node: a checked call.
        definitions: the variables of its program that expressions define.
        model: encodes the prompt.
    """
    if node.prompt is UNSET:
        return _of_messages(node, definitions, model)
    pieces = [piece for part in boundary_pieces(node, definitions) for piece in part]
    segments = [Segment(text=each.text, special=each.special) for each in _literal(pieces)]
    if not segments:
        return []
    cut = msgspec.structs.replace(node, prompt=[*segments, Segment(output="output")])
    return model.encode(cut, 0, render_slot(cut, 0, {}).pieces).ids


def _of_messages(
    node: GenerateNode, definitions: VariableDefinitions, model: ServedModel
) -> list[int]:
    messages: list[Message] = []
    for message in chat_messages(node, definitions):
        if isinstance(message, SymbolicSplice):
            break
        alone = msgspec.structs.replace(node, messages=[message])
        pieces = [piece for part in boundary_pieces(alone, definitions) for piece in part]
        texts = _literal(pieces)
        if isinstance(message.content, list):
            content = [Segment(text=each.text) for each in texts]
            message = msgspec.structs.replace(message, content=content)
        messages.append(message)
        if len(texts) < len(pieces):
            break
    if not messages:
        return []
    cut = msgspec.structs.replace(node, messages=messages)
    try:
        rendered = render_chat(cut, {}, model.template)
    except ConureError:
        return []  # a template may refuse a chat that ends there
    if rendered.prefix_break or not rendered.ends:
        return []
    encoded = model.encode(cut, 0, rendered.pieces)
    return encoded.ids[: encoded.tokens_before(rendered.ends[-1])]


def _literal(pieces: list[Piece]) -> list[LiteralText]:
    """Return the texts before the first piece that is none."""
    texts = takewhile(lambda piece: isinstance(piece, LiteralText), pieces)
    return [each for each in texts if isinstance(each, LiteralText)]
