"""Make dashboard-light.png and dashboard-dark.png: the page of a program of the built-in model.

    pip install '.[serve,browser]'
    python docs/images/dashboard.py

Needs a Chromium, on the PATH or installed by `playwright install chromium`.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import httpx
from playwright.sync_api import Browser, sync_playwright

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parents[1] / "benchmarks"))

from temporary_server import served  # noqa: E402 - found by the line above

RULES = "You read reports. Answer from the report alone. Give names as they are written."
REPORTS = (
    "It happened in Malbury. The guard was Tessa Brook. The accident hurt Jonas Wenk.",
    "The date was 12 May. One person was hurt: Ruth Sandberg. The driver is called Pavel Orlin.",
    "The damage was 340 crowns. The accident hurt Emil Hartson. It happened in Tarnby.",
)


def call(node: str, variable: str, *content: dict[str, str]) -> dict[str, object]:
    """Return a call of the model with a system message."""
    return {
        "id": node,
        "op": "generate",
        "messages": [
            {"role": "system", "content": RULES},
            {"role": "user", "content": list(content)},
        ],
        "output": {"variable": variable, "max_tokens": 60, "temperature": 0},
    }


def text(value: str) -> dict[str, str]:
    """Return a part of a message."""
    return {"text": value}


def insert(variable: str) -> dict[str, str]:
    """Return a part of a message that inserts a variable."""
    return {"input": variable}


HURT = text("\n\nQuestion: Who was hurt?")
PLACE = text("\n\nQuestion: Where did it happen?")
SUBMISSION = {
    "program": {
        "name": "accident reports",
        "variables": {"reports": {"type": "list"}, "last": {"type": "string"}},
        "nodes": [
            {
                "id": "each_report",
                "op": "map",
                "items": "reports",
                "as": "report",
                "body": [call("find", "name", text("Report: "), insert("report"), HURT)],
                "collect": {"names": "name"},
            },
            call("find_place", "place", text("Report: "), insert("last"), PLACE),
            {
                "id": "list_names",
                "op": "expr",
                "expr": {"concat": ["- ", {"join": [{"var": "names"}, "\n- "]}]},
                "output": "findings",
            },
            call("join", "sentence", text("Join the findings:\n"), insert("findings")),
            call(
                "invite",
                "letter",
                text("Ask Emil Hartson to come to "),
                insert("place"),
                text("."),
            ),
        ],
        "outputs": ["sentence", "letter"],
    },
    "inputs": {"reports": list(REPORTS), "last": REPORTS[-1]},
}


def main() -> None:
    """Run the program and write both pictures."""
    with served() as url, sync_playwright() as driver:
        httpx.post(f"{url}/v1/programs", json=SUBMISSION).raise_for_status()
        accepted = httpx.post(f"{url}/v1/programs", json=SUBMISSION).raise_for_status().json()
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for scheme in ("light", "dark"):
            picture(browser, f"{url}/#/programs/{accepted['id']}", scheme)
        browser.close()


def picture(browser: Browser, url: str, scheme: str) -> None:
    """Write the picture of a page in one colour scheme."""
    page = browser.new_page(
        viewport={"width": 1280, "height": 800},
        color_scheme="dark" if scheme == "dark" else "light",
    )
    page.goto(url)
    page.locator(".split").wait_for()
    page.locator(".canvas:not(.pending) .box").first.wait_for()
    page.evaluate("document.fonts.ready")
    page.screenshot(path=FOLDER / f"dashboard-{scheme}.png", full_page=True)


if __name__ == "__main__":
    main()
