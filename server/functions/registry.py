"""The functions of a server, with their signatures.

A function takes JSON values as keyword arguments and returns a JSON value. One that raises a
`RunError` fails its node with that code and message; any other exception fails it with
`call.failed`, and the message stays in the server's log.

Out of scope: how a function runs (`threads`) and when (`runtime.steps.function_step`).

Invariant: a function with a capability is in the registry only if the operator allowed it.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec import UNSET

from ..program.content import Json
from ..program.decoding.typed_json import convert_record
from ..program.errors import ConureError, ProgramError, RunError
from ..program.expressions.value_schema import find_mismatch
from ..program.functions import OPTIONAL_FUNCTIONS, FunctionName, FunctionSignature
from ..program.ir import Variable
from ..program.suggestion import suggestion

F = TypeVar("F", bound=Callable[..., Any])
ValueType = Literal["string", "int", "float", "bool", "list", "object", "any"]

DEFAULT_TIMEOUT_S = 60.0
_TYPES: dict[object, ValueType] = {
    str: "string",
    int: "int",
    float: "float",
    bool: "bool",
    list: "list",
    dict: "object",
}
_SETTINGS = "__conure_function__"


class RegistryError(ConureError):
    """Two functions have one name, or a name is not valid."""


@dataclass(frozen=True, slots=True)
class ServerFunction:
    """A function with its signature."""

    signature: FunctionSignature
    run: Callable[..., Any]

    @property
    def is_async(self) -> bool:
        """Whether it is a coroutine function, which runs on the event loop."""
        return inspect.iscoroutinefunction(self.run)

    def check_arguments(self, arguments: Mapping[str, Json]) -> dict[str, Json]:
        """Return the arguments with defaults.

        Raises:
            RunError: `call.argument` if a value does not have the declared type.
        """
        signature = self.signature
        for name, value in arguments.items():
            parameter = signature.parameters.get(name)
            mismatch = None if parameter is None else find_mismatch(value, parameter)
            if mismatch is not None:
                message = f"argument `{name}` of function `{signature.name}` {mismatch}"
                raise RunError("call.argument", message)
        defaults = {
            name: each.default
            for name, each in signature.parameters.items()
            if each.default is not UNSET and name not in arguments
        }
        return {**arguments, **defaults}


def function(
    *, timeout_s: float = DEFAULT_TIMEOUT_S, capability: str | None = None
) -> Callable[[F], F]:
    """Return a decorator with the settings of a registered function.

    Args:
        timeout_s: the function fails after this number of seconds.
        capability: what the operator must allow (`--allow`) for the function to be registered.
    """

    def mark(run: F) -> F:
        setattr(run, _SETTINGS, (timeout_s, capability))
        return run

    return mark


class FunctionRegistry(Mapping[str, ServerFunction]):
    """Functions by name."""

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        self._allowed = frozenset(allowed)
        self._functions: dict[str, ServerFunction] = {}

    def __getitem__(self, name: str) -> ServerFunction:
        return self._functions[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def __len__(self) -> int:
        return len(self._functions)

    def add(self, name: str, run: Callable[..., Any]) -> None:
        """Register a function, unless it needs a capability that is not allowed.

        Raises:
            RegistryError: `function.name`, `function.duplicate`.
        """
        signature = signature_of(name, run)
        if signature.capability is not None and signature.capability not in self._allowed:
            return
        if name in self._functions:
            raise RegistryError(
                "function.duplicate", f"two functions are named {name!r}: rename one of them"
            )
        self._functions[name] = ServerFunction(signature, run)

    def add_all(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        """Register functions by their names; see `add`."""
        for name, run in functions.items():
            self.add(name, run)

    @property
    def signatures(self) -> list[FunctionSignature]:
        """The signatures, by name."""
        return [self._functions[name].signature for name in sorted(self._functions)]

    def check_call(self, name: str, arguments: Iterable[str]) -> None:
        """Check the function and the argument names of a call.

        Raises:
            ProgramError: `call.unknown_function`, `call.argument`.
        """
        if name not in self._functions:
            known = f"the functions are {', '.join(sorted(self._functions)) or 'none'}"
            hint = OPTIONAL_FUNCTIONS.get(name) or suggestion(name, self._functions, known)
            raise ProgramError(
                "call.unknown_function",
                f"this server has no function `{name}`; {hint}",
                path="function",
            )
        signature = self._functions[name].signature
        given = set(arguments)
        for argument in sorted(given - signature.parameters.keys()):
            if not signature.accepts_any:
                raise ProgramError(
                    "call.argument",
                    f"function {name} has no parameter `{argument}`; it has "
                    f"{', '.join(signature.parameters) or 'none'}",
                    path=f"args.{argument}",
                )
        for required in signature.required:
            if required not in given:
                raise ProgramError(
                    "call.argument", f"function {name} needs the argument `{required}`", path="args"
                )


def signature_of(name: str, run: Callable[..., Any]) -> FunctionSignature:
    """Return the signature of a function, from its parameters, annotations and docstring.

    Raises:
        RegistryError: `function.name`.
    """
    try:
        convert_record(name, FunctionName)
    except msgspec.ValidationError:
        raise RegistryError(
            "function.name",
            f"a function cannot be named {name!r}: use names separated by dots",
        ) from None
    timeout_s, capability = getattr(run, _SETTINGS, (DEFAULT_TIMEOUT_S, None))
    parameters: dict[str, Variable] = {}
    accepts_any = False
    try:
        inspected = inspect.signature(run)
        hints = typing.get_type_hints(run)
    except (TypeError, ValueError, NameError):
        inspected, hints = inspect.Signature(), {}
        accepts_any = True
    for parameter in inspected.parameters.values():
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            has_default = parameter.default is not parameter.empty
            parameters[parameter.name] = Variable(
                type=_type_of(hints.get(parameter.name)),
                default=parameter.default if has_default else UNSET,
            )
        else:
            accepts_any = True
    return FunctionSignature(
        name=name,
        description=(inspect.getdoc(run) or "").partition("\n\n")[0],
        parameters=parameters,
        accepts_any=accepts_any,
        result=Variable(type=_type_of(hints.get("return"))),
        timeout_s=timeout_s,
        capability=capability,
    )


def _type_of(annotation: object) -> ValueType | None:
    """Return the type of a value that an annotation demands; None: any."""
    origin = get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        first, *others = map(_type_of, get_args(annotation))
        return first if all(each == first for each in others) else None
    return _TYPES.get(annotation if origin is None else origin)
