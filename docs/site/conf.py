"""The site of the documentation: `make docs` builds it with Sphinx into build/site.

The pages are the Markdown files that are read on any host of the repository. Two things are added
while they are read: the navigation, from the lists of docs/index.md, and the address of the
repository in links that leave docs/.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
REPOSITORY: Final[str] = PROJECT["urls"]["Repository"]
LINK: Final = re.compile(r"\]\((?!\w+:|#)([^)#]+)(#[^)]*)?\)")

project = "Conure"
author = "The Conure authors"
version = release = PROJECT["version"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "index"
exclude_patterns = ["site", "decisions"]
highlight_language = "text"
html_theme = "furo"
html_title = "Conure"
myst_heading_anchors = 4
# A page may show a language that Pygments lacks, or a fragment of one that it has.
suppress_warnings = ["misc.highlighting_failure", "myst.xref_missing"]
autodoc_typehints = "description"
autodoc_member_order = "bysource"
# An adapter is imported; the models that it could use are not.
autodoc_mock_imports = ["torch", "transformers"]


def add_navigation(text: str) -> str:
    """Return the index with a hidden tree of pages for each of its lists."""
    trees = []
    for section in text.split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        pages = [target for target, _ in LINK.findall(body) if target.endswith(".md")]
        listed = "\n".join(page.removesuffix(".md") for page in pages)
        trees.append(f"```{{toctree}}\n:hidden:\n:caption: {title}\n\n{listed}\n```")
    return "\n\n".join([text, *trees])


def leave_docs(text: str, page: str) -> str:
    """Return a page whose links to files outside of the site lead to the repository."""

    def replaced(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), match[1]))
        is_page = path.startswith("docs/") and path.endswith((".md", ".png", ".svg"))
        if is_page and not path.startswith("docs/decisions/"):
            return match[0]
        return f"]({REPOSITORY}/blob/main/{path}{match[2] or ''})"

    return LINK.sub(replaced, text)


def read_source(_: Any, page: str, source: list[str]) -> None:
    """Complete the text of a page before it is parsed."""
    source[0] = leave_docs(source[0], page)
    if page == root_doc:
        source[0] = add_navigation(source[0])


def as_restructured_text(lines: list[str]) -> list[str]:
    """Return a docstring, which is Markdown, in the notation that autodoc expects."""
    text = re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", "\n".join(lines))
    # Indented code after a paragraph. In a section such as `Args:` all text is indented.
    text = re.sub(r"(?<![:\n])\n\n(?=    \S)", "\n\n::\n\n", text)
    done: list[str] = []
    indentation: str | None = None
    for line in text.split("\n"):
        fence = re.fullmatch(r"(\s*)```(\w*)", line)
        if fence is None:
            done.append(line if indentation is None else f"    {line}")
        elif indentation is None:
            indentation = fence[1]
            done += ["", f"{indentation}.. code-block:: {fence[2] or 'text'}", ""]
        else:
            indentation = None
            done.append("")
    return done


def read_docstring(_app: Any, _kind: str, _name: str, *rest: Any) -> None:
    """Rewrite a docstring, the last argument, in place."""
    text = rest[-1]
    text[:] = as_restructured_text(text)


def setup(app: Any) -> None:
    """Connect the steps above to Sphinx."""
    app.connect("source-read", read_source)
    app.connect("autodoc-process-docstring", read_docstring, priority=400)  # before napoleon
