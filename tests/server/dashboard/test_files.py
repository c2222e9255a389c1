"""The dashboard's files: complete, self-contained, and free of parsed markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from conure.server.dashboard.files import CONTENT_TYPES, load_files

STATIC = Path(__file__).parents[3] / "server" / "dashboard" / "static"
FILES = load_files()
OWN_SCRIPTS = sorted(name for name in FILES if name.endswith(".js") and "vendor" not in name)
PAGES = sorted(name for name in FILES if name.endswith(".html"))
MAX_FIRST_PAINT_BYTES = 120_000
"""What the list of programs may load before it is shown."""

_IMPORT = re.compile(r"""(?:\bfrom |\bimport |\bimport\()"([^"]+)\"""")
_PARSES_MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|DOMParser"
    r"|createContextualFragment|srcdoc"
)


def imports_of(name: str) -> list[str]:
    """Return the files that a script imports."""
    folder = Path(name).parent
    paths = _IMPORT.findall(FILES[name].content.decode())
    return [str((STATIC / folder / path).resolve().relative_to(STATIC)) for path in paths]


class PageParser(HTMLParser):
    """Collects what a page loads, and what its content security policy would block."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.blocked: list[str] = []
        self._tag = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        for name, value in attrs:
            if name == "style" or name.startswith("on"):
                self.blocked.append(name)
            if name == "src" or (tag == "link" and name == "href"):
                self.loaded.append(value or "")

    def handle_data(self, data: str) -> None:
        if self._tag in ("script", "style") and data.strip():
            self.blocked.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._tag = ""


def test_every_file_is_served_or_a_licence() -> None:
    paths = {str(path.relative_to(STATIC)) for path in STATIC.rglob("*") if path.is_file()}
    assert {path for path in paths if Path(path).suffix in CONTENT_TYPES} == set(FILES)
    assert all(Path(path).name.startswith("LICENSE") for path in paths - set(FILES))


def test_vendored_libraries_have_their_licence_beside_them() -> None:
    vendored = {Path(name).stem for name in FILES if name.startswith("vendor/")}
    licences = {path.stem.removeprefix("LICENSE-") for path in (STATIC / "vendor").glob("LICENSE*")}
    assert vendored
    assert vendored == licences


@pytest.mark.parametrize("name", PAGES)
def test_pages_load_existing_files_of_this_server_only(name: str) -> None:
    page = PageParser()
    page.feed(FILES[name].content.decode())
    assert page.loaded
    assert {path.removeprefix("/dashboard/") for path in page.loaded} <= set(FILES)
    assert page.blocked == []


@pytest.mark.parametrize("name", OWN_SCRIPTS)
def test_scripts_import_existing_files(name: str) -> None:
    assert set(imports_of(name)) <= set(FILES)


@pytest.mark.parametrize("name", OWN_SCRIPTS)
def test_scripts_parse_no_markup(name: str) -> None:
    assert _PARSES_MARKUP.findall(FILES[name].content.decode()) == []


def test_nothing_refers_to_another_host() -> None:
    named = {
        name: re.findall(r"""(?:https?:)?//[\w-]+\.[\w.-]+""", file.content.decode())
        for name, file in FILES.items()
    }
    allowed = {"http://www.w3.org", "//www.w3.org"}
    assert {name: hosts for name, hosts in named.items() if set(hosts) - allowed} == {}


def test_the_first_page_is_small() -> None:
    needed = {"index.html", "base.css", "pages.css", "icon.svg", "js/main.js"}
    scripts = ["js/main.js", "js/programs_page.js"]
    while scripts:
        script = scripts.pop()
        needed.add(script)
        if script != "js/main.js":
            scripts += set(imports_of(script)) - needed
    assert sum(len(FILES[name].content) for name in needed) < MAX_FIRST_PAINT_BYTES
