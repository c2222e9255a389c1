"""The engine process, controlled by frames over the inherited socket."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from conure.engine import framing, protocol
from conure.engine.framing import FrameSocket
from conure.engine.runner.openmp import NUM_SPINS
from conure.engine.testing.scripted_runner import default_text

from .constraint_harness import lark, schema


class EngineProcess:
    """A running engine process and the parent's end of its socket."""

    def __init__(self, **options: object) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "conure.engine", "--fd", str(theirs.fileno())]
            config = msgspec.json.encode({"engine": "fake", **options}).decode()
            self.process = subprocess.Popen(
                [*command, "--epoch", "7", "--config", config],
                pass_fds=(theirs.fileno(),),
                stderr=subprocess.PIPE,
                text=True,
            )
        self.socket = ours
        self.peer = FrameSocket(ours)
        self._frames: list[bytes] = []

    def next_frame(self) -> bytes | None:
        if not self._frames:
            received = self.peer.receive(wait=True)
            if received is None:
                return None
            self._frames = received
        return self._frames.pop(0)

    def hello(self) -> protocol.Hello:
        payload = self.next_frame()
        assert payload is not None
        return framing.decode_hello(payload)

    def send(self, *commands: protocol.Command) -> None:
        assert self.peer.send(protocol.Commands(list(commands)))

    def reports_until(self, kind: type[protocol.Report]) -> list[protocol.Report]:
        reports: list[protocol.Report] = []
        while not any(isinstance(report, kind) for report in reports):
            payload = self.next_frame()
            assert payload is not None
            step = framing.decode_step(payload)
            assert step.epoch == 7
            reports += step.reports
        return reports

    def end(self) -> tuple[int, str]:
        """Close the socket. Return the exit code and the process's error output."""
        self.socket.close()
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors


@pytest.fixture
def child(request: pytest.FixtureRequest) -> Iterator[EngineProcess]:
    started = EngineProcess(**getattr(request, "param", {}))
    yield started
    started.process.kill()
    started.end()


def test_engine_sends_hello_answers_and_exits_on_close(child: EngineProcess) -> None:
    hello = child.hello()
    assert (hello.epoch, hello.limits.context_len) == (7, 8192)
    child.send(
        protocol.Fill(1, list(b"hello")),
        protocol.GenerateCommand(1, protocol.SamplingParams(max_tokens=50)),
    )
    reports = child.reports_until(protocol.Finished)
    text = default_text(list(b"hello"))
    assert reports[0] == protocol.Filled(1, 5, 0, 0)
    assert "".join(r.text for r in reports if isinstance(r, protocol.Tokens)) == text
    assert reports[-1] == protocol.Finished(1, "stop", text, len(text), "", len(text) + 1)
    child.send(protocol.Free(1), protocol.Status(3))
    (status,) = child.reports_until(protocol.StatusReport)
    assert isinstance(status, protocol.StatusReport)
    assert (status.num_free, status.num_contexts) == (status.num_blocks, 0)
    assert child.end() == (0, "")


@pytest.mark.parametrize(
    "child",
    [{"context_len": 64, "num_blocks": 9, "block_size": 8}],
    indirect=True,
)
def test_hello_contains_limits_from_arguments(child: EngineProcess) -> None:
    limits = child.hello().limits
    assert (limits.context_len, limits.num_blocks, limits.block_size) == (64, 9, 8)
    assert limits.step_tokens == 2048


@pytest.mark.parametrize("child", [{"time_per_output_token": 0.01}], indirect=True)
def test_abort_takes_effect_between_steps(child: EngineProcess) -> None:
    child.hello()
    child.send(
        protocol.Fill(1, [1]),
        protocol.GenerateCommand(1, protocol.SamplingParams(max_tokens=8000, ignore_eos=True)),
    )
    child.reports_until(protocol.Tokens)
    child.send(protocol.Abort(1), protocol.Status(1))
    status = child.reports_until(protocol.StatusReport)[-1]
    assert isinstance(status, protocol.StatusReport)
    assert status.num_contexts == 0


def test_engine_ignores_sigint_and_exits_on_sigterm(child: EngineProcess) -> None:
    child.hello()
    os.kill(child.process.pid, signal.SIGINT)
    child.send(protocol.Ping(1))
    assert child.reports_until(protocol.Pong) == [protocol.Pong(1)]
    os.kill(child.process.pid, signal.SIGTERM)
    assert child.next_frame() is None
    assert child.end() == (0, "")


def test_missing_script_exits_with_one_line(tmp_path: Path) -> None:
    child = EngineProcess(script=str(tmp_path / "none.json"))
    assert child.next_frame() is None
    code, errors = child.end()
    assert code == 3
    assert errors.startswith("conure-engine: cannot read script ")
    assert errors.count("\n") == 1


def test_script_defines_answers(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text('[{"match": "ping", "text": "pong"}]')
    child = EngineProcess(script=str(path))
    child.hello()
    child.send(
        protocol.Fill(1, list(b"a ping")),
        protocol.GenerateCommand(1, protocol.SamplingParams(max_tokens=50)),
    )
    finished = child.reports_until(protocol.Finished)[-1]
    assert isinstance(finished, protocol.Finished)
    assert finished.text == "pong"
    assert child.end()[0] == 0


def test_invalid_arguments_exit_with_code_2() -> None:
    child = EngineProcess(num_blocks=0)
    code, errors = child.end()
    assert code == 2
    assert "num_blocks is 0; it must be between 1 and" in errors


def test_fake_engine_does_not_import_torch() -> None:
    code = "import sys, conure.engine.__main__; print(sorted({'torch', 'numpy'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_engine_survives_hostile_grammars(child: EngineProcess) -> None:
    child.hello()
    memory = schema({"type": "integer", "multipleOf": 999_983})
    nested = lark("start: " + "(" * 30_000 + '"a"' + ")" * 30_000)
    child.send(
        *[protocol.Fill(n, [1, 2, 3]) for n in (1, 2, 3)],
        protocol.GenerateCommand(1, protocol.SamplingParams(max_tokens=50), constraint=memory),
        protocol.GenerateCommand(2, protocol.SamplingParams(max_tokens=50), constraint=nested),
        protocol.GenerateCommand(3, protocol.SamplingParams(max_tokens=50)),
        protocol.Ping(1),
    )
    # The call without a grammar finishes first.
    assert child.reports_until(protocol.Finished)[-1].context == 3  # type: ignore[union-attr]
    codes: dict[int, str] = {}
    while len(codes) < 2:
        for report in child.reports_until(protocol.Failed):
            if isinstance(report, protocol.Failed):
                codes[report.context] = report.code
    last = 3
    while codes[1] == "constraint.unavailable":  # the machine has too much other work
        last += 1
        command = protocol.GenerateCommand(
            last, protocol.SamplingParams(max_tokens=50), constraint=memory
        )
        child.send(protocol.Fill(last, [1, 2, 3]), command)
        report = child.reports_until(protocol.Failed)[-1]
        assert isinstance(report, protocol.Failed)
        codes[1] = report.code
    assert codes == {1: "constraint.too_complex", 2: "constraint.invalid"}
    last += 1
    child.send(
        protocol.Fill(last, [1]),
        protocol.GenerateCommand(
            last, protocol.SamplingParams(max_tokens=50), constraint=lark('start: "yes"')
        ),
    )
    finished = child.reports_until(protocol.Finished)[-1]
    assert isinstance(finished, protocol.Finished)
    assert (finished.text, finished.num_forced) == ("yes", 3)
    assert child.end()[0] == 0


def test_threads_of_an_engine_spin_briefly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_DISPLAY_ENV", "VERBOSE")
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    code, errors = EngineProcess(engine="local", model=str(tmp_path)).end()
    assert code == 3, "the folder contains no model"
    assert f"GOMP_SPINCOUNT = '{NUM_SPINS}'" in errors
