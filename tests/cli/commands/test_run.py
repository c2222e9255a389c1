"""`conure run`: inputs, outputs, exit codes, lost servers."""

from __future__ import annotations

import contextlib
import io
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from conure.adapters.client import Run
from conure.cli.command import server_address
from conure.cli.main import build_parser, main
from conure.server.program.errors import UnavailableError

ROOT = Path(__file__).parents[3]

ASK = {"id": "n", "op": "expr", "expr": {"var": "topic"}, "output": "x"}
COUNT = {"id": "m", "op": "expr", "expr": {"len": [{"var": "topic"}]}, "output": "y"}
PROGRAM = {"variables": {"topic": {}, "unread": {}}, "nodes": [ASK], "outputs": ["x"]}
TWO = {"variables": {"topic": {}}, "nodes": [ASK, COUNT], "outputs": ["x", "y"]}
FAILING = {"nodes": [{"id": "f", "op": "expr", "expr": {"div": [1, 0]}, "output": "x"}]}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "program.json"


def write(file: Path, content: object) -> str:
    file.write_bytes(msgspec.json.encode(content))
    return str(file)


def test_output_goes_to_stdout_and_the_rest_to_stderr(
    url: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", write(file, PROGRAM), "-p", "topic=tea", "--url", url]) == 0
    printed = capsys.readouterr()
    assert printed.out == "tea\n"
    (line,) = printed.err.splitlines()
    assert re.fullmatch(
        r"p_[0-9a-f]{24}: done · 0 calls · \d+ ms · 0 of 0 prompt tokens computed · "
        r"0 tokens generated",
        line,
    )


def test_nodes_are_printed_on_request(
    url: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", write(file, PROGRAM), "-p", "topic=tea", "--url", url, "--verbose"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "tea\n"
    program, *lines, last = printed.err.splitlines()
    assert program.endswith(": accepted")
    assert lines == ["n: finished"]
    assert last.startswith(program.removesuffix("accepted") + "done · 0 calls")


def test_what_a_program_yields_is_always_printed(
    url: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    yielding = {**PROGRAM, "nodes": [ASK, {"id": "y", "op": "yield", "value": {"var": "x"}}]}
    assert main(["run", write(file, yielding), "-p", "topic=tea", "--url", url]) == 0
    assert 'yield "tea"' in capsys.readouterr().err.splitlines()


def test_inputs_are_text_files_or_json(
    url: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("from a file")
    for given, expected in (
        ("topic=b=c", "b=c\n"),
        (f"topic=@{tmp_path}/text.txt", "from a file\n"),
        ("topic:=[1]", "[\n  1\n]\n"),
    ):
        assert main(["run", write(file, PROGRAM), "-p", given, "--url", url]) == 0
        assert capsys.readouterr().out == expected


def test_program_is_read_from_stdin(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content = io.TextIOWrapper(io.BytesIO(msgspec.json.encode(PROGRAM)))
    monkeypatch.setattr(sys, "stdin", content)
    assert main(["run", "-", "-p", "topic=tea", "--url", url]) == 0
    assert capsys.readouterr().out == "tea\n"


@pytest.mark.parametrize("fields", [{}, {"language": "decoder", "inputs": {"topic": "jam"}}])
def test_a_json_file_may_have_a_text(
    url: str, file: Path, capsys: pytest.CaptureFixture[str], fields: dict[str, object]
) -> None:
    text = {"source": "topic: str\nreturn topic", **fields}
    assert main(["run", write(file, text), "-p", "topic=tea", "--url", url]) == 0
    assert capsys.readouterr().out == "tea\n"


def test_several_outputs_have_headings(
    url: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", write(file, TWO), "-p", "topic=tea", "--url", url]) == 0
    assert capsys.readouterr().out == "--- x\ntea\n--- y\n3\n"


def test_one_output_can_be_selected(
    url: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["run", write(file, TWO), "-p", "topic=tea", "--url", url]
    assert main([*argv, "--output", "y"]) == 0
    assert capsys.readouterr().out == "3\n"
    assert main([*argv, "--output", "z"]) == 2
    assert "--output z: the program has no such output; it has x, y" in capsys.readouterr().err


def test_a_trace_file_that_cannot_be_opened_is_refused_before_submitting(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # No server listens at this address: the command must not try to reach it.
    argv = ["run", write(file, PROGRAM), "-p", "topic=tea", "--url", "http://127.0.0.1:1"]
    assert main([*argv, "--trace", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"conure: --trace {tmp_path}: Is a directory\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_outputs_are_printed_before_the_trace_is_written(
    url: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["run", write(file, PROGRAM), "-p", "topic=tea", "--url", url, "--trace", "/dev/full"]
    assert main(argv) == 1
    printed = capsys.readouterr()
    assert printed.out == "tea\n"
    assert printed.err.endswith("conure: --trace /dev/full: No space left on device\n")


def test_receipt_and_status_are_json_on_request(
    url: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["run", write(file, PROGRAM), "-p", "topic=tea", "--url", url]
    assert main([*argv, "--receipt"]) == 0
    receipt = msgspec.json.decode(capsys.readouterr().err.split("tokens generated\n")[1])
    assert receipt["calls"] == 0
    assert main([*argv, "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out)["status"] == "done"


def test_failed_program_exits_1_with_its_reason(
    url: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", write(file, {**FAILING, "outputs": ["x"]}), "--url", url]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "x: failed" in printed.err
    assert "cannot divide by 0" in printed.err


def test_one_failure_of_many_outputs_is_printed_once(
    url: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reader = {"id": "g", "op": "expr", "expr": {"var": "x"}, "output": "y"}
    program = {"nodes": [*FAILING["nodes"], reader], "outputs": ["x", "y"]}
    assert main(["run", write(file, program), "--url", url]) == 1
    *quiet, _ = capsys.readouterr().err.splitlines()
    assert quiet == ["x: failed, expr.value: `div` cannot divide by 0", "y: killed"]
    assert main(["run", write(file, program), "--url", url, "-v"]) == 1
    _, *lines, _ = capsys.readouterr().err.splitlines()
    assert lines == [
        "f: failed, expr.value: `div` cannot divide by 0",
        "g: killed",
        "x: failed",
        "y: killed",
    ]


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("x = 1\ny = parse_json('[0]')[0]\nz = [\n    x / y]\nyield z", 3),
        ("x = 0\nfor i in range(3):\n    y = 1\n    x = y / (x - i)\nyield x", 4),
    ],
)
def test_a_failure_of_a_text_has_its_line(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, line: int
) -> None:
    text = tmp_path / "text.py"
    text.write_text(source)
    for options in ([], ["-v"]):
        assert main(["run", str(text), "--url", url, *options]) == 1
        assert f"failed, expr.value: line {line}: " in capsys.readouterr().err


def test_the_last_lines_contain_a_failure_that_the_progress_did_not_print(
    url: str, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)  # the live view shows states only
    assert main(["run", write(file, {**FAILING, "outputs": ["x"]}), "--url", url]) == 1
    assert "x: failed, expr.value: `div` cannot divide by 0" in capsys.readouterr().err


def test_the_example_of_the_package_runs(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--example", "--url", url]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("--- driver\n")
    assert printed.err.startswith("program: ")
    assert main(["run", "--example", "x.json", "--url", url]) == 2
    assert "give no FILE" in capsys.readouterr().err
    assert main(["run", "--url", url]) == 2
    assert "`conure run --example`" in capsys.readouterr().err


def test_invalid_program_exits_1_with_its_place(
    url: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", write(file, {"nodes": [{"op": "bake"}]}), "--url", url]) == 1
    error = capsys.readouterr().err
    assert error.startswith("conure: program.unsupported_op: op `bake`")
    assert error.count("\n") == 1


def test_missing_server_exits_3(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert main(["run", write(file, {}), "--url", f"http://127.0.0.1:{port}"]) == 3
    error = capsys.readouterr().err
    assert error.startswith(f"conure: no answer from http://127.0.0.1:{port}")
    assert "is the server running (`conure serve`)" in error
    assert error.count("\n") == 1


def test_url_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def parsed(*argv: str) -> str:
        return server_address(build_parser("run").parse_args(["run", "f", *argv]).url)

    monkeypatch.delenv("CONURE_URL", raising=False)
    assert parsed() == "http://127.0.0.1:8400"
    monkeypatch.setenv("CONURE_URL", "http://here:1")
    assert parsed() == "http://here:1"
    assert parsed("--url", "http://there:2") == "http://there:2"
    assert main(["run", "--help"]) == 0
    help_text = " ".join(capsys.readouterr().out.split())
    assert "default: $CONURE_URL, or http://127.0.0.1:8400" in help_text


def test_missing_input_is_named_before_submitting(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # No server listens at this address: the command must not try to reach it.
    assert main(["run", write(file, PROGRAM), "--url", "http://127.0.0.1:1"]) == 2
    error = capsys.readouterr().err
    assert "no value for input `topic`; use -p NAME=VALUE" in error
    assert "unread" not in error


@pytest.mark.parametrize(
    "submission",
    [
        {"program": PROGRAM, "inputs": {"topic": None}},
        {"program": PROGRAM, "open": True},  # a later request may set the value
        {"program": PROGRAM, "options": {"require_inputs": False}},
        {"program": {"nodes": "the server rejects this"}},
    ],
)
def test_programs_that_may_be_complete_are_submitted(submission: object, file: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    argv = ["run", write(file, submission), "--url", f"http://127.0.0.1:{port}"]
    assert main(argv) == 3  # it tried to submit


@pytest.mark.parametrize(
    ("error", "code", "expected_text"),
    [
        (KeyboardInterrupt(), 130, "p_1 keeps running: conure logs p_1 -f --url http://there"),
        (UnavailableError("server.draining", "stopping"), 3, "p_1 is stored; when the server is"),
    ],
)
def test_run_that_stops_following_names_the_program(
    error: BaseException,
    code: int,
    expected_text: str,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def accept(client: object, *_: object, **__: object) -> Run:
        accepted = msgspec.convert(
            {"id": "p_1", "status": "accepted", "outputs": ["x"], "url": ""}, type=_accepted()
        )
        return Run(client, accepted)  # type: ignore[arg-type]

    def stop(*_: object, **__: object) -> Iterator[object]:
        raise error
        yield

    monkeypatch.setattr("conure.adapters.client.Client.submit", accept)
    monkeypatch.setattr("conure.adapters.client.Run.events", stop)
    argv = ["run", write(file, PROGRAM), "-p", "topic=tea", "--url", "http://there"]
    assert main(argv) == code
    last = capsys.readouterr().err.splitlines()[-1]
    assert expected_text in last
    assert "conure cancel p_1 --url http://there" in last


def _accepted() -> Any:
    from conure.server.program.status import Accepted

    return Accepted


def test_run_survives_a_server_restart(file: Path, tmp_path: Path) -> None:
    serve = [sys.executable, "-m", "conure", "serve", "--engine", "fake"]
    serve += ["--data", str(tmp_path / "data")]
    step = {"id": "s", "op": "client", "name": "step", "output": "topic"}
    write(file, {"nodes": [step, ASK], "outputs": ["x"]})

    def start(*command: str) -> subprocess.Popen[str]:
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        pipe = subprocess.PIPE
        return stack.enter_context(
            killed(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environ))
        )

    with contextlib.ExitStack() as stack:
        server = start(*serve, "--port", "0")
        assert server.stdout is not None
        address = read_until(server.stdout, r"(http://127\.0\.0\.1:\d+)")
        run = start(*serve[:3], "run", str(file), "--url", address, "--wait", "120")
        assert run.stderr is not None
        place = read_until(run.stderr, r"PUT (\S+)")
        server.kill()
        read_until(run.stderr, r"conure: (connection lost)")
        again = start(*serve, "--port", address.rpartition(":")[2])
        assert again.stdout is not None
        assert read_until(again.stdout, r"(http://127\.0\.0\.1:\d+)") == address
        httpx.put(place, json={"value": "tea"}, timeout=60).raise_for_status()
        out, error = run.communicate()
    assert run.returncode == 0, error
    assert out == "tea\n"
    assert "client step" not in error, "an event was delivered twice"


@contextlib.contextmanager
def killed(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Kill a process at the end of the block."""
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read_until(lines: Iterable[str], pattern: str) -> str:
    """Return group 1 of the first line that matches a pattern."""
    seen = []
    for line in lines:
        seen.append(line)
        if found := re.search(pattern, line):
            return found[1]
    raise AssertionError(seen)


@pytest.mark.parametrize("url", ["foo", "ftp://there", "http://", "http://there:port"])
def test_malformed_url_is_rejected(
    url: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", write(file, {}), "--url", url]) == 2
    assert f"conure: --url {url!r} is not the address of a server" in capsys.readouterr().err


def test_malformed_url_is_shown_without_its_password(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = "http://user:secret@there:8400/v1/models"
    assert main(["run", write(file, {}), "--url", url]) == 2
    error = capsys.readouterr().err
    assert "/v1/models is a route of it" in error
    assert "secret" not in error


def test_malformed_url_of_the_environment_is_named(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONURE_URL", "ftp://there")
    assert main(["run", write(file, {})]) == 2
    assert "the environment variable CONURE_URL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("x", "-p x: expected NAME=VALUE"),
        ("x=@/nowhere/x", "-p x: cannot read /nowhere/x: No such file or directory"),
        ("x:={", "-p x:= needs JSON: "),
        ("x=@BINARY", "-p x: {BINARY} is not UTF-8 text"),
    ],
)
def test_wrong_input_is_named(
    text: str, error: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff")
    assert main(["run", write(file, {}), "-p", text.replace("BINARY", str(binary))]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("conure: " + error.replace("{BINARY}", str(binary)))
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    "text",
    [
        "yield [gen(f'{goods} {i}') for i in range(2)]",
        "for i in range(2):\n    yield gen(f'{goods}')",
        "a = gen('x')\nif a == 'y':\n    yield gen(goods)",
        "return {'same': 1, 'goods': goods}",
    ],
)
def test_an_input_that_only_a_body_reads_is_read(url: str, tmp_path: Path, text: str) -> None:
    file = tmp_path / "tea.py"
    file.write_text(f"goods: str\n{text}")
    assert main(["run", str(file), "-p", "goods=tea", "--url", url]) == 0


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (
            ["-p", "goods=tea", "-p", "god=x"],
            "no statement reads input `god`; did you mean `goods`?",
        ),
        (["-p", "goods=tea", "-p", "x=1"], "no statement reads input `x`; remove it"),
        (["-p", "goods=tea", "--output", "y"], "--output y: the program has no such output"),
        ([], "no value for input `goods`"),
    ],
)
def test_arguments_are_checked_against_a_text(
    argv: list[str], error: str, tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "tea.py"
    text.write_text("goods: str\nreturn gen(f'{goods}', max_tokens=4)")
    assert main(["run", str(text), *argv, "--url", url]) == 2
    printed = capsys.readouterr().err
    assert error in printed
    assert printed.count("\n") == 1


def test_a_text_in_another_file_names_the_endings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "tea.txt"
    text.write_text("return gen('Tea is ')")
    assert main(["run", str(text)]) == 2
    assert "names of texts end in .py, .decoder, .template" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", ["[]", "{", '{"program": {}, "inputs": 3}', '{"program": {}, "options": [1]}']
)
def test_file_without_a_program_is_rejected(
    content: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(content)
    assert main(["run", str(file), "-p", "x=1", "--trace", str(file.with_suffix(".t"))]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"conure: {file}: ")
    assert error.count("\n") == 1


def test_missing_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "/nowhere/program.json"]) == 2
    assert "No such file" in capsys.readouterr().err
