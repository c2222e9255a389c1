"""Parsing of a source text into Python's syntax tree, and the check of its constructs.

Responsibility: the spellings that Python lacks (`StartNewJob:`, `wait a, b`), the bounds of a text
and of its tree, and the list of allowed constructs.

Invariants: any text gives a tree or a LanguageError. Walks are iterative. Every node of a returned
tree is in `_ALLOWED`, and its columns count characters.
"""

from __future__ import annotations

import ast
import contextlib
import math
import re
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from ..program.decoding.unicode_text import is_unicode
from .errors import (
    LanguageError,
    Position,
    SourceSyntaxError,
    SourceTooLargeError,
    UnsupportedSourceError,
    position_of,
)

MAX_SOURCE_BYTES = 65_536
MAX_SYNTAX_NODES = 5_000
MAX_SYNTAX_DEPTH = 64
MAX_BRACKETS = 100
"""Nesting of brackets and indentation that Python's parser accepts."""

_START = Position(1, 1)

_ALLOWED: frozenset[type[ast.AST]] = frozenset(
    {
        ast.Module, ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.If, ast.For, ast.Break,
        ast.Continue, ast.Pass, ast.FunctionDef, ast.arguments, ast.arg, ast.keyword, ast.Return,
        ast.With, ast.withitem, ast.Try, ast.ExceptHandler, ast.Yield, ast.Name, ast.Load,
        ast.Store, ast.Constant, ast.List, ast.Dict, ast.Tuple, ast.JoinedStr, ast.FormattedValue,
        ast.Subscript, ast.Slice, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv,
        ast.Mod, ast.UnaryOp, ast.Not, ast.USub, ast.UAdd, ast.BoolOp, ast.And, ast.Or, ast.Compare,
        ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn, ast.Is, ast.IsNot,
        ast.IfExp, ast.Call, ast.Attribute, ast.ListComp, ast.comprehension,
    }
)  # fmt: skip

_MARKS: frozenset[type[ast.AST]] = frozenset(
    {
        ast.Load, ast.Store, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Not,
        ast.USub, ast.UAdd, ast.And, ast.Or,
    }
)  # fmt: skip
"""Allowed nodes without fields. All other operators are checked."""
_PLAIN_FIELDS = frozenset(
    {"arg", "attr", "conversion", "ctx", "id", "is_async", "kind", "name", "simple", "type_comment"}
)
"""Fields of allowed nodes that never contain a node to check."""
_CHILD_FIELDS: dict[type[ast.AST], tuple[str, ...]] = {
    kind: tuple(name for name in kind._fields if name not in _PLAIN_FIELDS) for kind in _ALLOWED
} | {ast.Constant: ()}

JUMPS: frozenset[type[ast.AST]] = frozenset({ast.Break, ast.Continue, ast.Return})
_CHECKED: frozenset[type[ast.AST]] = frozenset(
    {ast.Constant, ast.FormattedValue, ast.comprehension}
)
"""Allowed nodes with some forms that are not allowed."""

_NO_IMPORT = (
    "`import` is not supported: call functions that the server has, or write a `def`; Python runs "
    "files that use `conure.program`"
)
_INSTEAD: dict[type[ast.AST], str] = {
    ast.While: "`while` loops have no bound: write `for _ in range(10):` and "
    "`if not condition: break`",
    ast.Lambda: "`lambda` is not supported: write a `def`",
    ast.ClassDef: "classes are not supported: write dicts, as {'name': ...}",
    ast.Import: _NO_IMPORT,
    ast.ImportFrom: _NO_IMPORT,
    ast.Global: "`global` is not needed: variables of a job are visible in the whole program",
    ast.Nonlocal: "`nonlocal` is not needed: variables of a job are visible in the whole program",
    ast.Raise: "`raise` is not supported: write `fail('...')`",
    ast.Assert: "`assert` is not supported: write `if not condition: fail('...')`",
    ast.Delete: "`del` is not supported: assign None, or write `name.kill()` to cancel a call",
    ast.Set: "sets are not supported: write a list",
    ast.SetComp: "write a list comprehension: [f(x) for x in items]",
    ast.DictComp: "write a list comprehension of pairs: [[key, f(key)] for key in keys]",
    ast.GeneratorExp: "write a list comprehension: [f(x) for x in items]",
    ast.Starred: "`*` and `**` in lists, dicts and calls are not supported: write `a + b`",
    ast.NamedExpr: "`:=` is not supported: assign on a separate line",
    ast.YieldFrom: "`yield from` is not supported: write a loop with `yield`",
    ast.Pow: "`**` is not supported: write the product",
    ast.Match: "`match` is not supported: write `if` and `elif`",
    ast.AsyncFunctionDef: "`async` is not needed: calls start at once, reading a result waits",
    ast.Await: "`await` is not needed: reading a result waits",
    ast.AsyncFor: "`async` is not needed: write `for`",
    ast.AsyncWith: "`async` is not needed: write `with job():`",
    ast.TryStar: "write `except`",
}

# Strings and comments come first, so that their contents are not rewritten.
_REWRITTEN = re.compile(
    r"""(?P<skip>[rRbBuUfF]{0,2}(?:'''(?:[^\\]|\\.)*?'''|\"\"\"(?:[^\\]|\\.)*?\"\"\"
    |'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")|\#[^\n]*)
    |^(?P<indent>[ \t]*)(?:StartNewJob(?P<gap>[ \t]*):|wait[ \t](?P<names>[ \t]*\w[\w \t,]*))
    """,
    re.VERBOSE | re.MULTILINE | re.DOTALL,
)
_MAY_BE_REWRITTEN = re.compile(r"^[ \t]*(?:StartNewJob|wait[ \t])", re.MULTILINE)


class NameReads:
    """The lines of a text that read each name, in ascending order."""

    def __init__(self, lines: dict[str, list[int]]) -> None:
        self._lines = {name: sorted(each) for name, each in lines.items()}

    def count(self, name: str) -> int:
        """Return how often the text reads a name."""
        return len(self._lines.get(name, ()))

    def count_between(self, name: str, first: int, last: int) -> int:
        """Return how often a range of lines, both ends included, reads a name."""
        lines = self._lines.get(name, [])
        return bisect_right(lines, last) - bisect_left(lines, first)


class SourceTree(NamedTuple):
    """A text that has been parsed and checked."""

    module: ast.Module
    reads: NameReads


def parse(source: str) -> SourceTree:
    """Return the checked syntax tree of a source text, and where it reads names.

    Raises:
        SourceTooLargeError: `language.too_large`.
        SourceSyntaxError: `language.syntax`.
        UnsupportedSourceError: `language.unsupported`.
    """
    check_size(source)
    if "\x00" in source:
        raise SourceSyntaxError("language.syntax", "the text has a null character", _START)
    text = rewrite(source)
    tree = _parse_python(text)
    return SourceTree(tree, _check_tree(tree, text))


def check_size(source: str) -> None:
    """Check the length of a text, which must be encodable.

    Raises:
        SourceTooLargeError: `language.too_large`.
        SourceSyntaxError: `language.syntax`.
    """
    try:
        size = len(source.encode())
    except UnicodeEncodeError as error:
        message = "the text has half of a surrogate pair, which is not a character"
        line = source.count("\n", 0, error.start) + 1
        raise SourceSyntaxError("language.syntax", message, Position(line, 1)) from None
    if size > MAX_SOURCE_BYTES:
        raise SourceTooLargeError(
            "language.too_large",
            f"a source text can have at most {MAX_SOURCE_BYTES:,} bytes, got {size:,}: pass long "
            "texts as inputs",
            _START,
        )


def rewrite(source: str) -> str:
    """Replace `StartNewJob:` and `wait a, b` by Python's syntax; positions do not change."""
    # Searching for a word is many times as fast as the expression, and most texts have neither.
    if "StartNewJob" not in source and "wait" not in source:
        return source
    if not _MAY_BE_REWRITTEN.search(source):
        return source
    return _REWRITTEN.sub(_replace, source)


def _replace(match: re.Match[str]) -> str:
    if match["skip"] is not None:
        return match[0]
    if match["names"] is None:
        return f"{match['indent']}with job(){match['gap']} :"
    names = match["names"].rstrip()
    return f"{match['indent']}wait({names}){match['names'][len(names) :]}"


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Ignore Python's warnings about spellings in a text, such as an invalid escape sequence: the
    author of the text does not read this process's output.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _parse_python(text: str) -> ast.Module:
    try:
        with without_warnings():
            return ast.parse(text)
    except SyntaxError as error:
        line = max(error.lineno or 1, 1)
        column = max(error.offset or 1, 1)
        message = f"{error.msg}: the text must be in Python's syntax"
        raise SourceSyntaxError("language.syntax", message, Position(line, column)) from None
    except (ValueError, MemoryError, RecursionError) as error:
        raise SourceTooLargeError(
            "language.too_large", f"the text cannot be parsed: {type(error).__name__}", _START
        ) from None


def _check_tree(tree: ast.Module, text: str) -> NameReads:
    """Check all nodes level by level, and convert their columns to characters.

    All of a text's nodes pass through this loop once: it also records where names are read.

    Raises:
        LanguageError: at the first construct, in the order of the text, that is not allowed.
    """
    lines = None if text.isascii() else text.split("\n")
    faults: list[LanguageError] = []
    reads: dict[str, list[int]] = {}
    level: list[ast.AST] = [tree]
    num_nodes = depth = 0
    while level:
        num_nodes += len(level)
        depth += 1
        if num_nodes > MAX_SYNTAX_NODES or depth > MAX_SYNTAX_DEPTH:
            raise _too_large(level[0], is_deep=depth > MAX_SYNTAX_DEPTH)
        if lines is not None:
            for node in level:
                _convert_column(node, lines)
        level = _check_level(level, reads, faults)
    if faults:
        raise min(faults, key=lambda fault: (fault.line, fault.column))
    return NameReads(reads)


def _check_level(
    level: list[ast.AST], reads: dict[str, list[int]], faults: list[LanguageError]
) -> list[ast.AST]:
    """Check nodes, add what they read and their faults, and return the nodes below them."""
    below: list[ast.AST] = []
    for node in level:
        if type(node) is ast.Name:
            if type(node.ctx) is ast.Load:
                reads.setdefault(node.id, []).append(node.lineno)
            continue
        names = _CHILD_FIELDS.get(type(node))
        if names is None or type(node) in _CHECKED:
            fault = _fault_of(node)
            if fault is not None:
                faults.append(fault)
                continue
        # As in `children`. A call for each node of a text would take as long as this loop.
        fields = vars(node)
        for name in names or ():
            child = fields.get(name)
            if type(child) is list:
                below += child if None not in child else filter(None, child)
            elif child is not None and type(child) not in _MARKS:
                below.append(child)
        if type(node) is ast.AugAssign and isinstance(node.target, ast.Name):
            reads.setdefault(node.target.id, []).append(node.target.lineno)
    return below


def _too_large(node: ast.AST, *, is_deep: bool) -> SourceTooLargeError:
    what = (
        f"constructs can be nested at most {MAX_SYNTAX_DEPTH} levels deep: assign parts to names"
        if is_deep
        else f"a text can have at most {MAX_SYNTAX_NODES:,} syntax nodes: pass data as inputs"
    )
    return SourceTooLargeError("language.too_large", what, position_of(node))


def children(node: ast.AST) -> list[ast.AST]:
    """Return the nodes directly below an allowed node, except operators and contexts of names."""
    found: list[ast.AST] = []
    fields = vars(node)
    for name in _CHILD_FIELDS[type(node)]:
        child = fields.get(name)
        if type(child) is list:
            found += [item for item in child if item is not None]  # a key may be missing
        elif child is not None and type(child) not in _MARKS:
            found.append(child)
    return found


def walk(nodes: list[ast.AST]) -> Iterator[ast.AST]:
    """Iterate over nodes and all nodes below them."""
    stack = nodes
    while stack:
        node = stack.pop()
        yield node
        stack.extend(children(node))


def can_jump(statement: ast.stmt) -> bool:
    """Whether a statement may `break`, `continue` or `return` out of the block around it."""
    if type(statement) is ast.If:
        return any(map(can_jump, statement.body)) or any(map(can_jump, statement.orelse))
    if type(statement) is ast.With:
        return any(map(can_jump, statement.body))
    return type(statement) in JUMPS


def is_decorator(node: ast.expr, name: str) -> bool:
    """Whether a decorator is `name`, `conure.name`, or a call of one of them."""
    match node.func if isinstance(node, ast.Call) else node:
        case ast.Name(id=found) | ast.Attribute(attr=found):
            return found == name
        case _:
            return False


def always_jumps(statements: list[ast.stmt]) -> bool:
    """Whether statements always `break`, `continue` or `return`."""
    if not statements:
        return False
    match statements[-1]:
        case ast.Break() | ast.Continue() | ast.Return():
            return True
        case ast.If(body=body, orelse=otherwise):
            return always_jumps(body) and always_jumps(otherwise)
        case _:
            return False


def _convert_column(node: ast.AST, lines: list[str]) -> None:
    """Convert the column of a node from UTF-8 bytes to characters."""
    fields = vars(node)
    line = fields.get("lineno")
    if line is None or not 0 < line <= len(lines) or lines[line - 1].isascii():
        return
    before = lines[line - 1].encode()[: fields["col_offset"]]
    fields["col_offset"] = len(before.decode(errors="ignore"))


def _fault_of(node: ast.AST) -> LanguageError | None:
    if isinstance(node, ast.Constant):
        fault = constant_fault(node.value)
        if fault is None:
            return None
        if isinstance(node.value, str):
            return SourceSyntaxError("language.syntax", fault, position_of(node))
        return UnsupportedSourceError(fault, position_of(node))
    kind = type(node)
    if kind not in _ALLOWED:
        what = _INSTEAD.get(kind, f"`{kind.__name__}` is not part of the language")
        return UnsupportedSourceError(what, position_of(node))
    if isinstance(node, ast.FormattedValue) and (
        node.conversion != -1 or node.format_spec is not None
    ):
        message = "formats in f-strings are not supported: write {expression} alone"
        return UnsupportedSourceError(message, position_of(node))
    if isinstance(node, ast.comprehension) and node.is_async:
        return UnsupportedSourceError("write `for`, not `async for`", position_of(node.target))
    return None


def constant_fault(value: object) -> str | None:
    """Return why a constant is not a value of the language; None if it is one."""
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, str):
        if is_unicode(value):
            return None
        return "the string has half of a surrogate pair, which is not a character"
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return None
    if isinstance(value, float) and math.isfinite(value):
        return None
    if isinstance(value, int | float):
        return "a number must be finite and fit into 64 bits"
    return f"{type(value).__name__} is not a type of the language: write a string"
