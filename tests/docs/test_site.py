"""The site of the documentation: its navigation, its links, and the notation of docstrings.

Needs no generator; `make docs` builds the site with warnings as errors.
"""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

import conure

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "decisions" not in path.parts)
LINK = re.compile(r"\]\(([^)#]*)(?:#([^)]+))?\)")
HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def conf() -> ModuleType:
    """Return the configuration of the generator."""
    spec = importlib.util.spec_from_file_location("docs_conf", DOCS / "site" / "conf.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as repository hosts and the site make them."""
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    titles = (title.replace("`", "").lower() for title in HEADING.findall(text))
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def test_the_index_lists_every_page_once() -> None:
    text = (DOCS / "index.md").read_text("utf-8")
    listed = Counter(target for target, _ in LINK.findall(text))
    assert listed == Counter(str(page.relative_to(DOCS)) for page in PAGES if page.stem != "index")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_links_to_headings_resolve(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    dead = []
    for target, anchor in LINK.findall(text):
        if anchor and "://" not in target:
            other = (page.parent / target).resolve() if target else page
            if not other.is_file() or anchor not in anchors(other):
                dead.append(f"{target}#{anchor}")
    assert dead == []


def test_the_navigation_has_the_sections_of_the_index(conf: ModuleType) -> None:
    text = (DOCS / "index.md").read_text("utf-8")
    whole = conf.add_navigation(text)
    assert whole.count("```{toctree}") == text.count("\n## ")
    assert "\nstart/quickstart\n" in whole


def test_links_that_leave_the_site_lead_to_the_repository(conf: ModuleType) -> None:
    text = "[a](../../CHANGELOG.md) [b](receipts.md#x) [c](../decisions) [d](https://e.org/f.md)"
    base = f"{conf.REPOSITORY}/blob/main"
    assert conf.leave_docs(text, "reference/rest") == (
        f"[a]({base}/CHANGELOG.md) [b](receipts.md#x) [c]({base}/docs/decisions) "
        "[d](https://e.org/f.md)"
    )


def test_docstrings_are_rewritten(conf: ModuleType) -> None:
    lines = ["Run `x`.", "", "    a = 1", "", "Use:", "    ```python", "    b", "    ```"]
    assert conf.as_restructured_text(lines) == [
        *("Run ``x``.", "", "::", "", "    a = 1", "", "Use:", ""),
        *("    .. code-block:: python", "", "        b", ""),
    ]


def test_the_python_page_has_every_public_name() -> None:
    text = (DOCS / "reference" / "python.md").read_text("utf-8")
    names = set(conure.__all__) - {"__version__"}
    assert {name for name in names if not re.search(rf"\b{name}\b", text)} == set()
