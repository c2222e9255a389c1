"""The entry point: help, version, unknown commands, missing packages."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conure.cli.main import COMMANDS, EXTRA_OF_MODULE, build_parser, main

ROOT = Path(__file__).parents[2]


def test_without_arguments_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert "conure run --example" in printed
    assert all(command.name in printed for command in COMMANDS)


@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
def test_each_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert f"usage: conure {command}" in capsys.readouterr().out


def test_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert re.fullmatch(r"conure \S+\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("word", "hint"),
    [("srve", "did you mean `conure serve`?"), ("bake", "commands: serve, run, explain, chat")],
)
def test_unknown_command_exits_2_with_a_hint(
    word: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"conure: unknown command {word!r}; {hint}")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["run", "--exmple"], "`conure run` has no argument '--exmple'; did you mean --example?"),
        (["serve", "--prt", "1"], "`conure serve` has no argument '--prt'; did you mean --port?"),
        (["ps", "7"], "`conure ps` has no argument '7'; see `conure ps --help`"),
        (["ps", "-n", "x"], "argument -n: invalid int value: 'x'; see `conure ps --help`"),
        (["ps", "--status", "ill"], "invalid choice: 'ill' (choose from 'running', 'done'"),
        (["logs"], "the following arguments are required: PROGRAM; see `conure logs --help`"),
        (["--verbose"], "the following arguments are required: COMMAND; see `conure --help`"),
    ],
)
def test_wrong_usage_is_one_line_with_a_hint(
    argv: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("conure: ")
    assert error in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    "argv", [["logs", "\udcff"], ["run", "--example", "-p", "report=\udcff"]], ids=ascii
)
def test_an_argument_that_is_not_utf8_is_named(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    printed = capsys.readouterr().err.splitlines()[-1]
    assert printed.startswith("conure: the argument b'")
    assert printed.endswith("\\xff' is not UTF-8 text")


def test_wrong_flag_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--nonsense"]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "powershell"])
def test_completion_contains_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    printed = capsys.readouterr().out
    assert all(command.name in printed for command in COMMANDS)
    assert "--max-sequences" in printed


WITHOUT = """
import sys

sys.modules.update(dict.fromkeys({missing!r}))  # importing them fails
from conure.cli.main import main
sys.exit(main({argv!r}))
"""


def run_into(stdout: str, stderr: str) -> tuple[int, str]:
    """Run a command whose output goes to files; return its exit code and its stderr, if piped."""
    command = [sys.executable, "-m", "conure", "--help"]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    pipe = subprocess.PIPE
    with contextlib.ExitStack() as stack:
        out, error = (
            pipe if file == "pipe" else stack.enter_context(Path(file).open("wb"))
            for file in (stdout, stderr)
        )
        environ["PYTHONPATH"] = str(ROOT)
        process = subprocess.Popen(command, env=environ, stdout=out, stderr=error)
        if process.stdout is not None:
            process.stdout.close()  # the command cannot have written yet: Python starts
        _, printed = process.communicate()
    return process.returncode, (printed or b"").decode()


def test_a_reader_that_ends_is_no_failure() -> None:
    assert run_into("pipe", "pipe") == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_one_error_line() -> None:
    assert run_into("/dev/full", "pipe") == (1, "conure: No space left on device\n")
    assert run_into("/dev/full", "/dev/full") == (1, "")


def run_without_extras(*argv: str) -> subprocess.CompletedProcess[str]:
    """Run a command in an interpreter that has the base dependencies only."""
    missing = [*EXTRA_OF_MODULE, "rich"]
    missing.remove("shtab")
    code = WITHOUT.format(missing=missing, argv=list(argv))
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("argv", [(), ("--version",), ("run", "--help"), ("serve", "--help")])
def test_base_install_has_help_and_version(argv: tuple[str, ...]) -> None:
    done = run_without_extras(*argv)
    assert (done.returncode, done.stderr) == (0, "")


def test_base_install_names_the_extra_of_a_server() -> None:
    done = run_without_extras("serve", "--engine", "fake", "--port", "0")
    assert done.returncode == 1
    assert re.fullmatch(
        r"conure: `conure serve` needs the package \S+: pip install 'conure\[serve\]'\n",
        done.stderr,
    )


@pytest.mark.parametrize(
    ("adapter", "library"), [("langchain", "langchain_core"), ("llamaindex", "llama_index")]
)
def test_base_install_names_the_extra_of_an_adapter(adapter: str, library: str) -> None:
    hidden = f"import sys; sys.modules[{library!r}] = None"
    done = subprocess.run(
        [sys.executable, "-c", f"{hidden}; import conure.adapters.{adapter}"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert f"pip install 'conure[{adapter}]'" in done.stderr.splitlines()[-1]


def test_base_install_runs_doctor() -> None:
    done = run_without_extras("doctor", "--port", "0")
    assert done.returncode == 1
    assert "pip install 'conure[serve]'" in done.stdout


def test_parser_imports_the_named_command_only() -> None:
    code = "from conure.cli.main import build_parser; build_parser('run'); import sys; "
    code += "print([name for name in ('conure.cli.commands.serve', 'torch', 'litestar') "
    code += "if name in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_all_commands_share_one_parser() -> None:
    assert build_parser(None, all_commands=True).parse_args(["ps", "--all"]).all


def test_demo_shows_its_three_parts() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "conure", "demo"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as demo:
        try:
            printed, errors = demo.communicate(timeout=200)
        except subprocess.TimeoutExpired:
            demo.kill()
            pytest.fail(f"the demo has not ended: {demo.communicate()}")
    assert (demo.returncode, errors) == (0, "")
    assert "the same answers" in printed
    assert "the program finished by itself, 16 of 16 answers" in printed
    assert re.search(r"\d+ prompt tokens \(\d+%\) were shared", printed)
