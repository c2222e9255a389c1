"""Programs written as Python functions, sent to the server as text in the decoder language.

    @conure.function
    def slogan(goods):
        \"\"\"A slogan for {{goods}}: {{name=text, max_tokens=20}}\"\"\"

    @conure.program
    def shop(goods: str):
        yield {"slogan": slogan(goods)}

    client.run(shop(goods="tea"))

The names of the language (`llm_chat`, `job`, ...) can be imported from here, for editors and type
checkers. A decorated function never runs in this process: its source is read and sent. A function
whose body is only a docstring is a *semantic function*, and the docstring is its prompt. A program
may call decorated functions and read constants of its module.

Invariant: if all functions are in one file, each keeps its line number, so that the lines in the
server's errors are those of the file.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from symtable import Symbol, SymbolTable, symtable
from types import ModuleType
from typing import Any, Generic, NoReturn, ParamSpec, TypeAlias

import msgspec

from conure.server.program.errors import ExpressionError, ProgramError
from conure.server.program.ir import Json, Options, SourceSubmission

from .client.json_encoding import encode_json

P = ParamSpec("P")


class OutputParameter:
    """Annotation of an output parameter of a semantic function, with the options of the output."""

    def __init__(self, **options: Json) -> None:
        self.options = options


Output = OutputParameter
"""`code: conure.Output(max_tokens=200)`"""


class LanguageFunction:
    """A function of the decoder language, which programs can call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__doc__ = function.__doc__
        self.__name__ = function.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to run in this process.

        Raises:
            ProgramError: `language.call`.
        """
        message = f"`{self.__name__}` runs on a server only: call it in a function with `program`"
        raise ProgramError("language.call", message)


class LanguageProgram(Generic[P]):
    """A program of the decoder language."""

    def __init__(self, function: Callable[P, Any]) -> None:
        self.function = function
        self.__doc__ = function.__doc__
        self.__name__ = function.__name__

    @property
    def source(self) -> str:
        """The text that the server receives.

        Raises:
            ProgramError: `language.source` if the source of a function cannot be read, or if a
                name refers to anything but decorated functions and constants.
        """
        return _text_of(self)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> SourceSubmission:
        """Return a submission of the program with its inputs, for `Client.run` or `submit`.

        Raises:
            TypeError: if the arguments do not fit the parameters.
        """
        bound = inspect.signature(self.function).bind(*args, **kwargs)
        return SourceSubmission(
            source=self.source, name=self.__name__, inputs=dict(bound.arguments)
        )

    def submission(
        self,
        inputs: Mapping[str, Json] | None = None,
        *,
        objectives: Mapping[str, Any] | None = None,
        options: Options | None = None,
    ) -> SourceSubmission:
        """Return a submission with objectives and options; inputs may also be sent later by PUT."""
        return SourceSubmission(
            source=self.source,
            name=self.__name__,
            inputs=dict(inputs or {}),
            objectives=dict(objectives or {}),
            options=options or Options(),
        )


class LanguageName:
    """A built-in function of the decoder language, importable for editors and type checkers."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to run in this process.

        Raises:
            ProgramError: `language.call`.
        """
        message = f"`{self.__name__}` runs on a server only: call it in a function with `program`"
        raise ProgramError("language.call", message)


llm_chat: Any = LanguageName("llm_chat")
gen: Any = LanguageName("gen")
job: Any = LanguageName("job")
wait: Any = LanguageName("wait")
race: Any = LanguageName("race")
fail: Any = LanguageName("fail")
call: Any = LanguageName("call")
client: Any = LanguageName("client")
user: Any = LanguageName("user")
system: Any = LanguageName("system")
assistant: Any = LanguageName("assistant")
join: Any = LanguageName("join")
first: Any = LanguageName("first")
parse_json: Any = LanguageName("parse_json")
to_json: Any = LanguageName("to_json")
find: Any = LanguageName("find")
find_all: Any = LanguageName("find_all")


def function(function: Callable[..., Any]) -> LanguageFunction:
    """Make a function callable from programs of the decoder language."""
    return LanguageFunction(function)


def program(function: Callable[P, Any]) -> LanguageProgram[P]:
    """Make a function a program of the decoder language; its parameters are the inputs."""
    return LanguageProgram(function)


# --- the text ---------------------------------------------------------------------------------


_Part: TypeAlias = "LanguageFunction | LanguageProgram[...]"


def _text_of(main: LanguageProgram[...]) -> str:
    definitions = _Definitions(main)
    head = "; ".join(f"{name} = {text}" for name, text in definitions.constants.items())
    parts: list[_Part] = [*definitions.functions.values(), main]
    pieces = sorted(_source_of(each) for each in parts)
    files = {each.function.__code__.co_filename for each in parts}
    if len(files) > 1 or (head and pieces[0][0] == 1):
        return "\n".join([head, *(text for _, text in pieces)])
    lines = [head] if head else []
    for start, text in pieces:
        lines += [""] * (start - 1 - len(lines))
        lines += text.split("\n")
    return "\n".join(lines)


class _Definitions:
    """The functions and constants that a program uses, directly or through other functions.

    Invariant: a name has one meaning. The text has one namespace for all modules, and for the
    variables of the program.
    """

    def __init__(self, main: LanguageProgram[...]) -> None:
        self.functions: dict[str, LanguageFunction] = {}
        self.constants: dict[str, str] = {}
        self._main = main
        self._variables = _variables_of(main)
        self._meanings: dict[str, tuple[object, str]] = {main.__name__: (main, _module_of(main))}
        """By name: the function or literal that it refers to, and the module of its first user."""
        self._add_references(main)

    def _add_references(self, caller: _Part) -> None:
        for name, value in _references(caller):
            if isinstance(value, LanguageName | LanguageFunction):
                self._add_function(name, value, caller)
            elif isinstance(value, str | int | float | bool | list | tuple | dict | Enum | None):
                self._add_constant(name, value, caller)
            elif isinstance(value, LanguageProgram):
                _refuse(f"`{name}` is a program: to call it, decorate it with `conure.function`")
            elif inspect.isfunction(value):
                _refuse(f"`{name}` is a plain function: decorate it with `conure.function`")
            elif not callable(value) and not isinstance(value, ModuleType):
                _refuse_constant(name)

    def _add_function(
        self, name: str, value: LanguageName | LanguageFunction, caller: _Part
    ) -> None:
        if value.__name__ != name:
            _refuse(
                f"`{name}` is the function `{value.__name__}` under another name: use it as "
                f"`{value.__name__}`"
            )
        if self._is_new(name, value, caller) and isinstance(value, LanguageFunction):
            self.functions[name] = value
            self._add_references(value)

    def _add_constant(self, name: str, value: Any, caller: _Part) -> None:
        literal = _literal(name, value)
        if self._is_new(name, literal, caller):
            self.constants[name] = literal
        if name in self._variables:
            _refuse(
                f"`{name}` is {_description(literal)} in {_module_of(caller)} and a variable of "
                f"`{self._main.__name__}`: rename one of them"
            )

    def _is_new(self, name: str, meaning: object, caller: _Part) -> bool:
        """Return whether a name is not in the text yet.

        A name that already has another meaning is refused.
        """
        known, module = self._meanings.setdefault(name, (meaning, _module_of(caller)))
        if known != meaning:
            _refuse(
                f"`{name}` is {_description(known)} in {module} and {_description(meaning)} in "
                f"{_module_of(caller)}: rename one of them"
            )
        return name not in self.functions and name not in self.constants


def _module_of(part: _Part) -> str:
    return str(part.function.__module__)


def _description(meaning: object) -> str:
    if isinstance(meaning, str):
        return meaning if len(meaning) <= 40 else f"{meaning[:40]}..."
    if isinstance(meaning, LanguageName):
        return "a function of the language"
    assert isinstance(meaning, LanguageFunction | LanguageProgram)
    return f"the function `{_module_of(meaning)}.{meaning.function.__qualname__}`"


def _references(part: _Part) -> Iterator[tuple[str, Any]]:
    """Iterate over the names that a function reads from outside, with their values."""
    nonlocals = inspect.getclosurevars(part.function).nonlocals
    for name in _global_names(_symbols_of(_definition_of(part))):
        for scope in (nonlocals, part.function.__globals__):
            if name in scope:
                yield name, scope[name]
                break


def _global_names(table: SymbolTable) -> list[str]:
    """Return the global names that a scope and its nested scopes, such as comprehensions, read."""
    read = (each.get_name() for each in table.get_symbols() if _is_read_global(each))
    nested = (name for child in table.get_children() for name in _global_names(child))
    return list(dict.fromkeys([*read, *nested]))


def _is_read_global(symbol: Symbol) -> bool:
    return symbol.is_referenced() and symbol.is_global()


def _variables_of(part: _Part) -> set[str]:
    """Return the parameters and variables of a function, without those of comprehensions."""
    definition = _definition_of(part)
    scopes = _symbols_of(definition).get_children()
    (own,) = (each for each in scopes if each.get_name() == definition.name)
    return {each.get_name() for each in own.get_symbols() if each.is_local()}


def _symbols_of(definition: ast.FunctionDef) -> SymbolTable:
    return symtable(ast.unparse(definition), "<text>", "exec")


def _definition_of(part: _Part) -> ast.FunctionDef:
    """Return the syntax tree of a function, without its decorators and without types."""
    start, text = _source_of(part)
    try:
        definition = ast.parse(text).body[0]
    except SyntaxError as problem:
        line = start - 1 + (problem.lineno or 1)
        _refuse(f"the source of `{part.__name__}` cannot be read: line {line}: {problem.msg}")
    if not isinstance(definition, ast.FunctionDef):
        _refuse(f"`{part.__name__}` must be defined by `def`, so that its source can be sent")
    definition.decorator_list = []
    for each in ast.walk(definition):
        if isinstance(each, ast.FunctionDef):
            each.returns = None
        elif isinstance(each, ast.arg) and not isinstance(each.annotation, ast.Call):
            each.annotation = None  # a type; `Output(...)` is kept, because its options are read
        elif isinstance(each, ast.AnnAssign):
            each.annotation = ast.Constant(None)
    return definition


def _literal(name: str, value: Any) -> str:
    """Return a constant as text; an Enum member is replaced by its value."""
    try:
        _check_constant(name, value)
        encode_json(value)
        return repr(msgspec.to_builtins(value))
    except (TypeError, ValueError, msgspec.MsgspecError, ExpressionError, RecursionError):
        _refuse_constant(name)


def _check_constant(name: str, value: object) -> None:
    """Refuse a constant with parts that are encoded as another kind of value, such as sets."""
    if isinstance(value, Enum):
        _check_constant(name, value.value)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key.value if isinstance(key, Enum) else key, str):
                _refuse(
                    f"`{name}` has a key that is not a string: a JSON object has only string keys"
                )
            _check_constant(name, item)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_constant(name, item)
    elif not isinstance(value, str | int | float | None):
        _refuse_constant(name)


def _refuse_constant(name: str) -> NoReturn:
    _refuse(f"`{name}` is not a JSON value: pass it as an input")


def _source_of(function: _Part) -> tuple[int, str]:
    """Return the first line of a function, and its source without indentation."""
    try:
        lines, start = inspect.getsourcelines(function.function)
    except (OSError, TypeError):
        _refuse(f"the source of `{function.__name__}` cannot be read: write it in a file")
    return start, _unindented("".join(lines)).rstrip("\n")


def _unindented(text: str) -> str:
    """Return the source of a function without its indentation; strings keep all their lines."""
    indentation = text[: len(text) - len(text.lstrip())]
    if not indentation:
        return text
    try:
        tree = ast.parse(f"if True:\n{text}")
    except SyntaxError:  # reported when the definition is read
        return textwrap.dedent(text)
    strings = [each for each in ast.walk(tree) if isinstance(each, ast.Constant | ast.JoinedStr)]
    # Skip the tree's extra first line, and the first line of each string, which is indented code.
    kept = {i for each in strings for i in range(each.lineno - 1, (each.end_lineno or 0) - 1)}
    lines = enumerate(text.split("\n"))
    return "\n".join(line if i in kept else line.removeprefix(indentation) for i, line in lines)


def _refuse(message: str) -> NoReturn:
    raise ProgramError("language.source", message)
