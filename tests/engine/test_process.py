"""An engine as a process, spoken to in frames over the socket that it inherits."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conure.engine import api, frames
from conure.engine.fake import default_text
from conure.engine.frames import FrameSocket

from .constrained import lark, schema


class Child:
    """A started engine and our end of its socket."""

    def __init__(self, *arguments: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "conure.engine", "--fd", str(theirs.fileno())]
            self.process = subprocess.Popen(
                [*command, "--epoch", "7", *arguments],
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

    def hello(self) -> api.Hello:
        payload = self.next_frame()
        assert payload is not None
        return frames.decode_hello(payload)

    def send(self, *commands: api.Command) -> None:
        assert self.peer.send(api.Commands(list(commands)))

    def reports_until(self, kind: type[api.Report]) -> list[api.Report]:
        reports: list[api.Report] = []
        while not any(isinstance(report, kind) for report in reports):
            payload = self.next_frame()
            assert payload is not None
            step = frames.decode_step(payload)
            assert step.epoch == 7
            reports += step.reports
        return reports

    def end(self) -> tuple[int, str]:
        """Close our end; return exit code and what the process wrote."""
        self.socket.close()
        _, errors = self.process.communicate(timeout=20)
        return self.process.returncode, errors


@pytest.fixture
def child(request: pytest.FixtureRequest) -> Iterator[Child]:
    started = Child(*getattr(request, "param", ("fake",)))
    yield started
    started.process.kill()
    started.end()


def test_an_engine_greets_answers_and_ends_when_its_peer_closes(child: Child) -> None:
    hello = child.hello()
    assert (hello.epoch, hello.limits.context_len) == (7, 8192)
    child.send(api.Fill(1, list(b"hello")), api.Generate(1, api.Sampling(max_tokens=50)))
    reports = child.reports_until(api.Finished)
    text = default_text(list(b"hello"))
    assert reports[0] == api.Filled(1, 5, 0, 0)
    assert "".join(r.text for r in reports if isinstance(r, api.Tokens)) == text
    assert reports[-1] == api.Finished(1, "stop", text, len(text), "", len(text) + 1)
    child.send(api.Free(1), api.Status(3))
    (status,) = child.reports_until(api.StatusReport)
    assert isinstance(status, api.StatusReport)
    assert (status.num_free, status.num_contexts) == (status.num_blocks, 0)
    assert child.end() == (0, "")


@pytest.mark.parametrize(
    "child",
    [("fake", "--context-len", "64", "--num-blocks", "9", "--block-size", "8")],
    indirect=True,
)
def test_limits_are_arguments_and_are_in_the_hello(child: Child) -> None:
    limits = child.hello().limits
    assert (limits.context_len, limits.num_blocks, limits.block_size) == (64, 9, 8)
    assert limits.step_tokens == 2048


@pytest.mark.parametrize("child", [("fake", "--time-per-output-token", "0.01")], indirect=True)
def test_an_abort_is_obeyed_between_two_steps(child: Child) -> None:
    child.hello()
    child.send(api.Fill(1, [1]), api.Generate(1, api.Sampling(max_tokens=8000, ignore_eos=True)))
    child.reports_until(api.Tokens)
    child.send(api.Abort(1), api.Status(1))
    status = child.reports_until(api.StatusReport)[-1]
    assert isinstance(status, api.StatusReport)
    assert status.num_contexts == 0


def test_ctrl_c_is_left_to_the_server_and_sigterm_ends_it(child: Child) -> None:
    child.hello()
    os.kill(child.process.pid, signal.SIGINT)
    child.send(api.Ping(1))
    assert child.reports_until(api.Pong) == [api.Pong(1)]
    os.kill(child.process.pid, signal.SIGTERM)
    assert child.next_frame() is None
    assert child.end() == (0, "")


def test_a_script_that_is_missing_is_one_line_and_nothing_is_sent(tmp_path: Path) -> None:
    child = Child("fake", "--script", str(tmp_path / "none.json"))
    assert child.next_frame() is None
    code, errors = child.end()
    assert code == 3
    assert errors.startswith("conure-engine: script ")
    assert errors.count("\n") == 1


def test_a_script_answers(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text('[{"match": "ping", "text": "pong"}]')
    child = Child("fake", "--script", str(path))
    child.hello()
    child.send(api.Fill(1, list(b"a ping")), api.Generate(1, api.Sampling(max_tokens=50)))
    finished = child.reports_until(api.Finished)[-1]
    assert isinstance(finished, api.Finished)
    assert finished.text == "pong"
    assert child.end()[0] == 0


def test_wrong_arguments_end_it_with_code_2() -> None:
    child = Child("fake", "--num-blocks", "0")
    code, errors = child.end()
    assert code == 2
    assert "0 is less than 1" in errors


def test_the_fake_engine_loads_no_torch() -> None:
    code = "import sys, conure.engine.__main__; print(sorted({'torch', 'numpy'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_hostile_grammars_neither_stall_nor_end_an_engine(child: Child) -> None:
    child.hello()
    memory = schema({"type": "integer", "multipleOf": 999_983})
    nested = lark("start: " + "(" * 30_000 + '"a"' + ")" * 30_000)
    child.send(
        *[api.Fill(n, [1, 2, 3]) for n in (1, 2, 3)],
        api.Generate(1, api.Sampling(max_tokens=50), constraint=memory),
        api.Generate(2, api.Sampling(max_tokens=50), constraint=nested),
        api.Generate(3, api.Sampling(max_tokens=50)),
        api.Ping(1),
    )
    # Whoever has no grammar is done before the first of the others.
    assert child.reports_until(api.Finished)[-1].context == 3  # type: ignore[union-attr]
    codes: dict[int, str] = {}
    while len(codes) < 2:
        for report in child.reports_until(api.Failed):
            if isinstance(report, api.Failed):
                codes[report.context] = report.code
    assert codes == {1: "constraint.too_complex", 2: "constraint.invalid"}
    child.send(
        api.Fill(4, [1]),
        api.Generate(4, api.Sampling(max_tokens=50), constraint=lark('start: "yes"')),
    )
    finished = child.reports_until(api.Finished)[-1]
    assert isinstance(finished, api.Finished)
    assert (finished.text, finished.num_forced) == ("yes", 3)
    assert child.end()[0] == 0
