"""Python in a sandbox: values, and hostile code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("pydantic_monty")

from conure.server.functions import sandboxed_python
from conure.server.functions.sandboxed_python import PythonSandbox
from conure.server.program.errors import RunError


@pytest.fixture(scope="module")
def sandbox() -> Iterator[PythonSandbox]:
    sandbox = PythonSandbox()
    yield sandbox
    sandbox.close()


def test_the_last_expression_is_the_value(sandbox: PythonSandbox) -> None:
    result = sandbox.run("print('hi')\nsum(xs) * 2", {"xs": [1, 2, 3]})
    assert result == {"value": 12, "printed": "hi\n"}


def test_calls_share_nothing(sandbox: PythonSandbox) -> None:
    sandbox.run("secret = 1", {})
    with pytest.raises(RunError, match="secret"):
        sandbox.run("secret", {})


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.system('true')",
        "open('/etc/passwd').read()",
        "import socket\nsocket.socket()",
        "().__class__.__bases__[0].__subclasses__()",
        "'x' * 10**9",
        "[0] * 10**9",
        "9 ** 9 ** 9",
        "def f():\n    return f()\nf()",
        "for _ in range(100_000):\n    print('x' * 100)",
        "1 +",
        "(" * 5_000,
    ],
)
def test_hostile_code_fails_and_the_sandbox_continues(sandbox: PythonSandbox, code: str) -> None:
    with pytest.raises(RunError) as caught:
        sandbox.run(code, {})
    assert caught.value.code.startswith("python.")
    assert sandbox.run("1 + 1", {})["value"] == 2


def test_an_endless_loop_is_stopped(
    sandbox: PythonSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandboxed_python, "MAX_SECONDS", 0.1)
    with pytest.raises(RunError):
        sandbox.run("while True:\n    pass", {})


def test_long_code_is_refused(sandbox: PythonSandbox) -> None:
    with pytest.raises(RunError) as caught:
        sandbox.run("#" * 70_000, {})
    assert caught.value.code == "python.too_large"
