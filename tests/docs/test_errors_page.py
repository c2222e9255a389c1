"""docs/reference/errors.md lists every error code of the source, and no other.

Every dotted constant of the source is an error code, unless it is an event, the name of a function,
the name of a file, or in one of the lists below. A new code must be added to the page; a new dotted
constant that is not a code must be added to a list.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from conure.server.functions.builtin import BUILTIN
from conure.server.program import errors
from conure.server.program.errors import ConureError
from conure.server.program.status import EventType, Phase
from conure.server.runtime.quota import ProgramQuota, QuotaLimits

from ..served import environment, served

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "errors.md").read_text("utf-8")
FOLDERS = ("adapters", "conure/cli", "engine", "server")
DOTTED = re.compile(r"[a-z][a-z0-9_]*\.[a-z0-9_]+")

# Modules whose dotted constants are names in other formats: spans, tensors, files of checkpoints.
OTHER_FORMATS = (
    "adapters/training.py",
    "engine/testing/random_model.py",
    "engine/testing/dummy_checkpoint.py",
    "engine/testing/fake_cuda.py",
    "server/runtime/reporting/spans.py",
    "adapters/client/local_app.py",
)
FILE_ENDINGS = (
    "current",
    "decoder",
    "html",
    "jinja",
    "json",
    "log",
    "max",
    "safetensors",
    "sqlite3",
    "stat",
)
# The beginnings of names that are not codes: modules, fields of other APIs, stages of ASGI.
NO_CODES = {
    "call.traced",
    "chat.completion",
    "code_interpreter_call.outputs",
    "conure.engine",
    "conure.functions",
    "conure.request_id",
    "conure.write",
    "e.program",
    "file_search_call.results",
    "http.disconnect",
    "http.request",
    "options.policy",
    "options.tokens",
    "output.0",
    "output.as",
    "output.constraint",
    "output.variable",
    "p.number",
    "program.nodes",
    "program.outputs",
    "program.variables",
    "reasoning.encrypted_content",
    "response.created",
    "response.failed",
    "response.in_progress",
    "response.input_tokens",
    "tool_call.id",
    "transformers.js_config",
    "u.program",
    "web_search_call.results",
}
# Codes that are also the name of an event, of a function or of a file.
TWOFOLD = {
    "expr.json",
    "list.chunk",
    "list.sort",
    "list.sum",
    "list.zip",
    "server.draining",
    "text.template",
    "variable.committed",
}
# Advice of `conure explain`, which refuses nothing.
ADVICE = {
    "input.unread",
    "node.dead",
    "program.no_outputs",
    "prompt.order",
    "prompt.trailing",
    "variable.unread",
}


def constants(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def literal_codes() -> set[str]:
    """Return the codes that are written out in the source."""
    found = {
        text
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if str(path.relative_to(ROOT)) not in OTHER_FORMATS
        for text in constants(path)
        if DOTTED.fullmatch(text) and text.partition(".")[2] not in FILE_ENDINGS
    }
    names = NO_CODES | ADVICE | set(get_args(EventType)) | set(BUILTIN)
    return found - (names - TWOFOLD) | TWOFOLD


def composed_codes() -> set[str]:
    """Return the codes whose second part is computed."""
    placeholders = ROOT / "server" / "routes" / "parrot" / "placeholders.py"
    calls = ROOT / "server" / "routes" / "parrot" / "client_calls.py"
    early = {"failed", "killed", "skipped", "cancelled"}
    assert early < set(get_args(Phase))
    return {
        *(f"quota.{name}" for name in ProgramQuota(QuotaLimits()).usage(num_nodes=0, steps=0)),
        *(f"node.{phase}" for phase in early),
        *(f"run.{phase}" for phase in {*early, "deadline_exceeded"}),
        *(f"submit.{word}" for word in first_arguments(placeholders, "_error")),
        *(f"semantic_call.{word}" for word in first_arguments(calls, "_error")),
    }


def first_arguments(path: Path, function: str) -> Iterator[str]:
    """Yield the literal first arguments of the calls of a function."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        match node:
            case ast.Call(func=ast.Name(id=name), args=[ast.Constant(value=str(word)), *_]):
                if name == function:
                    yield word


def test_the_page_lists_every_code() -> None:
    rows = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    listed = [code for row in rows for code in re.findall(r"`([a-z_]+\.[a-z_]+)`", row)]
    assert len(listed) == len(set(listed))
    assert set(listed) == literal_codes() | composed_codes()


def test_the_page_lists_every_class_with_its_status() -> None:
    rows = re.findall(r"^\| `(\w+Error)` \| ([\d, ]+) \|", PAGE, re.MULTILINE)
    classes = {
        name: each
        for name, each in vars(errors).items()
        if isinstance(each, type) and issubclass(each, ConureError) and each is not ConureError
    }
    assert {name for name, _ in rows} == set(classes)
    assert all(str(classes[name].status) in statuses for name, statuses in rows)


def test_the_refusal_is_the_one_on_the_page(tmp_path: Path) -> None:
    block = re.search(r"<!-- tested: refused -->\n```console\n\$ .*\n(.*\n)```", PAGE)
    assert block is not None
    call = {
        "id": "guard",
        "op": "generate",
        "messages": [{"role": "user", "content": [{"input": "reprot"}]}],
        "output": {"variable": "guard", "max_tokens": 8},
    }
    program = {"variables": {"report": {}}, "nodes": [call], "outputs": ["guard"]}
    (tmp_path / "letter.json").write_text(json.dumps(program), "utf-8")
    with served("--engine", "fake") as url:
        done = subprocess.run(
            [sys.executable, "-m", "conure", "run", "letter.json"],
            cwd=tmp_path,
            env={**environment(), "CONURE_URL": url},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == block[1]
