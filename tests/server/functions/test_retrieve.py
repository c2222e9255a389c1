"""The full-text search of a folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conure.server.functions import retrieve
from conure.server.functions.retrieve import MAX_PASSAGE, FolderIndex, make_retrieve, split_passages
from conure.server.program.errors import RunError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "tea.md").write_text("Green tea is brewed at 80 degrees.\n\nBlack tea needs 95.")
    (folder / "deep" / "jam.txt").write_text("Jam is made of fruits.")
    (folder / "picture.png").write_bytes(b"tea")
    return folder


@pytest.fixture(autouse=True)
def always_rescan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieve, "RESCAN_S", 0.0)


def test_the_best_passages_come_first_with_their_source(folder: Path) -> None:
    index = FolderIndex(folder)
    found = index.search("how are FRUITS made into jam?", 5)
    assert found[0]["source"] == "deep/jam.txt"
    assert found[0]["text"] == "Jam is made of fruits."
    assert found[0]["score"] > 0
    assert [each["source"] for each in index.search("tea", 5)] == ["tea.md"]


def test_changed_and_deleted_files_are_indexed_again(folder: Path) -> None:
    index = FolderIndex(folder)
    assert index.search("marmalade", 1) == []
    (folder / "deep" / "jam.txt").write_text("Marmalade is made of oranges.")
    (folder / "tea.md").unlink()
    assert index.search("marmalade", 1)[0]["text"] == "Marmalade is made of oranges."
    assert index.search("tea", 1) == []


def test_a_new_file_costs_no_pass_over_the_index(folder: Path) -> None:
    index = FolderIndex(folder)
    statements: list[str] = []
    index._database.set_trace_callback(statements.append)
    index.search("tea", 1)
    assert not [each for each in statements if each.startswith("DELETE")]


def test_a_file_that_is_removed_after_it_was_listed_is_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = FolderIndex(folder)
    listed = index._paths()
    monkeypatch.setattr(index, "_paths", lambda: listed)
    (folder / "tea.md").unlink()
    assert index.search("tea", 1) == []
    assert index.search("jam", 1)


def test_a_file_whose_name_is_not_utf8_is_skipped(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Path(os.fsdecode(bytes(folder) + b"/\xff.txt")).write_text("tea")
    assert [each["source"] for each in FolderIndex(folder).search("tea", 5)] == ["tea.md"]
    assert "its name is not UTF-8" in caplog.text
    caplog.text.encode()  # a log of UTF-8 text can have it


@pytest.mark.parametrize("query", ["Straße", "STRAßE", "İzmir", "izmir"])
def test_words_are_found_in_any_case(folder: Path, query: str) -> None:
    (folder / "city.txt").write_text("Eine Straße in İzmir")
    assert FolderIndex(folder).search(query, 1)


@pytest.mark.parametrize(
    "query", ['"', "tea OR", "NEAR(a b)", "text:tea", "tea*", "'; DROP TABLE passages", "", "\x00"]
)
def test_a_query_is_never_syntax(folder: Path, query: str) -> None:
    index = FolderIndex(folder)
    index.search(query, 3)
    assert index.search("green", 3)


def test_a_link_out_of_the_folder_is_not_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("the secret password")
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    (folder / "bad.txt").write_bytes(b"\xff\xfe password")
    assert FolderIndex(folder).search("password", 3) == []


def test_the_number_of_results_is_bounded(folder: Path) -> None:
    run = make_retrieve(FolderIndex(folder))
    assert len(run("tea is jam", k=1)) == 1
    with pytest.raises(RunError, match="from 1 to 100"):
        run("tea", k=0)


@given(st.text(alphabet="ab \n", max_size=5_000))
def test_passages_are_bounded_and_keep_every_word(text: str) -> None:
    passages = list(split_passages(text))
    assert all(0 < len(passage) <= MAX_PASSAGE for passage in passages)
    joined = "".join("".join(passages).split())
    assert joined == "".join(text.split())
