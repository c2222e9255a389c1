"""Install the wheel with each extra into a fresh environment, and run every command there.

    python .ci/pip_matrix.py [--out FILE] [--extras base serve ...] [--keep FOLDER]

A command passes if it works, or if it ends with one line that names the extra to install. Commands
of a client run against a server of an environment with torch, or of this interpreter if there is
none. Needs an index from which pip installs; torch has the version of constraints.txt, so that no
CUDA build is installed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
CONSTRAINTS: Final = ROOT / "constraints.txt"
EXTRAS: Final = ("base", "serve", "all", "langchain", "llamaindex")
WITH_TORCH: Final = ("serve", "all")
LIMIT_S: Final = 180
PROGRAM: Final = """{"name": "letter", "nodes": [{"id": "a", "op": "generate",
 "prompt": "The guard was Tessa Brook. Who was the guard? ",
 "output": {"variable": "x", "max_tokens": 8, "temperature": 0}}], "outputs": ["x"]}"""

# Arguments of each command; {id} is a program that has ended, {data} an existing journal.
COMMANDS: Final = (
    "",
    "--version",
    "--help",
    "run --example",
    "run program.json --receipt",
    "run program.json --json",
    "chat Hello --temperature 0",
    "ps -a",
    "logs {id}",
    "trace {traced}",
    "cancel {id}",
    "explain program.json",
    "procedures list",
    "bench --rounds 1 --tokens 4",
    "journal check --data {data}",
    "completion bash",
    "doctor --port 0 --data {data}",
    "demo",
)
IMPORTS: Final = (
    "from conure import Client, Program, program",
    "from conure.adapters.langchain import ChatConure, accelerate, to_program",
    "from conure.adapters.llamaindex import Conure, accelerate, explain",
)
NAMES_EXTRA: Final = re.compile(r"pip install '?conure\[\w+\]")
COMMAND_NAMES: Final = re.compile(r'^    Command\("(\w+)"', re.MULTILINE)


class CommandResult(NamedTuple):
    """What one command did in one environment."""

    command: str
    outcome: str
    """`works`, `names the extra`, or what is wrong."""

    @property
    def is_fault(self) -> bool:
        return self.outcome not in ("works", "names the extra")


class Environment(NamedTuple):
    """A fresh environment with the wheel and one extra."""

    extra: str
    folder: Path
    install_s: float

    def python(self, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run the interpreter of the environment, without the checkout on its path."""
        return subprocess.run(
            [self.folder / "bin" / "python", "-I", *arguments],
            cwd=cwd,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=LIMIT_S,
            check=False,
        )

    def num_bytes(self) -> int:
        """Return the size of the environment on disk."""
        return sum(path.lstat().st_size for path in self.folder.rglob("*"))


def main() -> int:
    """Run the matrix; return 1 if a command fails without naming an extra."""
    parser = argparse.ArgumentParser(description="The wheel with each extra.")
    parser.add_argument("--extras", nargs="+", choices=EXTRAS, default=EXTRAS)
    parser.add_argument("--out", type=Path, help="write the table to this file, too")
    parser.add_argument("--keep", type=Path, help="folder for the environments; they stay")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="conure-pip-") as temporary:
        folder = options.keep or Path(temporary)
        wheel = _build(folder)
        environments = [_install(extra, wheel, folder) for extra in options.extras]
        work = folder / "work"
        work.mkdir(exist_ok=True)
        with _Server(environments, work) as server:
            results = {each: list(_check(each, server, work)) for each in environments}
        table = _table(results)
    print(table)  # noqa: T201 - this is a command
    if options.out:
        options.out.write_text(table + "\n", "utf-8")
    return int(any(result.is_fault for each in results.values() for result in each))


def _build(folder: Path) -> Path:
    """Return the wheel of this checkout."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, ROOT]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("conure-*.whl")
    return wheel


def _install(extra: str, wheel: Path, folder: Path) -> Environment:
    """Create an environment with the wheel and an extra, as a user does."""
    target = folder / extra
    subprocess.run([sys.executable, "-m", "venv", target], check=True)
    pip = [target / "bin" / "python", "-m", "pip", "install", "--quiet", "-c", CONSTRAINTS]
    started_at = time.monotonic()
    if extra in WITH_TORCH:
        torch = re.search(r"^torch==\S+", CONSTRAINTS.read_text("utf-8"), re.MULTILINE)
        assert torch is not None
        subprocess.run([*pip, torch[0]], check=True)
    subprocess.run([*pip, f"{wheel}[{extra}]" if extra != "base" else str(wheel)], check=True)
    return Environment(extra, target, time.monotonic() - started_at)


class _Server:
    """A server for the commands of a client, and a program that it has run."""

    def __init__(self, environments: list[Environment], work: Path) -> None:
        found = [each.folder for each in environments if each.extra in WITH_TORCH]
        self._python = str(found[0] / "bin" / "python") if found else sys.executable
        self._work = work
        self.data = work / "data"

    def __enter__(self) -> _Server:
        options = ["--port", "0", "--data", str(self.data)]
        self._process = subprocess.Popen(
            [self._python, "-m", "conure", "serve", *options],
            cwd=self._work,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        found = re.search(r"http://\S+:\d+", self._process.stdout.readline())
        assert found is not None
        self.url = found[0]
        (self._work / "program.json").write_text(PROGRAM, "utf-8")
        run = "import json, sys\nfrom conure import Client\n"
        run += "program, options = json.load(open('program.json')), json.loads(sys.argv[2])\n"
        run += "run = Client(sys.argv[1]).submit(program, options=options)\n"
        run += "run.result()\nprint(run.id)"
        self.ids = {
            name: subprocess.run(
                [self._python, "-c", run, self.url, options],
                cwd=self._work,
                check=True,
                capture_output=True,
                text=True,
            ).stdout.strip()
            for name, options in (("id", "{}"), ("traced", '{"trace": true}'))
        }
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()


def _check(environment: Environment, server: _Server, work: Path) -> Iterator[CommandResult]:
    """Yield what each command and each import does in an environment."""
    names = COMMAND_NAMES.findall((ROOT / "conure" / "cli" / "main.py").read_text("utf-8"))
    with_url = ("run", "chat", "ps", "logs", "trace", "cancel", "explain", "bench")
    for command in [*(f"{name} --help" for name in names), *COMMANDS]:
        words = command.format(data=server.data, **server.ids).split()
        if words and words[0] in with_url and "--help" not in words:
            words += ["--url", server.url]
        if words[:1] == ["procedures"] and "--help" not in words:
            words += ["--url", server.url]
        done = environment.python("-m", "conure", *words, cwd=work)
        is_problem_of_machine = command.startswith("doctor") and done.returncode == 1
        yield CommandResult(f"conure {command}", _outcome(done, is_problem_of_machine))
    yield CommandResult("conure serve", _serve(environment, work))
    for code in IMPORTS:
        yield CommandResult(code, _outcome(environment.python("-c", code, cwd=work), False))


def _outcome(done: subprocess.CompletedProcess[str], may_fail: bool) -> str:
    """Return what a command did, from its exit code and its output."""
    printed = done.stdout + done.stderr
    if "Traceback" in printed and not NAMES_EXTRA.search(printed):
        return f"traceback: {printed.strip().splitlines()[-1]}"
    if done.returncode == 0 or (may_fail and not NAMES_EXTRA.search(printed)):
        return "works"
    if NAMES_EXTRA.search(printed):
        return "names the extra"
    return f"exit code {done.returncode}: {printed.strip()[-300:]}"


def _serve(environment: Environment, work: Path) -> str:
    """Start a server, and stop it once it listens."""
    data = work / f"data-{environment.extra}"
    command = ["-I", "-m", "conure", "serve", "--port", "0", "--data", str(data)]
    process = subprocess.Popen(
        [environment.folder / "bin" / "python", *command],
        cwd=work,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    process.terminate()
    rest, _ = process.communicate()
    if "listens on http://" in first:
        return "works"
    code = process.returncode
    return _outcome(subprocess.CompletedProcess([], code, first + rest, ""), False)


def _table(results: dict[Environment, list[CommandResult]]) -> str:
    """Return the outcomes: a line for each command, a column for each environment."""
    head = ["command", *(each.extra for each in results)]
    sizes = [f"{each.num_bytes() / 1e6:,.0f} MB" for each in results]
    lines = [head, ["---"] * len(head), ["installed", *sizes]]
    lines += [
        [f"`{row[0].command}`", *(result.outcome for result in row)]
        for row in zip(*results.values(), strict=True)
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
