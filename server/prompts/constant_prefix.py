"""The beginning that all prompts of a call have in common, for any inputs of its program.

The call is cut before its first variable, then rendered and encoded like any other call. The last
token may differ from the token of a whole prompt at that position: the tokenizer may merge the
text before the cut with the text after it.

Out of scope: blocks of KV.
"""

from __future__ import annotations

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
        model: renders and encodes the prompt.
    """
    if node.prompt is UNSET:
        return _constant_prefix_of_chat(node, definitions, model)
    pieces = [piece for part in boundary_pieces(node, definitions) for piece in part]
    segments = [Segment(text=each.text, special=each.special) for each in _leading_texts(pieces)]
    if not segments:
        return []
    cut = msgspec.structs.replace(node, prompt=[*segments, Segment(output="output")])
    return model.encode(cut, 0, render_slot(cut, 0, {}).pieces).ids


def _constant_prefix_of_chat(
    node: GenerateNode, definitions: VariableDefinitions, model: ServedModel
) -> list[int]:
    messages: list[Message] = []
    for message in chat_messages(node, definitions):
        if isinstance(message, SymbolicSplice):
            break
        alone = msgspec.structs.replace(node, messages=[message])
        pieces = [piece for part in boundary_pieces(alone, definitions) for piece in part]
        texts = _leading_texts(pieces)
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
        return []  # a template may reject a chat that ends with this message
    if rendered.prefix_break or not rendered.ends:
        return []
    encoded = model.encode(cut, 0, rendered.pieces)
    return encoded.ids[: encoded.tokens_before(rendered.ends[-1])]


def _leading_texts(pieces: list[Piece]) -> list[LiteralText]:
    """Return the literal texts at the beginning of `pieces`."""
    texts: list[LiteralText] = []
    for piece in pieces:
        if not isinstance(piece, LiteralText):
            break
        texts.append(piece)
    return texts
