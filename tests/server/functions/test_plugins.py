"""Which functions a server has: built in, the operator's, and those of packages."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from conure.server.functions.plugins import GROUP, ServerFunctions
from conure.server.functions.registry import RegistryError, function, signature_of

ACME = EntryPoint("acme", "acme_functions:functions", GROUP)


@pytest.fixture
def acme(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("acme_functions")
    module.functions = {"acme.look": lambda word: word}  # type: ignore[attr-defined]  # made here
    monkeypatch.setitem(sys.modules, "acme_functions", module)
    return module


def refusal(**settings: Any) -> RegistryError:
    with pytest.raises(RegistryError) as caught:
        ServerFunctions(settings.pop("own", {}), **settings)
    return caught.value


def test_every_server_has_the_built_in_functions() -> None:
    functions = ServerFunctions({"mine": lambda x: x}, plugins=[]).registry
    assert {"json.parse", "regex.extract", "text.template", "calc", "vote", "mine"} <= set(
        functions
    )
    assert not {"retrieve", "python"} & set(functions)
    assert [each.name for each in functions.signatures] == sorted(functions)


def test_an_installed_package_is_loaded_only_if_it_is_allowed(acme: ModuleType) -> None:
    assert "acme.look" not in ServerFunctions({}, plugins=[ACME]).registry
    allowed = ServerFunctions({}, plugins=[ACME], allowed=["acme"])
    assert "acme.look" in allowed.registry


def test_a_package_that_cannot_be_loaded_is_an_error() -> None:
    missing = EntryPoint("gone", "no_such_module_at_all:functions", GROUP)
    assert refusal(plugins=[missing], allowed=["gone"]).code == "function.plugin"
    wrong = EntryPoint("wrong", "json:dumps", GROUP)
    assert refusal(plugins=[wrong], allowed=["wrong"]).code == "function.plugin"


def test_a_capability_that_nothing_offers_is_an_error() -> None:
    error = refusal(plugins=[ACME], allowed=["acne"])
    assert error.code == "function.capability"
    assert "acme, python" in error.message


def test_names_are_unique_and_well_formed() -> None:
    assert refusal(own={"calc": len}, plugins=[]).code == "function.duplicate"
    assert refusal(own={"a b": len}, plugins=[]).code == "function.name"


def test_a_function_with_a_capability_needs_it() -> None:
    @function(timeout_s=3, capability="network")
    def fetch(url: str) -> str:
        return url

    assert "fetch" not in ServerFunctions({"fetch": fetch}, plugins=[]).registry


def test_a_folder_gives_retrieve(tmp_path: Path) -> None:
    functions = ServerFunctions({}, folder=tmp_path, plugins=[])
    assert functions.registry["retrieve"].signature.required == ("query",)
    functions.close()


def test_a_signature_has_types_defaults_and_a_description() -> None:
    @function(timeout_s=3)
    def look(word: str, k: int | None = 5, *, deep: bool = False, **rest: Any) -> list[str]:
        """Look a word up.

        More.
        """
        return []

    signature = signature_of("dictionary.look", look)
    types = {name: each.type for name, each in signature.parameters.items()}
    assert types == {"word": "string", "k": None, "deep": "bool"}
    assert signature.required == ("word",)
    assert signature.accepts_any
    assert signature.result.type == "list"
    assert (signature.description, signature.timeout_s) == ("Look a word up.", 3)
