"""The files of the dashboard, read once into memory."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from importlib.resources import files
from importlib.resources.abc import Traversable

from msgspec import Struct

CONTENT_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
"""Types of the files that are served. Others, such as licences, are not."""


class DashboardFile(Struct, frozen=True, kw_only=True):
    """One file as it is served."""

    content: bytes
    content_type: str
    etag: str
    """A hash of the content, in quotes."""


def load_files() -> Mapping[str, DashboardFile]:
    """Return the files by path below `static`, for example `js/main.js`."""
    return dict(_walk(files(__package__).joinpath("static"), ""))


def _walk(folder: Traversable, prefix: str) -> list[tuple[str, DashboardFile]]:
    found: list[tuple[str, DashboardFile]] = []
    for entry in folder.iterdir():
        if entry.is_dir():
            found += _walk(entry, f"{prefix}{entry.name}/")
            continue
        content_type = CONTENT_TYPES.get(entry.name[entry.name.rfind(".") :])
        if content_type is not None:
            content = entry.read_bytes()
            etag = f'"{blake2b(content, digest_size=16).hexdigest()}"'
            file = DashboardFile(content=content, content_type=content_type, etag=etag)
            found.append((f"{prefix}{entry.name}", file))
    return found
