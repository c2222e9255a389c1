"""Conure: a server for LLM applications, and the clients of that server.

    from conure import Client

    client = Client("http://127.0.0.1:8400")
    print(client.run(program).outputs)

Each public name loads its module at first use. Importing this package loads neither httpx nor
torch, and no public name loads torch.

The subpackages are links to the folders of the repository: `conure.adapters` (clients,
LangChain, LlamaIndex), `conure.server`, `conure.engine` and `conure.kernels`. User code needs
only the names below, `conure.adapters.langchain` and `conure.adapters.llamaindex`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from conure.adapters.authoring import Output, function, program
    from conure.adapters.client import (
        AsyncClient,
        AsyncRun,
        Client,
        NotReadyError,
        Retry,
        Run,
        ServerUnreachableError,
    )
    from conure.adapters.training import training_examples
    from conure.server.program.errors import (
        ConflictError,
        ConureError,
        ExpressionError,
        NotFoundError,
        ProgramError,
        PromptError,
        RunError,
        UnavailableError,
    )
    from conure.server.program.ir import Program
    from conure.server.program.status import (
        Event,
        NodeStatus,
        ProgramStatus,
        Receipt,
        VariableStatus,
    )

    __version__: str

__all__ = [
    "AsyncClient",
    "AsyncRun",
    "Client",
    "ConflictError",
    "ConureError",
    "Event",
    "ExpressionError",
    "NodeStatus",
    "NotFoundError",
    "NotReadyError",
    "Output",
    "Program",
    "ProgramError",
    "ProgramStatus",
    "PromptError",
    "Receipt",
    "Retry",
    "Run",
    "RunError",
    "ServerUnreachableError",
    "UnavailableError",
    "VariableStatus",
    "__version__",
    "function",
    "program",
    "training_examples",
]

_EXPORTS: Final = {
    "adapters.authoring": ("Output", "function", "program"),
    "adapters.client": (
        "AsyncClient",
        "AsyncRun",
        "Client",
        "NotReadyError",
        "Retry",
        "Run",
        "ServerUnreachableError",
    ),
    "adapters.training": ("training_examples",),
    "server.program.errors": (
        "ConflictError",
        "ConureError",
        "ExpressionError",
        "NotFoundError",
        "ProgramError",
        "PromptError",
        "RunError",
        "UnavailableError",
    ),
    "server.program.ir": ("Program",),
    "server.program.status": (
        "Event",
        "NodeStatus",
        "ProgramStatus",
        "Receipt",
        "VariableStatus",
    ),
}
_MODULES: Final = {name: module for module, names in _EXPORTS.items() for name in names}


# Classes keep the `__module__` of the module that defines them: msgspec resolves annotations
# through it, and rewriting it at first use would make it depend on the order of imports.
if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> object:
        """Load a public name at its first use (PEP 562)."""
        if name == "__version__":
            value: object = _version()
        elif name in _MODULES:
            value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    metadata = import_module("importlib.metadata")
    try:
        version: str = metadata.version("conure")
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        return "0+source"
    return version
