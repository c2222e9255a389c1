"""`conure ps`, `conure logs`, `conure cancel`, `conure chat` and `conure bench` on a server."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import io
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from conure import Client
from conure.cli.commands import ps
from conure.cli.main import main

WAITING = {"name": "waits", "nodes": [{"id": "s", "op": "client", "name": "f", "output": "x"}]}


@pytest.fixture
def waiting(url: str) -> str:
    """Return the id of a program that waits for a client step, as its events say."""
    with Client(url) as client:
        run = client.submit({**WAITING, "outputs": ["x"]})
        next(event for event in run.events() if event.type == "client.requested")
        return run.id


def test_ps_lists_running_programs(
    url: str, waiting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ps", "--url", url]) == 0
    titles, first, *_ = capsys.readouterr().out.splitlines()
    assert titles.split() == ["PROGRAM", "NAME", "STATUS", "CREATED", "TOOK", "CALLS"]
    assert first.split()[:3] == [waiting, "waits", "running"]


def test_ended_programs_are_listed_on_request(
    url: str, waiting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cancel", waiting, "--url", url]) == 0
    assert capsys.readouterr().out == f"{waiting}: cancelled\n"
    assert main(["ps", "--url", url, "--json"]) == 0
    assert waiting not in capsys.readouterr().out
    for flags in (["-a"], ["--status", "cancelled"]):
        assert main(["ps", *flags, "--url", url, "--json"]) == 0
        listed = json.loads(capsys.readouterr().out)
        assert (listed[0]["id"], listed[0]["status"]) == (waiting, "cancelled")


def test_ps_says_when_there_are_more(
    url: str, waiting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Client(url) as client:
        newest = client.submit({**WAITING, "outputs": ["x"]}).id
    assert main(["ps", "-n", "1", "--url", url]) == 0
    printed = capsys.readouterr()
    assert newest in printed.out
    assert waiting not in printed.out
    assert "a larger -n lists more" in printed.err
    assert main(["ps", "-a", "-n", "100", "--url", url]) == 0
    assert capsys.readouterr().err == ""


def test_ps_reads_as_many_pages_as_it_needs(
    url: str, waiting: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(url) as client:
        newest = client.submit({**WAITING, "outputs": ["x"]}).id
    monkeypatch.setattr(ps, "PAGE_LIMIT", 1)
    assert main(["ps", "-n", "2", "--url", url, "--json"]) == 0
    assert [each["id"] for each in json.loads(capsys.readouterr().out)] == [newest, waiting]
    monkeypatch.undo()
    assert main(["ps", "-n", "500", "--url", url]) == 0


def test_logs_of_a_running_program_end(
    url: str, waiting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["logs", waiting, "--url", url, "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert events[0]["type"] == "program.accepted"
    assert events[-1]["type"] == "client.requested"


def test_followed_logs_end_with_the_program(
    url: str, waiting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["cancel", waiting, "--url", url])
    capsys.readouterr()
    assert main(["logs", "-f", waiting, "--url", url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "program.accepted" in lines[0]
    assert "program.finished" in lines[-1]


def test_procedures_are_stored_listed_and_moved(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    references = []
    for number, text in enumerate(("Sum up: ", "In one line: ")):
        file = tmp_path / f"sum{number}.py"
        file.write_text(f"text: str\nreturn gen(f'{text}{{text}}', max_tokens=8)")
        assert main(["procedures", "put", "sum", str(file), "--url", url]) == 0
        references.append(capsys.readouterr().out.strip())
    first, second = (each.partition("@")[2] for each in references)
    assert main(["procedures", "alias", "sum", "default", first, "--url", url]) == 0
    capsys.readouterr()
    assert main(["procedures", "list", "--url", url]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert sorted(rows) == sorted([["sum", first, "default"], ["sum", second, "-"]])
    assert main(["procedures", "list", "--json", "--url", url]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {each["version"]: each.get("aliases") for each in listed} == {
        first: ["default"],
        second: None,
    }
    assert main(["procedures", "show", "sum", "--url", url]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["version"], list(shown["parameters"]), list(shown["results"])) == (
        first,
        ["text"],
        ["result"],
    )
    assert main(["procedures", "show", "none", "--url", url]) == 1
    assert "procedure.not_found" in capsys.readouterr().err


def test_versions_and_aliases_of_procedures_are_removed(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "old.py"
    file.write_text("return gen('a', max_tokens=2)")
    assert main(["procedures", "put", "old", str(file), "--alias", "a", "--url", url]) == 0
    reference = capsys.readouterr().out.strip()
    assert main(["procedures", "remove", reference, "--url", url]) == 1
    assert "procedure.in_use" in capsys.readouterr().err
    assert main(["procedures", "remove", "old:a", "--url", url]) == 0
    assert main(["procedures", "remove", reference, "--url", url]) == 0
    assert capsys.readouterr().out.splitlines() == ["removed old:a", f"removed {reference}"]
    assert main(["procedures", "show", reference, "--url", url]) == 1


def test_trace_prints_spans_or_examples(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, trace = tmp_path / "tea.py", tmp_path / "trace.jsonl"
    file.write_text("yield gen('Tea is ')")
    assert main(["run", str(file), "--trace", str(trace), "--url", url, "--json"]) == 0
    program = json.loads(capsys.readouterr().out)["id"]
    assert main(["trace", program, "--url", url]) == 0
    printed = capsys.readouterr().out
    assert printed == trace.read_text()
    root, call = map(json.loads, printed.splitlines())
    assert root["context"]["span_id"] == call["parent_id"]
    assert main(["trace", program, "--examples", "--token-ids", "--url", url]) == 0
    example = json.loads(capsys.readouterr().out)
    assert example["prompt"] == "Tea is "
    assert bytes(example["completion_token_ids"]).decode() == example["completion"]


def test_trace_of_an_untraced_program_names_the_option(
    url: str, waiting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", waiting, "--url", url]) == 1
    assert "trace.not_recorded" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["logs", "cancel"])
def test_unknown_program_exits_1(
    command: str, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "p_none", "--url", url]) == 1
    error = capsys.readouterr().err
    assert error == "conure: program.not_found: there is no program p_none\n"


@pytest.mark.parametrize("num_digits", [6, 24])
@pytest.mark.parametrize("marker", ["", "p_"])
def test_programs_are_named_by_the_first_digits_of_their_ids(
    num_digits: int, marker: str, url: str, waiting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    word = marker + waiting.removeprefix("p_")[:num_digits]
    assert main(["logs", word, "--url", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["program"] == waiting
    assert main(["explain", word, "--url", url, "--as", "json"]) == 0
    assert json.loads(capsys.readouterr().out)
    assert main(["trace", word, "--url", url]) == 1
    assert waiting in capsys.readouterr().err
    assert main(["cancel", word, "--url", url]) == 0
    assert capsys.readouterr().out == f"{waiting}: cancelled\n"


@pytest.fixture
def twins(url: str, request: pytest.FixtureRequest) -> tuple[str, str]:
    """Return two waiting programs whose ids differ in the eighth digit."""
    digits = hashlib.sha256(request.node.name.encode()).hexdigest()[:7]
    program = {**WAITING, "outputs": ["x"]}
    with Client(url) as client:
        first, second = (
            client.submit({"program": program, "id": f"p_{digits}{eighth}{0:016}"})
            for eighth in "ab"
        )
    return first.id, second.id


def test_explain_of_json_in_the_command_line_is_one_error_line(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", '{"nodes": []}' * 100, "--url", url]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("command", ["logs", "explain", "trace", "cancel"])
def test_ambiguous_digits_are_refused_in_one_line(
    command: str, url: str, twins: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    digits = twins[0][2:9]
    assert main([command, digits, "--url", url]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert "the ids of several programs begin with" in printed.err
    assert all(id_ in printed.err for id_ in twins)
    assert main(["cancel", twins[0][:10], "--url", url]) == 0
    assert capsys.readouterr().out == f"{twins[0]}: cancelled\n"


def test_nothing_is_cancelled_if_one_id_is_ambiguous(
    url: str, waiting: str, twins: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cancel", waiting, twins[0][:9], "--url", url]) == 2
    with Client(url) as client:
        assert client.attach(waiting).status().status == "running"


def test_cancel_prints_json_on_request(
    url: str, waiting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cancel", waiting, "--json", "--url", url]) == 0
    assert json.loads(capsys.readouterr().out) == [{"id": waiting, "status": "cancelled"}]


def test_cancel_reports_a_missing_program_and_cancels_the_others(
    url: str, waiting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cancel", "p_none", waiting, "--url", url]) == 1
    printed = capsys.readouterr()
    assert printed.out == f"{waiting}: cancelled\n"
    assert "there is no program p_none" in printed.err


def test_chat_answers_one_message(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "How are you?", "--url", url, "--max-tokens", "8"]) == 0
    assert len(capsys.readouterr().out.split()) > 1


def test_chat_prints_one_json_line_per_answer(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\nHow are you?\n"))
    assert main(["chat", "--json", "--url", url, "--max-tokens", "4"]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["finish_reason"] for answer in answers] == ["length", "length"]
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [4, 4]
    assert all(answer["content"] for answer in answers)


def test_chat_says_once_what_a_special_model_is_for(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\nHow are you?\n"))
    assert main(["chat", "--url", url, "--max-tokens", "4"]) == 0
    printed = capsys.readouterr()
    assert printed.err.count("`conure serve Qwen/") == 1
    assert "conure serve" not in printed.out
    assert main(["chat", "How are you?", "--url", url, "--max-tokens", "4"]) == 0
    assert "conure serve" not in capsys.readouterr().err


@pytest.mark.parametrize("temperature", ["nan", "inf"])
def test_chat_refuses_a_temperature_that_is_not_finite(
    temperature: str, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", "Hi", "--temperature", temperature, "--url", url]) == 2
    error = capsys.readouterr().err
    assert error == f"conure: --temperature is {temperature}; it must be a finite number\n"


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_chat_refuses_a_line_that_is_not_utf8(
    errors: str, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8", errors=errors)
    monkeypatch.setattr(sys, "stdin", stdin)
    assert main(["chat", "--url", url]) == 2
    assert capsys.readouterr().err.endswith("conure: a line of stdin is not UTF-8 text\n")


def test_chat_reports_a_refusal(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "Hi", "--model", "none", "--url", url]) == 1
    assert capsys.readouterr().err.startswith("conure: model 'none' does not exist")


def test_bench_prints_one_line_per_program(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--rounds", "1", "--tokens", "2", "--url", url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "PROGRAM",
        "one call",
        "chain of 8",
        "16 sharing a text",
    ]


def test_missing_server_exits_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["ps"], ["logs", "p"], ["cancel", "p"], ["chat", "Hi"], ["bench"]):
        assert main([*argv, "--url", "http://127.0.0.1:1"]) == 3
        error = capsys.readouterr().err
        assert "is the server running (`conure serve`)" in error
        assert error.count("\n") == 1


@contextlib.contextmanager
def web_server(status: int) -> Iterator[str]:
    """Run a server in a thread that answers every request with a page."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = b"<!DOCTYPE html><title>Welcome</title>"
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def do_POST(self) -> None:
            self.do_GET()

        def do_DELETE(self) -> None:
            self.do_GET()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - inherited
            """Print nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("status", [200, 404])
def test_a_server_that_is_not_conure_is_named(
    status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = (["ps"], ["logs", "p"], ["cancel", "p"], ["chat", "Hi"], ["run", "--example"])
    with web_server(status) as address:
        for argv in (*commands, ["bench"], ["procedures", "list"], ["trace", "p"]):
            assert main([*argv, "--url", address]) == 1
            error = capsys.readouterr().err.splitlines()[-1]
            assert f"{address}/v1/" in error
            assert f"answered with status {status}, text/html" in error
            assert "is this a Conure server?" in error
            assert "<" not in error
