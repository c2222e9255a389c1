"""The house holds: which folder may import which, and what importing a folder loads.

Reads the source of the four folders without running it, except at the end, where a fresh
interpreter imports the server process and looks for a model library. Knows nothing of
what the code does. Every rule is also shown a small offence, so that it is known to see one.

Kept true (docs/architecture.md draws it):

    adapters -> server.program
    server   -> server.program, engine.api
    engine   -> kernels
    kernels  -> torch, triton, numpy

`server.program` is the language that both sides speak: the standard library and msgspec.
Inside a folder imports are relative, across folders absolute, and files form no cycle.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("adapters", "engine", "kernels", "server")

# What a part may import of other parts; its own folder is always open to it (but see PROGRAM).
ARROWS = {
    "adapters": ("conure.server.program",),
    "server": ("conure.engine.api",),
    "server.program": (),
    "engine": ("conure.kernels",),
    "kernels": (),
}
PROGRAM = "conure.server.program"

# Outside libraries, where a part is held to a list; the standard library is open to all.
LIBRARIES = {
    "kernels": {"torch", "triton", "numpy"},
    "server.program": {"msgspec"},
}
BANNED_NAMES = {"util", "utils", "helper", "helpers", "manager", "managers", "common", "misc"}
BANNED_CLASS_ENDINGS = ("Manager", "Helper", "Impl")
SPEAKS_TO_A_TERMINAL = ("conure.server.cli", "conure.engine.__main__")
MODEL_LIBRARIES = ("torch", "transformers", "triton", "safetensors", "numpy")


class Import(NamedTuple):
    """One imported name: `target` is absolute; `level` counts the dots as written."""

    target: str
    level: int
    line: int


class Source(NamedTuple):
    """One file: `module` is its import name, `is_package` says that it is an `__init__`."""

    module: str
    is_package: bool
    tree: ast.Module

    @property
    def folder(self) -> str:
        return self.module.split(".")[1]

    @property
    def part(self) -> str:
        return "server.program" if is_inside(self.module, PROGRAM) else self.folder


def is_inside(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def parse(path: str, text: str) -> Source:
    """Path is relative to the root of the repository."""
    names = ["conure", *Path(path).with_suffix("").parts]
    is_package = names[-1] == "__init__"
    return Source(".".join(names[:-1] if is_package else names), is_package, ast.parse(text))


def imports_of(source: Source) -> Iterator[Import]:
    """Every import of a file, those inside functions and TYPE_CHECKING blocks included."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, 0, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            package = source.module.split(".")
            if node.level:
                package = package[: len(package) - node.level + source.is_package]
            parts = [*(package if node.level else []), *(node.module or "").split(".")]
            for alias in node.names:
                target = ".".join(part for part in [*parts, alias.name] if part)
                yield Import(target, node.level, node.lineno)


def arrow_faults(source: Source) -> Iterator[str]:
    """Imports of our own code that leave the part without an arrow, or are spelt wrongly."""
    own = PROGRAM if source.part == "server.program" else f"conure.{source.folder}"
    for target, level, line in imports_of(source):
        where = f"{source.module}:{line} imports {target}"
        if target.split(".")[0] in FOLDERS and not level:
            yield f"{where}: write conure.{target}"
        elif not target.startswith("conure"):
            continue
        elif is_inside(target, own):
            if not level:
                yield f"{where}: imports inside a folder are relative"
        elif level and not is_inside(target, f"conure.{source.folder}"):
            yield f"{where}: imports across folders are absolute"
        elif not any(is_inside(target, allowed) for allowed in ARROWS[source.part]):
            yield f"{where}: no arrow leads from {source.part} there"


def library_faults(source: Source) -> Iterator[str]:
    """Outside libraries that a part with a list does not list."""
    allowed = LIBRARIES.get(source.part)
    for target, _, line in imports_of(source):
        name = target.split(".")[0]
        if allowed is not None and name not in {*allowed, "conure", *sys.stdlib_module_names}:
            yield f"{source.module}:{line} imports {name}: not for {source.part}"


def manner_faults(source: Source) -> Iterator[str]:
    """A file without a docstring, a name that says nothing, a print, an `__init__` with code."""
    if not ast.get_docstring(source.tree):
        yield f"{source.module} says nowhere what it is"
    if BANNED_NAMES & set(source.module.split(".")):
        yield f"{source.module} is named after nothing it does"
    if source.is_package and source.module.count(".") == 1 and len(source.tree.body) > 1:
        yield f"{source.module}: the __init__ of a folder holds its docstring only"
    is_quiet = not any(is_inside(source.module, name) for name in SPEAKS_TO_A_TERMINAL)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef) and node.name.endswith(BANNED_CLASS_ENDINGS):
            yield f"{source.module}:{node.lineno} class {node.name} is named after nothing it does"
        if isinstance(node, ast.Name) and node.id == "print" and is_quiet:
            yield f"{source.module}:{node.lineno} prints"


def cycle_in(sources: list[Source]) -> list[str]:
    """The modules of one import cycle between files, empty if there is none."""
    modules = {source.module for source in sources}
    graph: dict[str, set[str]] = {}
    for source in sources:
        targets = graph.setdefault(source.module, set())
        for target, _, _ in imports_of(source):
            # `from .ir import Program` names a thing in a module: the module is what is loaded.
            found = target if target in modules else target.rpartition(".")[0]
            if found in modules and found != source.module:
                targets.add(found)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.fixture(scope="module")
def sources() -> list[Source]:
    """Every Python file of the four folders."""
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return [parse(str(path.relative_to(ROOT)), path.read_text("utf-8")) for path in paths]


def test_every_folder_is_read(sources: list[Source]) -> None:
    assert {source.folder for source in sources} == set(FOLDERS)
    assert {source.part for source in sources} == set(ARROWS)


def test_imports_follow_the_arrows(sources: list[Source]) -> None:
    assert [fault for source in sources for fault in arrow_faults(source)] == []


def test_parts_with_a_list_of_libraries_keep_to_it(sources: list[Source]) -> None:
    assert [fault for source in sources for fault in library_faults(source)] == []


def test_files_say_what_they_are_and_print_nothing(sources: list[Source]) -> None:
    assert [fault for source in sources for fault in manner_faults(source)] == []


def test_files_form_no_import_cycle(sources: list[Source]) -> None:
    assert cycle_in(sources) == []


def test_kernels_has_no_init_because_transformers_imports_a_package_of_that_name() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert all((ROOT / name / "__init__.py").exists() for name in FOLDERS if name != "kernels")


def test_links_lead_to_the_four_folders_and_types_are_published() -> None:
    links = {path.name: os.readlink(path) for path in (ROOT / ".src" / "conure").iterdir()}
    assert links == {name: f"../../{name}" for name in FOLDERS}
    assert all((ROOT / name / "py.typed").exists() for name in FOLDERS)


def test_the_type_checkers_are_pointed_at_all_code() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]
    assert set(FOLDERS) <= set(tools["pyright"]["include"])
    assert ".src/conure" in tools["mypy"]["files"]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("adapters/client.py", "from conure.server import service"),
        ("adapters/client.py", "from conure.engine.api import Fill"),
        ("adapters/client.py", "import conure.server"),
        ("server/engine.py", "from conure.engine.runner import Runner"),
        ("server/engine.py", "def f() -> None:\n    from conure.engine import pool"),
        ("server/engine.py", "from conure.adapters import client"),
        ("server/engine.py", "from conure.kernels import ops"),
        ("server/engine.py", "from conure.server.program import ir"),
        ("server/routes/programs.py", "from ...engine.api import Fill"),
        ("server/program/ir.py", "from ..config import Config"),
        ("server/program/ir.py", "from conure.engine.api import Fill"),
        ("engine/local.py", "from conure.server.program import ir"),
        ("engine/local.py", "from engine import api"),
        ("engine/local.py", "import kernels.ops"),
        ("kernels/ops.py", "from conure.engine.api import Fill"),
    ],
)
def test_a_forbidden_arrow_is_seen(path: str, text: str) -> None:
    assert len(list(arrow_faults(parse(path, text)))) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("adapters/client.py", "from conure.server.program.ir import Program"),
        ("server/engine.py", "from conure.engine.api import Fill"),
        ("server/engine.py", "from .program import ir\nfrom .config import Config"),
        ("server/routes/programs.py", "from ..program.ir import Program\nfrom .. import service"),
        ("server/program/__init__.py", "from .ir import Program"),
        ("engine/local.py", "from conure.kernels import ops\nfrom .api import Fill\nimport torch"),
    ],
)
def test_an_arrow_of_the_design_is_allowed(path: str, text: str) -> None:
    assert list(arrow_faults(parse(path, text))) == []


def test_a_library_outside_the_list_is_seen() -> None:
    source = parse("server/program/ir.py", "import json, msgspec, httpx")
    assert list(library_faults(source)) == [
        "conure.server.program.ir:1 imports httpx: not for server.program"
    ]
    assert list(library_faults(parse("kernels/ops.py", "import torch\nimport transformers")))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("server/gate.py", "x = 1"),
        ("server/utils.py", '"""Things."""'),
        ("server/gate.py", '"""A gate."""\nclass GateManager: ...'),
        ("server/gate.py", '"""A gate."""\nprint(1)'),
        ("server/__init__.py", '"""Server."""\nfrom . import service'),
    ],
)
def test_a_lapse_of_manner_is_seen(path: str, text: str) -> None:
    assert len(list(manner_faults(parse(path, text)))) == 1


def test_a_cycle_is_seen_also_through_a_function_and_a_package() -> None:
    one = parse("server/one.py", "from .two import Two")
    two = parse("server/two.py", "def f() -> None:\n    from . import three")
    three = parse("server/three.py", "from .one import One")
    assert cycle_in([one, two]) == []
    assert set(cycle_in([one, two, three])) == {one.module, two.module, three.module}


# Imports every module named on the command line (a trailing .* means all below), then reports.
PROBE = """
import importlib, json, pathlib, sys
for name in sys.argv[1:]:
    package = importlib.import_module(name.removesuffix(".*"))
    if name.endswith(".*"):
        for folder in package.__path__:
            for path in sorted(pathlib.Path(folder).rglob("*.py")):
                parts = path.relative_to(folder).with_suffix("").parts
                if parts[-1] not in ("__init__", "__main__"):
                    importlib.import_module(".".join([package.__name__, *parts]))
print(json.dumps(sorted(sys.modules)))
"""


def modules_after_importing(*names: str) -> set[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".src")}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *names],
        env=environment,
        cwd=ROOT / ".src",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_importing_everything_but_the_engine_loads_no_model_library() -> None:
    loaded = modules_after_importing(
        "conure.server.*",
        "conure.engine.api",
        "conure.adapters.client",
        "conure.adapters.langchain",
    )
    assert {"conure.server.app", "conure.server.cli", "conure.adapters.langchain"} <= loaded
    assert {name for name in MODEL_LIBRARIES if name in loaded} == set()
    engine = {name for name in loaded if is_inside(name, "conure.engine")}
    assert engine == {"conure.engine", "conure.engine.api"}


def test_the_llamaindex_adapter_loads_no_model_library_but_the_arrays_of_llamaindex() -> None:
    pytest.importorskip("llama_index.core", reason="the extra `llamaindex` is not installed")
    loaded = modules_after_importing("conure.adapters.llamaindex")
    assert {name for name in MODEL_LIBRARIES if name in loaded} <= {"numpy"}
    assert not any(is_inside(name, "conure.engine") for name in loaded)


def test_the_language_alone_loads_only_msgspec() -> None:
    loaded = {name.split(".")[0] for name in modules_after_importing(f"{PROGRAM}.*")}
    outside = loaded & {
        "litestar",
        "httpx",
        "tokenizers",
        "jinja2",
        "langchain_core",
        "llama_index",
        *MODEL_LIBRARIES,
    }
    assert outside == set()
    assert "msgspec" in loaded
