"""Tests of the cache folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from conure.cache_folder import cache_folder


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"XDG_CACHE_HOME": "/caches", "HOME": "/home/a"}, "/caches/conure"),
        ({"XDG_CACHE_HOME": "caches", "HOME": "/home/a"}, "/home/a/.cache/conure"),
        ({"XDG_CACHE_HOME": "", "HOME": "/home/a"}, "/home/a/.cache/conure"),
    ],
)
def test_cache_folder_follows_the_environment(environ: dict[str, str], folder: str) -> None:
    assert cache_folder(environ) == Path(folder)


def test_error_without_a_home_names_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(FileNotFoundError, match="XDG_CACHE_HOME"):
        cache_folder({})
