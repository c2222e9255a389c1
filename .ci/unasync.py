"""Generate the synchronous client from the asynchronous one.

    python .ci/unasync.py           write adapters/client/sync_client.py
    python .ci/unasync.py --check   fail if that file is not up to date

The sources use names with the prefix `Async`, and modules with the prefix `async_` whose twin has
the prefix `sync_`. Needs ruff, which sorts the imports and formats the result.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
FILES: Final = {"adapters/client/async_client.py": "adapters/client/sync_client.py"}

SUBSTITUTIONS: Final = (
    (r"AsyncGenerator\[(.+), None\]", r"Generator[\1, None, None]"),
    (r"AbstractAsyncContextManager", "AbstractContextManager"),
    (r"\bAsync([A-Z]\w*)", r"\1"),
    (r"\basync_(\w+)", r"sync_\1"),
    (r"\basync (def|with|for)\b", r"\1"),
    (r"\bawait ", ""),
    (r"from \.owned_generator import OwnedGenerator\n", ""),
    (r"\bOwnedGenerator\(", "contextlib.closing("),
    (r"\baclos(e|ing)\b", r"clos\1"),
    (r"\baiter_raw\b", "iter_raw"),
    (r"\baread\b", "read"),
    (r"for (\w+) in (\w+):\s+yield \1\n", r"yield from \2\n"),
    (r"\basynchronous\b", "synchronous"),
    (r"\bAn synchronous\b", "A synchronous"),
)


def generate(source: str) -> str:
    """Return the synchronous code of a source file."""
    text = (ROOT / source).read_text()
    for pattern, replacement in SUBSTITUTIONS:
        text = re.sub(pattern, replacement, text)
    text = f"# Generated from {Path(source).name} by .ci/unasync.py. Do not edit.\n{text}"
    text = _ruff("check", "--select", "I", "--fix", "--quiet", text=text)
    return _ruff("format", text=text)


def _ruff(*arguments: str, text: str) -> str:
    name = ROOT / "adapters/client/sync_client.py"
    command = [sys.executable, "-m", "ruff", *arguments, "--stdin-filename", str(name), "-"]
    done = subprocess.run(command, input=text, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def main() -> str | None:
    """Write the generated files, or return which ones are outdated."""
    is_check = sys.argv[1:] == ["--check"]
    for source, target in FILES.items():
        text = generate(source)
        if text == (ROOT / target).read_text():
            continue
        if is_check:
            return f"{target} is outdated: run python .ci/unasync.py"
        (ROOT / target).write_text(text)
    return None


if __name__ == "__main__":
    sys.exit(main())
