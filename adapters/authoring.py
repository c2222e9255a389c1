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

Invariant: the text has every function at the line it has in its file, so that the lines in the
server's errors are those of the file.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, NoReturn, ParamSpec

import msgspec

from conure.server.program.errors import ProgramError
from conure.server.program.ir import Json, Options, SourceSubmission

P = ParamSpec("P")


class OutputParameter:
    """Annotates a parameter of a semantic function that is an output, with its options."""

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
        """Return a submission with objectives and options; inputs may also be PUT later."""
        return SourceSubmission(
            source=self.source,
            name=self.__name__,
            inputs=dict(inputs or {}),
            objectives=dict(objectives or {}),
            options=options or Options(),
        )


class LanguageName:
    """A function that the language has, for editors and type checkers."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to run in this process.

        Raises:
            ProgramError: `language.call`.
        """
        message = f"`{self.name}` runs on a server only: call it in a function with `program`"
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


def _text_of(main: LanguageProgram[...]) -> str:
    functions: dict[str, LanguageFunction] = {}
    constants: dict[str, str] = {}
    _collect(main, functions, constants)
    head = "; ".join(f"{name} = {text}" for name, text in constants.items())
    parts: list[LanguageFunction | LanguageProgram[...]] = [*functions.values(), main]
    pieces = sorted(_source_of(each) for each in parts)
    files = {each.function.__code__.co_filename for each in parts}
    if len(files) > 1 or (head and pieces[0][0] == 1):
        return "\n".join([head, *(text for _, text in pieces)])
    lines = [head] if head else []
    for start, text in pieces:
        lines += [""] * (start - 1 - len(lines))
        lines += text.split("\n")
    return "\n".join(lines)


def _collect(
    caller: LanguageFunction | LanguageProgram[...],
    functions: dict[str, LanguageFunction],
    constants: dict[str, str],
) -> None:
    """Add the functions and constants that a function uses, and those that they use."""
    for name, value in _references(caller.function):
        if name in functions or name in constants or isinstance(value, LanguageName):
            continue
        if isinstance(value, LanguageFunction):
            functions[name] = value
            _collect(value, functions, constants)
        elif isinstance(value, str | int | float | bool | list | dict | None):
            constants[name] = _literal(name, value)
        elif inspect.isfunction(value) and value.__module__ != __name__:
            _refuse(f"`{name}` is a plain function: decorate it with `conure.function`")


def _references(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Iterate over the names of its module that a function reads, with their values."""
    closure = inspect.getclosurevars(function)
    for values in (closure.nonlocals, closure.globals):
        yield from values.items()


def _literal(name: str, value: Json) -> str:
    try:
        msgspec.json.encode(value)
    except (TypeError, ValueError, msgspec.MsgspecError):
        _refuse(f"`{name}` is not a JSON value: pass it as an input")
    return repr(value)


def _source_of(function: LanguageFunction | LanguageProgram[...]) -> tuple[int, str]:
    """Return the first line of a function, and its source without common indentation."""
    try:
        lines, start = inspect.getsourcelines(function.function)
    except (OSError, TypeError):
        _refuse(f"the source of `{function.__name__}` cannot be read: write it in a file")
    return start, textwrap.dedent("".join(lines)).rstrip("\n")


def _refuse(message: str) -> NoReturn:
    raise ProgramError("language.source", message)
