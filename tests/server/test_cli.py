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
from collections.abc import Iterator
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
    assert capsys.readouterr().err.startswith(f"conure: cannot reach http://127.0.0.1:{port}")


@pytest.mark.parametrize("content", ["[]", "{", '{"inputs": 3}'])
def test_run_refuses_files_that_are_no_programs(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "program.json"
    file.write_text(content)
    arguments = ["run", str(file), "-p", "x"]
    assert main(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_events_are_read_whatever_is_between_them() -> None:
    lines = [": ping", "", "event: a", "data: {}", "", "id: 3", "event: b", 'data: {"x": 1}', ""]
    assert list(read_events(iter(lines))) == [(None, "a", {}), (3, "b", {"x": 1})]
