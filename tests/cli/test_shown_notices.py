"""Each notice is shown once."""

from __future__ import annotations

from pathlib import Path

import pytest

from conure.cli.shown_notices import is_first_time


def test_a_notice_is_new_once(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path / "new" / "cache")}
    assert [is_first_time(each, environ) for each in ("a", "a", "b", "a", "b")] == [
        *(True, False),
        *(True, False, False),
    ]


@pytest.mark.parametrize("content", [b"\xff", None])
def test_a_notice_that_cannot_be_remembered_is_shown(content: bytes | None, tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    file = tmp_path / "conure" / "notices"
    if content is None:
        file.mkdir(parents=True)
    else:
        file.parent.mkdir()
        file.write_bytes(content)
    assert is_first_time("a", environ)
    assert is_first_time("a", environ)


def test_the_home_folder_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert is_first_time("a", {"XDG_CACHE_HOME": "relative"})
    assert (tmp_path / ".cache" / "conure" / "notices").read_text("utf-8") == "a\n"
