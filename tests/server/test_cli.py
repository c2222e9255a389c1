"""The command line: arguments, exit codes, one-line errors, signals, and `run`."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from conure.server import cli
from conure.server.cli import main
from conure.server.commands.run import read_events
from conure.server.config import Config
from conure.server.engines.command import command_of

ROOT = Path(__file__).parents[2]

SERVER = """
import asyncio, sys
sys.path.insert(0, {root!r})
from conure.server import cli
from conure.server.commands import serve as serving
from conure.server.app import create_app
from tests.server.service_double import ScriptedService

class Service(ScriptedService):
    async def start(self):
        {start}
    async def drain(self):
        {drain}

serving.create_app = lambda config, functions: create_app(config, service=Service())
sys.exit(cli.main({argv!r}))
"""


def spawn(
    *argv: str, start: str = "pass", drain: str = "await super().drain()"
) -> subprocess.Popen[str]:
    code = SERVER.format(root=str(ROOT), start=start, drain=drain, argv=["serve", *argv])
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / ".src")},
    )


def address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"http://[^ ,;]+", line)
    assert found, (line, process.stderr.read() if process.stderr else "")
    return found[0]


@pytest.fixture
def server() -> Iterator[subprocess.Popen[str]]:
    process = spawn("--port", "0", "--engine", "fake", "--drain-s", "5")
    yield process
    process.kill()
    process.communicate()


def config_from(*argv: str) -> Config:
    return cli.config_of(cli._parser().parse_args(["serve", *argv]))


def test_the_defaults_are_a_local_engine_on_loopback() -> None:
    config = config_from()
    assert (config.host, config.port, config.engine) == ("127.0.0.1", 8400, "local")
    assert config.model is None
    assert config.data.name == "conure"


def test_every_engine_option_reaches_the_configuration(tmp_path: Path) -> None:
    config = config_from(
        *(str(tmp_path), "--engines", "2", "--dtype", "bfloat16", "--device", "cuda:1"),
        *("--context-len", "64", "--num-blocks", "9", "--block-size", "8", "--threads", "3"),
        *("--step-tokens", "32", "--max-sequences", "4", "--data", str(tmp_path)),
    )
    assert config == Config(
        data=tmp_path,
        model=str(tmp_path),
        num_engines=2,
        dtype="bfloat16",
        device="cuda:1",
        context_len=64,
        num_blocks=9,
        block_size=8,
        threads=3,
        step_tokens=32,
        max_sequences=4,
    )


def test_dummy_weights_reach_the_engine_in_place_of_a_model(tmp_path: Path) -> None:
    config = config_from("--dummy-weights", str(tmp_path), "--dtype", "bfloat16")
    assert (config.model, config.dummy_weights) == (None, str(tmp_path))
    command = command_of(config)
    assert command.kind == "local"
    assert command.options == ("--dummy-weights", str(tmp_path), "--dtype", "bfloat16")


def test_batch_invariance_reaches_the_engine() -> None:
    assert command_of(config_from("--batch-invariant")).options == ("--batch-invariant",)
    assert command_of(config_from()).options == ()


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["bake"],
        ["serve", "--port", "x"],
        ["serve", "--port", "70000"],
        ["serve", "--host", "0.0.0.0"],
        ["serve", "--engine", "fake", "--script", "/nowhere/script.json"],
        ["serve", "/nowhere/model"],
        ["serve", "./nowhere"],
        ["serve", "--dummy-weights", "/nowhere/config.json"],
        ["serve", "--dummy-weights", "/", "somebody/model"],
        ["serve", "--functions", "no_such_module_at_all"],
        ["serve", "--functions", "json"],
        ["run", "/nowhere/program.json"],
    ],
)
def test_wrong_usage_is_exit_2_and_ends_in_one_line(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.strip().splitlines()[-1].startswith("conure")
    assert "Traceback" not in error


def test_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert re.fullmatch(r"conure \S+\n", capsys.readouterr().out)


def test_functions_come_from_a_module_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_functions.py").write_text("functions = {'twice': lambda x: 2 * x}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert cli.load_functions("my_functions")["twice"](3) == 6


def test_a_taken_port_is_exit_1_and_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = spawn("--engine", "fake", "--port", str(taken.getsockname()[1]))
        out, error = process.communicate(timeout=20)
    assert (process.returncode, out) == (1, "")
    assert re.fullmatch(r"conure: cannot listen on 127\.0\.0\.1:\d+: .+\n", error)


def test_a_service_that_cannot_start_is_exit_1_and_one_line() -> None:
    refuse = (
        "from conure.server.program.errors import ConureError; raise ConureError('x', 'no\\ndisk')"
    )
    process = spawn("--engine", "fake", "--port", "0", start=refuse)
    out, error = process.communicate(timeout=20)
    assert (process.returncode, out, error) == (1, "", "conure: no disk\n")


def test_the_ready_line_names_the_address_and_the_model(server: subprocess.Popen[str]) -> None:
    assert server.stdout is not None
    line = server.stdout.readline()
    assert re.fullmatch(
        r"conure \S+ listens on http://127\.0\.0\.1:\d+, model tiny \(a double\), "
        r"4096 tokens of context\n",
        line,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_streams_and_waiters_and_ends_with_0(
    server: subprocess.Popen[str], number: signal.Signals
) -> None:
    url = address(server)
    program = {"variables": {"x": {}}, "outputs": []}
    poll = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)
    with httpx.Client(base_url=url, timeout=20) as client, contextlib.closing(poll):
        poll.request("GET", "/healthz")
        assert poll.getresponse().read()
        path = client.post("/v1/programs", json={"program": program}).json()["url"]
        poll.request("GET", f"{path}/variables/x?wait_s=600")
        with client.stream("GET", f"{path}/events") as stream:
            lines = stream.iter_lines()
            assert next(lines) == "id: 1"
            started_at = time.monotonic()
            server.send_signal(number)
            assert "event: server.draining" in list(lines)
        assert poll.getresponse().status == 503
    _, error = server.communicate(timeout=20)
    assert server.returncode == 0, error
    assert time.monotonic() - started_at < 5
    assert "Traceback" not in error


def test_a_second_signal_ends_at_once() -> None:
    process = spawn(
        *("--port", "0", "--engine", "fake", "--drain-s", "60"),
        drain="print('draining', flush=True); await asyncio.sleep(60)",
    )
    address(process)
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert process.stdout.readline() == "draining\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == 128 + signal.SIGTERM


def test_a_drain_that_takes_too_long_is_cut_off() -> None:
    process = spawn(
        *("--port", "0", "--engine", "fake", "--drain-s", "0.2"),
        drain="await asyncio.sleep(60)",
    )
    address(process)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=10)
    assert process.returncode == 0, error


def test_a_signal_while_starting_ends_with_0() -> None:
    process = spawn(
        *("--port", "0", "--engine", "fake"),
        start="print('starting', flush=True); await asyncio.sleep(60)",
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "starting\n"
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=10)
    assert (process.returncode, error) == (0, "")


# --- conure run -------------------------------------------------------------------------


class Replay(httpx.BaseTransport):
    """A server that breaks the first stream of events."""

    def __init__(self, status: str) -> None:
        self.status = status
        self.submitted: dict[str, Any] = {}
        self.after: list[str] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            self.submitted = json.loads(request.content)
            return httpx.Response(202, json={"id": "p_1"})
        if not request.url.path.endswith("/events"):
            variable = {"status": "done", "value": {"a": 1}}
            body = {
                "id": "p_1",
                "status": self.status,
                "outputs": ["x"],
                "variables": {"x": variable},
            }
            return httpx.Response(200, json={**body, "receipt": {"calls": 3}})
        self.after.append(request.url.params["after"])
        if len(self.after) == 1:
            return httpx.Response(
                200, text='id: 4\nevent: node.finished\ndata: {"node": "n"}\n\n: x\n'
            )
        return httpx.Response(200, text="id: 5\nevent: program.finished\ndata: {}\n\n")


@pytest.mark.parametrize(("status", "code"), [("done", 0), ("failed", 1)])
def test_run_submits_follows_and_prints(
    status: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    replay = Replay(status)
    real = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **options: real(**options, transport=replay))
    file = tmp_path / "program.json"
    file.write_bytes(msgspec.json.encode({"nodes": [], "outputs": ["x"]}))
    (tmp_path / "text.txt").write_text("from a file")
    argv = ["run", str(file), "-p", "a=b=c", "-p", f"t=@{tmp_path}/text.txt", "-p", "n:=[1]"]
    assert main(argv) == code
    assert replay.submitted["inputs"] == {"a": "b=c", "t": "from a file", "n": [1]}
    assert replay.submitted["program"]["outputs"] == ["x"]
    assert replay.after == ["0", "4"]
    printed = capsys.readouterr()
    assert printed.out == '--- x\n{\n  "a": 1\n}\n--- receipt\n{\n  "calls": 3\n}\n'
    assert "n: finished" in printed.err


def test_run_without_a_server_is_exit_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "program.json"
    file.write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert main(["run", str(file), "--url", f"http://127.0.0.1:{port}"]) == 3
    error = capsys.readouterr().err
    assert error.startswith(f"conure: cannot reach http://127.0.0.1:{port}")
    assert error.endswith("is the server running (`conure serve`)?\n")


def test_run_finds_the_server_by_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CONURE_URL", raising=False)
    assert cli._parser().parse_args(["run", "f"]).url == "http://127.0.0.1:8400"
    monkeypatch.setenv("CONURE_URL", "http://here:1")
    assert cli._parser().parse_args(["run", "f"]).url == "http://here:1"
    assert cli._parser().parse_args(["run", "f", "--url", "http://there:2"]).url == "http://there:2"
    assert main(["run", "--help"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "the variable CONURE_URL, else http://127.0.0.1:8400" in told


ASK = {"id": "n", "op": "expr", "expr": {"var": "topic"}, "output": "x"}
PROGRAM = {"variables": {"topic": {}, "unread": {}}, "nodes": [ASK], "outputs": ["x"]}


class Silent(httpx.BaseTransport):
    """A server that accepts a program, and then what `then` does."""

    def __init__(self, then: Callable[[httpx.Request], httpx.Response]) -> None:
        self.then = then
        self.paths: list[str] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.paths.append(request.url.path)
        if request.method == "POST":
            return httpx.Response(202, json={"id": "p_1"})
        return self.then(request)


def run_against(
    transport: httpx.BaseTransport,
    submission: object,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *arguments: str,
) -> int:
    """What `conure run` answers when this is its server."""
    real = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **options: real(**options, transport=transport))
    file = folder / "program.json"
    file.write_bytes(msgspec.json.encode(submission))
    return main(["run", str(file), "--url", "http://there:2/", *arguments])


def interrupt(_: httpx.Request) -> httpx.Response:
    raise KeyboardInterrupt


def refuse(_: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


def test_run_refuses_a_program_whose_inputs_have_no_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Silent(interrupt)
    assert run_against(server, PROGRAM, tmp_path, monkeypatch) == 2
    assert server.paths == []
    error = capsys.readouterr().err
    assert "no value for the input `topic`; give it with -p NAME=VALUE" in error
    assert "unread" not in error


@pytest.mark.parametrize(
    "submission",
    [
        {"program": PROGRAM, "inputs": {"topic": None}},
        {"program": PROGRAM, "open": True},  # whoever appends or puts may bring it
        {"program": {"nodes": "the server says what is wrong with this"}},
    ],
)
def test_run_submits_what_may_have_all_it_needs(
    submission: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Silent(interrupt)
    run_against(server, submission, tmp_path, monkeypatch)
    assert server.paths[0] == "/v1/programs"


def test_run_that_is_interrupted_says_that_the_program_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run_against(Silent(interrupt), PROGRAM, tmp_path, monkeypatch, "-p", "topic=tea")
    assert code == 130
    assert capsys.readouterr().err == (
        "p_1: accepted\n"
        "it goes on as p_1; stop it with: curl -X DELETE http://there:2/v1/programs/p_1\n"
    )


@pytest.mark.parametrize(
    "then", [refuse, lambda _: httpx.Response(503), lambda _: httpx.Response(200)]
)
def test_run_that_loses_its_server_says_how_to_find_the_program(
    then: Callable[[httpx.Request], httpx.Response],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ("-p", "topic=tea", "--wait", "0.2")
    server = Silent(then)
    assert run_against(server, PROGRAM, tmp_path, monkeypatch, *arguments) == 3
    assert len(server.paths) >= 3
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("conure: lost http://there:2: no answer for 0.2 s")
    assert last.endswith(
        "kept as p_1; once the server is back: curl http://there:2/v1/programs/p_1"
    )


def test_run_does_not_wait_for_a_program_that_is_not_there_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = {"code": "program.not_found", "detail": "there is no program p_1"}
    server = Silent(lambda _: httpx.Response(404, json=problem))
    assert run_against(server, PROGRAM, tmp_path, monkeypatch, "-p", "topic=tea") == 1
    assert len(server.paths) == 2
    assert "program.not_found" in capsys.readouterr().err


def test_run_goes_on_after_a_restart_of_the_server(tmp_path: Path) -> None:
    serve = [sys.executable, "-m", "conure.server.cli", "serve", "--engine", "fake"]
    serve += ["--data", str(tmp_path / "data")]
    file = tmp_path / "program.json"
    step = {"id": "s", "op": "client", "name": "step", "output": "topic"}
    file.write_bytes(msgspec.json.encode({"nodes": [step, ASK], "outputs": ["x"]}))

    def start(*command: str) -> subprocess.Popen[str]:
        environ = {**os.environ, "PYTHONPATH": str(ROOT / ".src")}
        pipe = subprocess.PIPE
        return stack.enter_context(
            killed(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environ))
        )

    with contextlib.ExitStack() as stack:
        server = start(*serve, "--port", "0")
        url = address(server)
        run = start(*serve[:3], "run", str(file), "--url", url)
        assert run.stderr is not None
        path = read_until(run.stderr, r"PUT (\S+)")
        server.kill()
        read_until(run.stderr, r"(the connection broke)")
        assert address(start(*serve, "--port", url.rpartition(":")[2])) == url
        httpx.put(url + path, json={"value": "tea"}).raise_for_status()
        out, error = run.communicate(timeout=30)
    assert run.returncode == 0, error
    assert out.startswith("--- x\ntea\n")
    assert "client step" not in error, "an event came twice"


@contextlib.contextmanager
def killed(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that is gone when the block has ended."""
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read_until(lines: Iterable[str], pattern: str) -> str:
    """Group 1 of the first line in which a pattern is found."""
    said = []
    for line in lines:
        said.append(line)
        if found := re.search(pattern, line):
            return found[1]
    raise AssertionError(said)


@pytest.mark.parametrize("url", ["foo", "ftp://there", "http://", "http://there:port"])
def test_run_calls_an_address_that_is_none_wrong_usage(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "program.json"
    file.write_text("{}")
    assert main(["run", str(file), "--url", url]) == 2
    assert capsys.readouterr().err.startswith(f"conure: {url!r} is no URL of a server")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("x", "-p x: not NAME=VALUE"),
        ("x=@/nowhere/x", "-p x: cannot read /nowhere/x: No such file or directory"),
        ("x:={", "-p x:= takes JSON: "),
        ("x=@BINARY", "-p x: {BINARY} is not UTF-8 text"),
    ],
)
def test_run_names_the_input_that_is_wrong(
    text: str, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, binary = tmp_path / "program.json", tmp_path / "binary"
    file.write_text("{}")
    binary.write_bytes(b"\xff")
    assert main(["run", str(file), "-p", text.replace("BINARY", str(binary))]) == 2
    told = capsys.readouterr().err
    assert told.startswith("conure: " + error.replace("{BINARY}", str(binary)))
    assert told.count("\n") == 1


@pytest.mark.parametrize("content", ["[]", "{", '{"program": {}, "inputs": 3}'])
def test_run_refuses_files_that_are_no_programs(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "program.json"
    file.write_text(content)
    assert main(["run", str(file), "-p", "x=1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"conure: {file}: ")
    assert error.count("\n") == 1


def test_events_are_read_whatever_is_between_them() -> None:
    lines = [": ping", "", "event: a", "data: {}", "", "id: 3", "event: b", 'data: {"x": 1}', ""]
    assert list(read_events(iter(lines))) == [(None, "a", {}), (3, "b", {"x": 1})]
