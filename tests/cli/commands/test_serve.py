"""`conure serve`: flags, one-line errors, the banner, and signals."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from conure.cli.commands import serve as command
from conure.cli.main import build_parser, main
from conure.engine.config import EngineConfig
from conure.engine.protocol import ModelPurpose, StatusReport
from conure.server.config import Config
from conure.server.engines.command_line import EngineCommandLine
from conure.server.server_process import banner
from conure.server.service import EngineInfo, ModelInfo

ROOT = Path(__file__).parents[3]
EXIT_S = 60.0
"""Time within which a process surely exits, also on a busy machine."""

SERVER = """
import asyncio, sys
sys.path.insert(0, {root!r})
from conure.cli.main import main
from conure.server import server_process
from conure.server.app import create_app
from tests.server.service_double import ScriptedService

class Service(ScriptedService):
    async def start(self):
        {start}
    async def drain(self):
        {drain}

server_process.create_app = lambda config, functions: create_app(config, service=Service())
sys.exit(main({argv!r}))
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
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"http://[^\s,;]+", line)
    assert found, (line, process.stderr.read() if process.stderr else "")
    return found[0]


@pytest.fixture
def server() -> Iterator[subprocess.Popen[str]]:
    process = spawn("--port", "0", "--engine", "fake", "--drain-s", "600")
    yield process
    process.kill()
    process.communicate()


def config_from(*argv: str) -> Config:
    return command.config_of(build_parser("serve").parse_args(["serve", *argv]))


def engine_options(config: Config) -> EngineConfig:
    """Return the options in the command line of an engine."""
    *_, flag, options = EngineCommandLine(config).argv(3, 4, 7)
    assert flag == "--config"
    return EngineConfig.from_json(options)


def test_defaults_are_local_engine_on_loopback() -> None:
    config = config_from()
    assert (config.host, config.port, config.engine) == ("127.0.0.1", 8400, "local")
    assert config.model is None
    assert config.data.name == "conure"


def test_engine_options_reach_the_configuration(tmp_path: Path) -> None:
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


def test_dummy_weights_reach_the_engine(tmp_path: Path) -> None:
    config = config_from("--dummy-weights", str(tmp_path), "--dtype", "bfloat16")
    assert (config.model, config.dummy_weights) == (None, str(tmp_path))
    options = engine_options(config)
    assert options == EngineConfig(dummy_weights=str(tmp_path), dtype="bfloat16")


def test_batch_invariance_reaches_the_engine() -> None:
    assert engine_options(config_from("--batch-invariant")) == EngineConfig(batch_invariant=True)
    assert engine_options(config_from()) == EngineConfig()


@pytest.mark.parametrize(
    "argv",
    [
        ["serve", "--port", "x"],
        ["serve", "--data", ""],
        ["serve", "--port", "70000"],
        ["serve", "--host", "0.0.0.0"],
        ["serve", "--engine", "fake", "--script", "/nowhere/script.json"],
        ["serve", "/nowhere/model"],
        ["serve", "./nowhere"],
        ["serve", "~no_such_user/model"],
        ["serve", "--dummy-weights", "/nowhere/config.json"],
        ["serve", "--dummy-weights", "/", "somebody/model"],
        ["serve", "--functions", "no_such_module_at_all"],
        ["serve", "--functions", "json"],
        ["serve", "--functions", "./functions.py"],
        ["serve", "--functions", ".functions"],
    ],
)
def test_wrong_usage_exits_2_with_one_line(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.strip().splitlines()[-1].startswith("conure")
    assert "Traceback" not in error


def test_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert re.fullmatch(r"conure \S+\n", capsys.readouterr().out)


def test_functions_load_from_a_user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_functions.py").write_text("functions = {'twice': lambda x: 2 * x}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert command.load_functions("my_functions")["twice"](3) == 6


def test_used_port_exits_1_with_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        process = spawn("--engine", "fake", "--port", str(taken.getsockname()[1]))
        out, error = process.communicate(timeout=EXIT_S)
    assert (process.returncode, out) == (1, "")
    assert re.fullmatch(r"conure: cannot listen on 127\.0\.0\.1:\d+: .+\n", error)
    assert "--port 0" in error


def test_port_of_a_conure_server_is_named(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--engine", "fake", "--port", url.rpartition(":")[2]]) == 1
    error = capsys.readouterr().err
    assert re.fullmatch(
        r"conure: cannot listen on .+ in use by a Conure server; --port .+\n", error
    )


def test_failing_service_exits_1_with_one_line() -> None:
    refuse = (
        "from conure.server.program.errors import ConureError; raise ConureError('x', 'no\\ndisk')"
    )
    process = spawn("--engine", "fake", "--port", "0", start=refuse)
    out, error = process.communicate(timeout=EXIT_S)
    assert (process.returncode, out, error) == (1, "", "conure: no disk\n")


def test_banner_names_address_model_and_cache(server: subprocess.Popen[str]) -> None:
    assert server.stdout is not None
    lines = [server.stdout.readline() for _ in range(7)]
    assert re.fullmatch(r"conure \S+ listens on http://127\.0\.0\.1:\d+\n", lines[0])
    assert lines[2].split()[:2] == ["Its", "answers"]
    del lines[2]
    assert [line.split(maxsplit=1) for line in lines[1:4]] == [
        ["model", "tiny (a double), 4,096 tokens of context\n"],
        ["model", "org/other, 128 tokens of context\n"],
        ["engine-0", "10 blocks of KV cache\n"],
    ]
    assert lines[4].split()[0] == "data"
    assert re.search(r"next +conure run --example --url http://127", lines[5])


def banner_of(model: ModelInfo, num_programs: int = 0) -> str:
    report = StatusReport(0, 10, 4, 5, 1, 2, *range(6))
    engine = EngineInfo(id="engine-0", epoch=7, model=model.id, report=report)
    return banner(
        "http://127.0.0.1:8400", [model], [engine], Config(data=Path("data")), num_programs
    )


@pytest.mark.parametrize(
    ("num_programs", "sentence"),
    [(1, "1 unfinished program continues"), (1_200, "1,200 unfinished programs continue")],
)
def test_banner_says_how_many_programs_continue(num_programs: int, sentence: str) -> None:
    model = ModelInfo(id="any", context_len=1024)
    assert sentence in banner_of(model, num_programs)
    assert "unfinished" not in banner_of(model)


@pytest.mark.parametrize("purpose", ["demonstration", "test"])
def test_banner_says_what_a_special_model_is_for(purpose: ModelPurpose) -> None:
    special = ModelInfo(id="any", context_len=1024, purpose=purpose)
    assert special.notice in banner_of(special)
    assert "conure serve Qwen/" in special.notice
    ordinary = ModelInfo(id="builtin", context_len=1024)
    assert ordinary.notice == ""
    assert "conure serve" not in banner_of(ordinary)


def test_banner_says_that_a_model_has_no_chat_template() -> None:
    mute = ModelInfo(id="any", context_len=1024, has_chat_template=False)
    (line,) = [line for line in banner_of(mute).splitlines() if "chat template" in line]
    assert line.split("  ")[-1] == mute.notice
    assert "chat template" not in banner_of(ModelInfo(id="any", context_len=1024))


def test_banner_on_the_default_port_shows_the_shortest_command() -> None:
    assert "conure run --example, or" in banner_of(ModelInfo(id="any", context_len=1024))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_drains_streams_and_exits_0(
    server: subprocess.Popen[str], number: signal.Signals
) -> None:
    url = address(server)
    program = {"variables": {"x": {}}, "outputs": []}
    poll = http.client.HTTPConnection(url.removeprefix("http://"), timeout=EXIT_S)
    with httpx.Client(base_url=url, timeout=EXIT_S) as client, contextlib.closing(poll):
        poll.request("GET", "/healthz")
        assert poll.getresponse().read()
        path = client.post("/v1/programs", json={"program": program}).json()["url"]
        poll.request("GET", f"{path}/variables/x?wait_s=600")
        with client.stream("GET", f"{path}/events") as stream:
            lines = stream.iter_lines()
            assert next(lines) == "id: 1"
            server.send_signal(number)
            assert "event: server.draining" in list(lines)
        assert poll.getresponse().status == 503
    _, error = server.communicate(timeout=EXIT_S)
    assert server.returncode == 0, error
    assert "Traceback" not in error


def test_second_signal_exits_immediately() -> None:
    process = spawn(
        *("--port", "0", "--engine", "fake", "--drain-s", "600"),
        drain="print('draining', flush=True); await asyncio.sleep(3600)",
    )
    address(process)
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert "draining\n" in iter(process.stdout.readline, "")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=EXIT_S)
    assert process.returncode == 128 + signal.SIGTERM


def test_long_drain_is_cut_off() -> None:
    process = spawn(
        *("--port", "0", "--engine", "fake", "--drain-s", "0.2"),
        drain="await asyncio.sleep(3600)",
    )
    address(process)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=EXIT_S)
    assert process.returncode == 0, error


def test_signal_during_startup_exits_0() -> None:
    process = spawn(
        *("--port", "0", "--engine", "fake"),
        start="print('starting', flush=True); await asyncio.sleep(3600)",
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "starting\n"
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=EXIT_S)
    assert (process.returncode, error) == (0, "")


def test_the_wait_for_a_model_is_explained(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "config.json").write_text("{}")
    for name in ("model.safetensors", "consolidated.safetensors"):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, 100_000_000)
    lines = {
        model: command.loading(Config(data=tmp_path, model=model))
        for model in (None, str(tmp_path), str(empty), "org/name")
    }
    random = command.loading(Config(data=tmp_path, dummy_weights=str(tmp_path)))
    assert random == f"Making random weights for {tmp_path} ..."
    assert lines == {
        None: "Loading the built-in model ...",
        str(tmp_path): f"Loading {tmp_path}, 0.1 GB ...",
        str(empty): f"Loading {empty} ...",
        "org/name": (
            "Loading org/name; the first start downloads it from the Hugging Face Hub ..."
        ),
    }
