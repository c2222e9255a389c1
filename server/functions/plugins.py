"""The functions of one server: built in, of the operator's module, and of installed packages.

A package offers functions by an entry point in the group `conure.functions`. The name of the entry
point is a capability, and its object a dict of names to functions. Its code is loaded only if the
operator allows the capability: an installed package alone changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from .builtin import BUILTIN
from .registry import FunctionRegistry, RegistryError
from .retrieve import FolderIndex, make_retrieve
from .sandboxed_python import CAPABILITY, PythonSandbox, is_installed, make_python

GROUP = "conure.functions"


class ServerFunctions:
    """The registry of a server, and what its functions hold open."""

    def __init__(
        self,
        own: Mapping[str, Callable[..., Any]],
        *,
        allowed: Iterable[str] = (),
        folder: Path | None = None,
        plugins: Iterable[EntryPoint] | None = None,
    ) -> None:
        """Register all functions.

        Args:
            own: the operator's functions.
            allowed: capabilities: `python`, and names of entry points.
            folder: the texts that `retrieve` searches; None: there is no `retrieve`.
            plugins: entry points; None: those of all installed packages.

        Raises:
            RegistryError: `function.*`; also for a capability that nothing offers.
        """
        allowed = frozenset(allowed)
        self.registry = FunctionRegistry(allowed)
        self._index = None if folder is None else FolderIndex(folder)
        self._sandbox = PythonSandbox()
        self.registry.add_all(BUILTIN)
        if self._index is not None:
            self.registry.add("retrieve", make_retrieve(self._index))
        if CAPABILITY in allowed:
            if not is_installed():
                raise RegistryError(
                    "function.missing", "`--allow python` needs an extra: install conure[python]"
                )
            self.registry.add("python", make_python(self._sandbox))
        self.registry.add_all(own)
        offered = list(entry_points(group=GROUP) if plugins is None else plugins)
        for point in offered:
            if point.name in allowed:
                self._add_plugin(point)
        offers = {CAPABILITY, *(point.name for point in offered)}
        unknown = sorted(allowed - offers - {each.capability for each in self.registry.signatures})
        if unknown:
            raise RegistryError(
                "function.capability",
                f"nothing offers the capability {unknown[0]!r}; there is: "
                f"{', '.join(sorted(offers))}",
            )

    def close(self) -> None:
        """Free the index and stop the sandbox."""
        if self._index is not None:
            self._index.close()
        self._sandbox.close()

    def _add_plugin(self, point: EntryPoint) -> None:
        try:
            functions = point.load()
        except Exception as error:
            message = f"the functions of entry point {point.name!r} cannot be loaded: {error}"
            raise RegistryError("function.plugin", message) from error
        if not isinstance(functions, Mapping) or not all(map(callable, functions.values())):
            raise RegistryError(
                "function.plugin",
                f"entry point {point.name!r} must name a dict of names to functions",
            )
        self.registry.add_all(functions)
