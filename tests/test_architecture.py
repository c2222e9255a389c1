"""Architecture rules: allowed imports, loaded libraries, names and sizes.

The checks read the source of the four folders without running it. Those of loaded libraries import
modules in a fresh interpreter. The rules about source are also tested on a small offence.

Allowed imports across folders (docs/architecture.md shows them):

    adapters -> server.program
    server   -> server.program, engine.protocol, engine.config
    engine   -> kernels, cache_folder
    kernels  -> cache_folder, torch, triton, numpy, flashinfer (optional)

`server.program` uses only the standard library, msgspec and re2. Its `typed_json` decodes all typed
JSON, because msgspec crashes where two threads decode a type for the first time. Imports are
relative inside a folder and absolute across folders. Files form no import cycle.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("adapters", "engine", "kernels", "server")
COMMAND_LINE = Path("conure", "cli")
"""Part of the front door, checked like a folder named `cli`."""

SCRIPT_FOLDERS = (".ci", "benchmarks", "examples")
"""Folders that only the rules on classes apply to."""

# Modules of other parts that a part may import. A part may always import its own modules.
ARROWS = {
    "adapters": ("conure.server.program",),
    "server": ("conure.engine.protocol", "conure.engine.config", "conure.__version__"),
    "server.program": (),
    "engine": ("conure.kernels", "conure.cache_folder"),
    "kernels": ("conure.cache_folder",),
    "cli": (
        "conure.__version__",
        "conure.cache_folder",
        "conure.adapters.client",
        "conure.adapters.langchain",
        "conure.adapters.training",
        "conure.engine.config",
        "conure.engine.models.inspection",
        "conure.engine.protocol",
        "conure.engine.runner.control_groups",
        "conure.server",
    ),
}
PROGRAM = "conure.server.program"

# Third-party libraries of the parts that have a list. The standard library is always allowed.
LIBRARIES = {
    "kernels": {"torch", "triton", "numpy", "flashinfer"},
    "server.program": {"msgspec", "re2"},
}
BANNED_NAMES = {"util", "utils", "helper", "helpers", "common", "misc"}
BANNED_CLASS_ENDINGS = ("Helper", "Impl")
SPEAKS_TO_A_TERMINAL = ("conure.cli", "conure.engine.__main__")
TYPED_DECODING = "conure.server.program.decoding.typed_json"
THREADED_PARTS = ("adapters", "server", "server.program", "cli")
# Imports inside a folder that would invert its layers: (module, imported module).
INNER_ARROWS = (
    ("conure.engine.kv", "conure.engine.core.engine"),
    ("conure.engine.kv", "conure.engine.runner"),
    ("conure.engine.sampling", "conure.engine.core.engine"),
    ("conure.engine.constraints", "conure.engine.core"),
    ("conure.engine.text", "conure.engine.core"),
    ("conure.engine.core", "conure.engine.models"),
    ("conure.kernels.planning", "conure.kernels.cpu"),
    ("conure.kernels.planning", "conure.kernels.gpu"),
    ("conure.kernels.cpu", "conure.kernels.gpu"),
    ("conure.server.program", "conure.server.runtime"),
    ("conure.server.program", "conure.server.language"),
    ("conure.server.language", "conure.server.runtime"),
    ("conure.server.language", "conure.server.routes"),
    ("conure.server.functions", "conure.server.runtime"),
    ("conure.server.functions", "conure.server.routes"),
    ("conure.server.scheduling", "conure.server.runtime"),
    ("conure.server.store", "conure.server.runtime"),
    ("conure.server.prompts", "conure.server.runtime"),
    ("conure.server.engines", "conure.server.runtime"),
    ("conure.server.runtime", "conure.server.routes"),
    ("conure.server.runtime.admission", "conure.server.runtime.control_flow"),
    ("conure.server.runtime.calls", "conure.server.runtime.control_flow"),
    ("conure.server.runtime.persistence", "conure.server.runtime.control_flow"),
    ("conure.adapters.client", "conure.adapters.langchain"),
    ("conure.adapters.client", "conure.adapters.llamaindex"),
    ("conure.adapters.langchain", "conure.adapters.llamaindex"),
    ("conure.adapters.llamaindex", "conure.adapters.langchain"),
)
MAX_FOLDER_FILES = 15
MAX_CLASS_METHODS = 25
MODEL_LIBRARIES = ("torch", "transformers", "triton", "safetensors", "numpy")


class Import(NamedTuple):
    """One imported name: `target` is absolute; `level` is the number of leading dots."""

    target: str
    level: int
    line: int


class Source(NamedTuple):
    """One file: `module` is its import name, `is_package` is true for an `__init__`."""

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
    """Parse a file; `path` is relative to the root of the repository."""
    names = ["conure", *Path(path).with_suffix("").parts]
    is_package = names[-1] == "__init__"
    return Source(".".join(names[:-1] if is_package else names), is_package, ast.parse(text))


def imports_of(source: Source) -> Iterator[Import]:
    """Yield every import of a file, including those in functions and TYPE_CHECKING blocks."""
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
    """Yield imports of our own code that no arrow allows or that have the wrong form."""
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
            yield f"{where}: not allowed for {source.part}"


def library_faults(source: Source) -> Iterator[str]:
    """Yield imports of third-party libraries that are not in the list of the part."""
    allowed = LIBRARIES.get(source.part)
    for target, _, line in imports_of(source):
        name = target.split(".")[0]
        if allowed is not None and name not in {*allowed, "conure", *sys.stdlib_module_names}:
            yield f"{source.module}:{line} imports {name}: not for {source.part}"


def manner_faults(source: Source) -> Iterator[str]:
    """Yield missing docstrings, meaningless names, prints, and code in a folder's `__init__`."""
    if not ast.get_docstring(source.tree):
        yield f"{source.module} has no docstring"
    if BANNED_NAMES & set(source.module.split(".")):
        yield f"{source.module} has a meaningless name"
    if source.is_package and source.module.count(".") == 1 and len(source.tree.body) > 1:
        yield f"{source.module}: the __init__ of a folder may contain only a docstring"
    is_quiet = not any(is_inside(source.module, name) for name in SPEAKS_TO_A_TERMINAL)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef) and node.name.endswith(BANNED_CLASS_ENDINGS):
            yield f"{source.module}:{node.lineno} class {node.name} has a meaningless name"
        if isinstance(node, ast.Name) and node.id == "print" and is_quiet:
            yield f"{source.module}:{node.lineno} prints"


def decoding_faults(source: Source) -> Iterator[str]:
    """Yield typed decoding outside of the module that makes it safe in threads."""
    if source.part not in THREADED_PARTS or source.module == TYPED_DECODING:
        return
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        is_typed = len(node.args) > 1 or any(word.arg == "type" for word in node.keywords)
        if name in ("msgspec.convert", "msgspec.json.Decoder") or (
            name == "msgspec.json.decode" and is_typed
        ):
            yield f"{source.module}:{node.lineno} uses {name}: see {TYPED_DECODING}"


def cycle_in(sources: list[Source]) -> list[str]:
    """Return the modules of one import cycle between files, or an empty list."""
    modules = {source.module for source in sources}
    graph: dict[str, set[str]] = {}
    for source in sources:
        targets = graph.setdefault(source.module, set())
        for target, _, _ in imports_of(source):
            # `from .ir import Program` imports a name of a module: the module is loaded.
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
    """Return every Python file of the four folders and of the command line."""
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    found = [parse(str(path.relative_to(ROOT)), path.read_text("utf-8")) for path in paths]
    commands = sorted((ROOT / COMMAND_LINE).rglob("*.py"))
    return found + [
        parse(str(path.relative_to(ROOT / "conure")), path.read_text("utf-8")) for path in commands
    ]


def test_every_folder_is_checked(sources: list[Source]) -> None:
    assert {source.folder for source in sources} == {*FOLDERS, "cli"}
    assert {source.part for source in sources} == set(ARROWS)


def test_imports_follow_the_allowed_directions(sources: list[Source]) -> None:
    assert [fault for source in sources for fault in arrow_faults(source)] == []


def test_parts_import_only_listed_libraries(sources: list[Source]) -> None:
    assert [fault for source in sources for fault in library_faults(source)] == []


def test_files_have_docstrings_and_meaningful_names(sources: list[Source]) -> None:
    assert [fault for source in sources for fault in manner_faults(source)] == []


def test_typed_json_is_decoded_by_one_module(sources: list[Source]) -> None:
    assert [fault for source in sources for fault in decoding_faults(source)] == []


def test_files_form_no_import_cycle(sources: list[Source]) -> None:
    assert cycle_in(sources) == []


def test_kernels_has_no_init() -> None:
    # transformers imports an installed package named `kernels`, which a plain folder does not
    # shadow.
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert all((ROOT / name / "__init__.py").exists() for name in FOLDERS if name != "kernels")


def test_links_point_to_the_four_folders() -> None:
    links = {
        path.name: os.readlink(path) for path in (ROOT / "conure").iterdir() if path.is_symlink()
    }
    assert links == {name: f"../{name}" for name in FOLDERS}
    assert all((ROOT / name / "py.typed").exists() for name in FOLDERS)


def test_type_checkers_check_all_code() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]
    assert "conure" in tools["pyright"]["include"]
    assert "conure" in tools["mypy"]["files"]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("adapters/client/sync_client.py", "from conure.server import service"),
        ("adapters/client/sync_client.py", "from conure.engine.protocol import Fill"),
        ("adapters/client/sync_client.py", "import conure.server"),
        ("server/engines/connection.py", "from conure.engine.runner.base import Runner"),
        ("server/engines/connection.py", "def f() -> None:\n    from conure.engine import pool"),
        ("server/engines/connection.py", "from conure.adapters import client"),
        ("server/engines/connection.py", "from conure.kernels import ops"),
        ("server/engines/connection.py", "from conure.server.program import ir"),
        ("server/routes/programs.py", "from ...engine.protocol import Fill"),
        ("server/program/ir.py", "from ..config import Config"),
        ("server/program/ir.py", "from conure.engine.protocol import Fill"),
        ("engine/runner/torch_runner.py", "from conure.server.program import ir"),
        ("engine/runner/torch_runner.py", "from engine import api"),
        ("engine/runner/torch_runner.py", "import kernels.ops"),
        ("kernels/ops.py", "from conure.engine.protocol import Fill"),
    ],
)
def test_a_forbidden_import_is_found(path: str, text: str) -> None:
    assert len(list(arrow_faults(parse(path, text)))) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("adapters/client/sync_client.py", "from conure.server.program.ir import Program"),
        ("server/engines/connection.py", "from conure.engine.protocol import Fill"),
        ("server/engines/connection.py", "from .program import ir\nfrom .config import Config"),
        ("server/routes/programs.py", "from ..program.ir import Program\nfrom .. import service"),
        ("server/program/__init__.py", "from .ir import Program"),
        (
            "engine/runner/torch_runner.py",
            "from conure.kernels import ops\nfrom .api import Fill\nimport torch",
        ),
    ],
)
def test_an_allowed_import_passes(path: str, text: str) -> None:
    assert list(arrow_faults(parse(path, text))) == []


def test_an_unlisted_library_is_found() -> None:
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
        ("server/gate.py", '"""A gate."""\nclass GateHelper: ...'),
        ("server/gate.py", '"""A gate."""\nprint(1)'),
        ("server/__init__.py", '"""Server."""\nfrom . import service'),
    ],
)
def test_a_style_fault_is_found(path: str, text: str) -> None:
    assert len(list(manner_faults(parse(path, text)))) == 1


@pytest.mark.parametrize(
    "call",
    [
        "msgspec.convert(value, Record)",
        "msgspec.json.Decoder(Record)",
        "msgspec.json.decode(body, type=Record)",
    ],
)
def test_typed_decoding_elsewhere_is_found(call: str) -> None:
    text = f'"""Doc."""\nimport msgspec\n{call}\nmsgspec.json.decode(body)\n'
    assert len([*decoding_faults(parse("server/a.py", text))]) == 1
    assert not [*decoding_faults(parse("engine/a.py", text))]


def test_a_cycle_through_functions_and_packages_is_found() -> None:
    one = parse("server/one.py", "from .two import Two")
    two = parse("server/two.py", "def f() -> None:\n    from . import three")
    three = parse("server/three.py", "from .one import One")
    assert cycle_in([one, two]) == []
    assert set(cycle_in([one, two, three])) == {one.module, two.module, three.module}


# Import every module named on the command line (`.*`: with all submodules), then print sys.modules.
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
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *names],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_only_the_engine_loads_model_libraries() -> None:
    loaded = modules_after_importing(
        "conure.server.*",
        "conure.cli.*",
        "conure.engine.protocol",
        "conure.adapters.client.sync_client",
        "conure.adapters.langchain",
    )
    assert {"conure.server.app", "conure.cli.main", "conure.adapters.langchain"} <= loaded
    assert {name for name in MODEL_LIBRARIES if name in loaded} == set()
    engine = {name for name in loaded if is_inside(name, "conure.engine")}
    assert engine == {"conure.engine", "conure.engine.config", "conure.engine.protocol"}


def test_the_llamaindex_adapter_loads_no_torch() -> None:
    pytest.importorskip("llama_index.core", reason="the extra `llamaindex` is not installed")
    loaded = modules_after_importing("conure.adapters.llamaindex")
    assert {name for name in MODEL_LIBRARIES if name in loaded} <= {"numpy"}
    assert not any(is_inside(name, "conure.engine") for name in loaded)


def test_the_program_package_loads_no_large_library() -> None:
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


def inner_arrow_faults(source: Source) -> Iterator[str]:
    """Yield imports that invert the layers inside a folder."""
    for importer, imported in INNER_ARROWS:
        if is_inside(source.module, importer):
            for target, _, line in imports_of(source):
                if is_inside(target, imported):
                    yield f"{source.module}:{line} imports {target}: not allowed for {importer}"


def class_faults(sources: list[Source]) -> Iterator[str]:
    """Yield classes with too many methods, and names that several classes share."""
    places: dict[str, list[str]] = {}
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(source.module)
                functions = (ast.FunctionDef, ast.AsyncFunctionDef)
                num_methods = sum(isinstance(part, functions) for part in node.body)
                if num_methods > MAX_CLASS_METHODS:
                    yield f"{source.module}: class {node.name} has {num_methods} methods"
    for name, modules in places.items():
        if len(modules) > 1:
            yield f"class {name} is defined in {' and '.join(modules)}"


def test_rules_name_modules_that_exist(sources: list[Source]) -> None:
    modules = {source.module for source in sources}
    named = {
        TYPED_DECODING,
        *SPEAKS_TO_A_TERMINAL,
        *(name for pair in INNER_ARROWS for name in pair),
    }
    assert named - modules == set()


def test_inner_arrows_are_kept(sources: list[Source]) -> None:
    assert [fault for source in sources for fault in inner_arrow_faults(source)] == []


def test_an_inverted_layer_is_found() -> None:
    source = parse("engine/kv/manager.py", "from ..core.engine import EngineCore")
    assert len(list(inner_arrow_faults(source))) == 1


def test_class_names_are_unique_and_classes_are_small(sources: list[Source]) -> None:
    scripts: list[Source] = []
    for folder in SCRIPT_FOLDERS:
        paths = sorted((ROOT / folder).rglob("*.py"))
        assert paths, folder
        scripts += [parse(str(path.relative_to(ROOT)), path.read_text("utf-8")) for path in paths]
    assert list(class_faults([*sources, *scripts])) == []


def test_a_shared_class_name_and_a_large_class_are_found() -> None:
    one = parse("server/one.py", "class Call: ...")
    two = parse("engine/two.py", "class Call: ...")
    methods = "\n".join(f"    def m{number}(self): ..." for number in range(MAX_CLASS_METHODS + 1))
    large = parse("server/large.py", f"class Large:\n{methods}")
    assert list(class_faults([one, two])) == [
        "class Call is defined in conure.server.one and conure.engine.two"
    ]
    assert list(class_faults([large])) == ["conure.server.large: class Large has 26 methods"]


def test_no_folder_has_too_many_files() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    counts = Counter(str(Path(name).parent) for name in listed.stdout.split("\0") if name)
    del counts["docs/decisions"]  # a numbered series
    large = {folder: count for folder, count in counts.items() if count > MAX_FOLDER_FILES}
    assert large == {}
