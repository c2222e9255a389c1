"""The dashboard in a headless Chromium, with programs that run on the fake engine.

Needs `pip install playwright axe-playwright-python` and a Chromium, either one on the PATH or
playwright's own. Skipped without them.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
from collections.abc import AsyncIterator
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec
import pytest

from conure.server.app import create_app
from conure.server.config import Config

from ..service_double import ScriptedService, app_of, client_at, over_socket

playwright = pytest.importorskip("playwright.async_api")

WAIT_MS = 120_000
"""Longer than any step of a test takes, even on a slow machine."""
playwright.expect.set_options(timeout=WAIT_MS)
MARKUP = '<img src="x" onerror="document.title = 1"> & <b>bold</b> '
LONG_TEXT = MARKUP + "word " * 4_000
SHORT_TEXT = MARKUP + "the end"
BOTTOM = "element => element.getBoundingClientRect().bottom"
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")

Page = Any


@contextlib.asynccontextmanager
async def browser_page(**options: Any) -> AsyncIterator[Page]:
    """Open a page; at the end, check that nothing was reported on its console."""
    async with playwright.async_playwright() as driver:
        candidates = (driver.chromium.executable_path, *CHROMIUMS)
        path = next(filter(None, map(shutil.which, candidates)), None)
        if path is None:
            pytest.skip("Chromium is not installed")
        browser = await driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            page = await browser.new_page(**options)
            page.set_default_timeout(WAIT_MS)
            faults: list[str] = []
            page.on("pageerror", lambda error: faults.append(str(error)))
            page.on("console", lambda message: faults.append(f"{message.type}: {message.text}"))
            yield page
            assert faults == []
        finally:
            await browser.close()


async def result_of(module: str, call: str, argument: Any) -> Any:
    """Return the result of a function of the dashboard's model, whose call reads `argument`."""
    async with over_socket(app_of(ScriptedService())) as url, browser_page() as page:
        await page.goto(url)
        script = f"async (argument) => (await import('/dashboard/model/{module}')).{call}"
        return await page.evaluate(script, argument)


async def write_program(page: Page, node: dict[str, Any]) -> None:
    """Write a program with one node, whose output is `x`, into the playground."""
    text = msgspec.json.encode({"program": {"nodes": [node], "outputs": ["x"]}}).decode()
    await page.get_by_label("Program", exact=True).fill(text)


@contextlib.asynccontextmanager
async def fake_server(data: Path, **settings: Any) -> AsyncIterator[str]:
    """Yield the address of a server on the fake engine."""
    script = data / "script.json"
    answers = [{"match": "LONG", "text": LONG_TEXT}, {"match": "SHORT", "text": SHORT_TEXT}]
    script.write_bytes(msgspec.json.encode(answers))
    config = Config(data=data / "data", engine="fake", script=script, **settings)
    async with over_socket(create_app(config)) as url:
        yield url


def generate(node: str, prompt: str, max_tokens: int = 4_000) -> dict[str, Any]:
    output = {"variable": f"{node}_text", "max_tokens": max_tokens}
    return {"id": node, "op": "generate", "prompt": prompt, "output": output}


async def submit(url: str, *nodes: dict[str, Any], outputs: list[str], name: str) -> str:
    program = {"name": name, "nodes": list(nodes), "outputs": outputs}
    async with client_at(url) as client:
        answer = await client.post("/v1/programs", json={"program": program})
    assert answer.status_code == 202, answer.text
    accepted: str = answer.json()["id"]
    return accepted


async def status_of(url: str, program: str) -> str:
    async with client_at(url) as client:
        status: str = (await client.get(f"/v1/programs/{program}")).json()["status"]
    return status


async def serious_faults(page: Page) -> list[str]:
    """Return the violations that axe-core rates as serious or critical."""
    pytest.importorskip("axe_playwright_python")
    source = files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8")
    await page.evaluate(source)
    found = await page.evaluate("axe.run()")
    return [
        f"{rule['id']}: {node['html']}"
        for rule in found["violations"]
        if rule["impact"] in ("serious", "critical")
        for node in rule["nodes"]
    ]


async def test_a_running_program_is_watched_and_cancelled(tmp_path: Path) -> None:
    async with fake_server(tmp_path, time_per_output_token=0.05) as url, browser_page() as page:
        expect = playwright.expect
        program = await submit(
            url,
            generate("first", "SHORT"),
            generate("story", "{{first_text}} LONG"),
            outputs=["story_text"],
            name="two steps",
        )
        await page.goto(url)
        row = page.get_by_role("row", name=re.compile("two steps"))
        await expect(row).to_contain_text("running")
        await row.get_by_role("link").click()

        first, story = (page.locator(f'.box:has-text("{name}")') for name in ("first", "story"))
        await expect(first.locator(".status")).to_contain_text("done")
        await expect(first).to_contain_text("<b>bold</b>")
        await expect(story.locator(".status")).to_contain_text("running")

        await story.click()
        text = page.get_by_role("region", name="Text", exact=True)
        await expect(text).to_contain_text("word")
        length = len(await text.inner_text())
        await page.wait_for_function(
            "length => document.querySelector('.details .value').textContent.length > length",
            arg=length,
        )
        excerpt = story.locator(".text")
        await expect(excerpt).to_have_text(re.compile("^….*word"))
        assert await excerpt.evaluate("text => text.scrollHeight <= text.clientHeight")
        assert await page.locator("main b, main img").count() == 0
        await expect(page.locator(".lanes tbody tr:not(.lane)")).to_have_count(2)

        assert await status_of(url, program) == "running"
        await page.get_by_role("button", name="Cancel", exact=True).click()
        await expect(page.locator(".heading .status")).to_contain_text("cancelled")
        await expect(story.locator(".status")).to_contain_text("killed")
        await expect(page.get_by_role("heading", name="Receipt")).to_be_visible()
        await expect(page.get_by_role("button", name="Cancel", exact=True)).to_be_hidden()
        assert await status_of(url, program) == "cancelled"


async def test_the_dashboard_works_by_keyboard(tmp_path: Path) -> None:
    async with fake_server(tmp_path, time_per_output_token=0.05) as url, browser_page() as page:
        expect = playwright.expect
        program = await submit(
            url, generate("story", "LONG"), outputs=["story_text"], name="a story"
        )
        await page.goto(url)
        link = page.get_by_role("link", name="a story")
        await expect(link).to_be_visible()
        await tab_to(page, link)
        await page.keyboard.press("Enter")
        box = page.locator(".box")
        await expect(box).to_have_count(1)
        await tab_to(page, box)
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("heading", name="story", exact=True)).to_be_visible()
        await tab_to(page, page.get_by_role("button", name="Cancel", exact=True), key="Shift+Tab")
        await page.keyboard.press("Enter")
        await expect(page.locator("#announcer")).to_contain_text("ancelled")
        assert await status_of(url, program) == "cancelled"


async def tab_to(page: Page, target: Any, key: str = "Tab") -> None:
    """Press a key until an element has the focus."""
    for _ in range(60):
        if await target.evaluate("element => element === document.activeElement"):
            return
        await page.keyboard.press(key)
    raise AssertionError("the element cannot be reached by keyboard")


async def test_a_graph_of_500_nodes_is_shown_in_a_few_boxes(tmp_path: Path) -> None:
    async with fake_server(tmp_path) as url, browser_page() as page:
        expect = playwright.expect
        program = await submit(
            url,
            *(generate(f"n{number}", "SHORT", 4) for number in range(499)),
            {"id": "last", "op": "wait", "variables": [f"n{n}_text" for n in range(499)]},
            outputs=["n0_text"],
            name="wide",
        )
        await page.goto(f"{url}/#/programs/{program}")
        await expect(page.locator(".heading .status")).to_contain_text("done")
        await expect(page.locator(".graph header .note")).to_have_text("500 nodes")
        stack = page.locator(".box.stack")
        await expect(stack).to_contain_text("499 of 499")
        await expect(page.locator(".lanes .lane")).to_contain_text("499 calls")
        last_cell = stack.locator(".cells i").last
        assert await last_cell.evaluate(BOTTOM) <= await stack.locator(".cells").evaluate(BOTTOM)
        assert await page.locator(".box").count() == 2
        await stack.click()
        await page.get_by_role("button", name="n250", exact=True).click()
        await expect(page.get_by_role("region", name="Text", exact=True)).to_have_text(MARKUP[:4])
        await expect(page.get_by_role("button", name="Show 299 more")).to_be_visible()


async def test_a_long_chain_stays_readable_and_is_followed(tmp_path: Path) -> None:
    async with fake_server(tmp_path, time_per_output_token=0.05) as url, browser_page() as page:
        expect = playwright.expect
        first, steps = generate("n0", "SHORT", 4), range(1, 13)
        chain = (generate(f"n{n}", f"{{{{n{n - 1}_text}}}} SHORT", 4) for n in steps)
        last = generate("last", "{{n12_text}} LONG")
        program = await submit(url, first, *chain, last, outputs=["last_text"], name="chain")
        await page.goto(f"{url}/#/programs/{program}")
        running = page.locator(".box[data-status=running]", has_text="last")
        await expect(running).to_be_in_viewport(ratio=1)
        level = page.get_by_label("Zoom", exact=True)
        assert await percent(level) >= 50
        await page.get_by_role("button", name="Fit", exact=True).click()
        assert await percent(level) < 35
        await page.get_by_role("button", name="Cancel", exact=True).click()
        await expect(page.locator(".heading .status")).to_contain_text("cancelled")


async def percent(element: Any) -> int:
    text: str = await element.text_content()
    return int(text.removesuffix(" %"))


async def test_the_tree_shows_what_running_calls_share(tmp_path: Path) -> None:
    async with fake_server(tmp_path, time_per_output_token=0.05) as url, browser_page() as page:
        expect = playwright.expect
        names = ("guard", "driver")
        await submit(
            url,
            generate("rules", "SHORT"),
            *(generate(name, f"{{{{rules_text}}}} LONG {name}", 3_000) for name in names),
            outputs=[f"{name}_text" for name in names],
            name="rules",
        )
        await page.goto(f"{url}/#/engines")
        tree = page.get_by_role("group", name="Running calls and what they share")
        branch = tree.locator("li li").first.locator("xpath=ancestor::li[1]")
        await expect(branch).to_contain_text("held once for 2 calls")
        await expect(branch.get_by_role("link")).to_have_text(list(names))
        await expect(tree).to_contain_text("frees next")
        await tab_to(page, tree.get_by_role("link", name="driver"))
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("heading", name="rules")).to_be_visible()
        await page.get_by_role("button", name="Cancel", exact=True).click()
        await expect(page.locator(".heading .status")).to_contain_text("cancelled")


async def test_the_first_page_of_1000_programs_is_painted_within_a_second(tmp_path: Path) -> None:
    async with fake_server(tmp_path) as url, browser_page() as page:
        node = {"id": "a", "op": "expr", "expr": 1, "output": "x"}
        body = {"program": {"name": "one of many", "nodes": [node], "outputs": ["x"]}}
        async with client_at(url) as client:
            for _ in range(1_000):
                (await client.post("/v1/programs", json=body)).raise_for_status()
        await page.goto(url)
        await page.locator("tbody tr").nth(49).wait_for()
        listed_ms = await page.evaluate("performance.now()")
        painted_ms = await page.evaluate(
            "performance.getEntriesByName('first-contentful-paint')[0].startTime"
        )
        assert painted_ms <= listed_ms <= 1_000


async def test_programs_are_searched_filtered_and_paged() -> None:
    service = ScriptedService()
    async with over_socket(app_of(service)) as url, browser_page() as page:
        expect = playwright.expect
        for number in range(120):
            node = {"id": "a", "op": "expr", "expr": number, "output": "x"}
            program = await submit(url, node, outputs=["x"], name="n")
            service.programs[program].finish("failed" if number == 7 else "done")
        rows = page.locator("tbody tr")
        await page.goto(url)
        await expect(rows).to_have_count(50)
        await page.get_by_role("button", name="Load older programs").click()
        await expect(rows).to_have_count(100)
        for _ in range(3):
            newer = {"id": "a", "op": "expr", "expr": 0, "output": "x"}
            await submit(url, newer, outputs=["x"], name="new")
        await expect(rows).to_have_count(103)
        await page.get_by_label("Search programs").fill("p_12")
        await expect(rows).to_have_count(5)
        await page.get_by_label("Search programs").fill("")
        await page.get_by_label("Failed").check(force=True)
        await expect(rows).to_have_count(1)
        await expect(rows).to_contain_text("p_8")


async def test_a_poll_waits_for_the_answer_to_the_one_before() -> None:
    async with over_socket(app_of(ScriptedService())) as url, browser_page() as page:
        await page.goto(url)
        most = await page.evaluate(
            """async () => {
              const { repeat } = await import("/dashboard/js/polling.js");
              let open = 0, most = 0, calls = 0;
              await new Promise((done) => {
                const polling = repeat(async () => {
                  most = Math.max(most, ++open);
                  await new Promise((answer) => setTimeout(answer, 20));
                  open--;
                  if (++calls < 4) return;
                  polling.close();
                  done();
                }, 1);
                polling.now();
              });
              return most;
            }"""
        )
    assert most == 1


async def test_node_ids_may_be_names_of_properties(tmp_path: Path) -> None:
    async with fake_server(tmp_path) as url, browser_page() as page:
        names = ("constructor", "valueOf", "toString", "__proto__")
        nodes = [
            {"id": name, "op": "expr", "expr": {"var": before} if before else 1, "output": name}
            for before, name in zip(("", *names), names, strict=False)
        ]
        program = await submit(url, *nodes, outputs=["__proto__"], name="properties")
        await page.goto(f"{url}/#/programs/{program}")
        await playwright.expect(page.locator(".box")).to_have_count(4)
        await playwright.expect(page.locator(".edges path")).to_have_count(3)


async def test_long_integers_keep_their_digits(tmp_path: Path) -> None:
    async with fake_server(tmp_path) as url, browser_page() as page:
        expect = playwright.expect
        node = {"id": "n", "op": "expr", "expr": 2**53 + 1, "output": "x"}
        program = await submit(url, node, outputs=["x"], name="digits")
        await page.goto(f"{url}/#/programs/{program}")
        await expect(page.get_by_role("region", name="x", exact=True)).to_have_text(str(2**53 + 1))
        await page.goto(f"{url}/#/playground")
        await page.get_by_label("Program (JSON)").check(force=True)
        await write_program(page, node | {"expr": [2**53 + 1]})
        for language in ("curl", "Python"):
            await page.get_by_label(language).check(force=True)
            await expect(page.get_by_role("region", name="Code")).to_contain_text(str(2**53 + 1))
        await page.get_by_role("button", name="Run").click()
        await expect(page.get_by_role("region", name="n", exact=True)).to_contain_text(
            str(2**53 + 1)
        )


async def test_an_empty_output_is_a_value(tmp_path: Path) -> None:
    async with fake_server(tmp_path) as url, browser_page() as page:
        node = {"id": "n", "op": "expr", "expr": {"join": [[], ""]}, "output": "x"}
        program = await submit(url, node, outputs=["x"], name="empty")
        await page.goto(f"{url}/#/programs/{program}")
        outputs = page.locator(".outputs")
        await playwright.expect(outputs).to_contain_text("The value is an empty text.")
        await page.goto(f"{url}/#/playground")
        await page.get_by_label("Program (JSON)").check(force=True)
        for value, shown in (({"join": [[], ""]}, "(empty)"), (None, "null")):
            await write_program(page, node | {"expr": value})
            await page.get_by_role("button", name="Run").click()
            answer = page.get_by_role("region", name="n", exact=True)
            await playwright.expect(answer).to_have_text(shown)


async def test_a_curl_command_contains_no_code_of_output_names() -> None:
    name = '"; $(id) `id` \\ ! \N{GREEK SMALL LETTER ALPHA}'
    call = "asCurl('http://there', { program: { outputs: [argument] } })"
    command = await result_of("snippets.js", call, name)
    (path,) = re.findall(r'\ncurl -sSf "http://there/v1/programs/\$id/variables/(.*)"', command)
    assert not set(path) & set('"$`\\!')
    assert unquote(path) == f"{name}?wait_s=60"


async def test_the_playground_follows_no_program_after_it_is_left(tmp_path: Path) -> None:
    async with fake_server(tmp_path) as url, browser_page() as page:
        followed: list[str] = []
        submitted = asyncio.Event()
        is_left = asyncio.Event()

        async def answer_late(route: Any) -> None:
            response = await route.fetch()
            submitted.set()
            await is_left.wait()
            await route.fulfill(response=response)

        page.on("request", lambda request: followed.append(request.url))
        await page.goto(f"{url}/#/playground")
        await page.route("**/v1/programs", answer_late)
        await page.get_by_role("button", name="Run").click()
        await submitted.wait()
        await page.get_by_role("link", name="Engines").click()
        await page.get_by_role("heading", name="Engines").first.wait_for()
        async with page.expect_event("requestfinished", lambda each: each.method == "POST"):
            is_left.set()
        await page.evaluate("() => new Promise(requestAnimationFrame)")
        assert [each for each in followed if each.endswith("/events")] == []


async def test_two_clicks_on_run_submit_one_program(tmp_path: Path) -> None:
    async with fake_server(tmp_path, time_per_output_token=0.05) as url, browser_page() as page:
        requests: list[str] = []
        page.on("request", lambda request: requests.append(f"{request.method} {request.url}"))
        await page.goto(f"{url}/#/playground")
        await page.get_by_label("Message to the model").fill("SHORT")
        twice = "form => { form.requestSubmit(); form.requestSubmit(); }"
        await page.locator("form").evaluate(twice)
        await playwright.expect(page.locator(".result .status")).to_contain_text("done")
        assert requests.count(f"POST {url}/v1/programs") == 1
        assert len([each for each in requests if each.endswith("/events")]) == 1
        requests.clear()
        await page.get_by_role("button", name="Run").dblclick()
        await playwright.expect(page.locator(".result .status")).to_contain_text("done")
        assert requests.count(f"POST {url}/v1/programs") == 1


async def test_a_long_session_is_explained_few_times(tmp_path: Path) -> None:
    async with fake_server(tmp_path) as url, browser_page() as page:
        async with client_at(url) as client:
            body = {"program": {"nodes": [], "outputs": []}, "open": True}
            program = (await client.post("/v1/programs", json=body)).json()["id"]
            for number in range(40):
                nodes = [{"id": f"n{number}", "op": "expr", "expr": 1, "output": f"x{number}"}]
                path = f"/v1/programs/{program}/nodes"
                (await client.post(path, json={"nodes": nodes})).raise_for_status()
        explained: list[str] = []
        page.on("request", lambda request: explained.append(request.url))
        await page.goto(f"{url}/#/programs/{program}")
        await playwright.expect(page.locator(".box")).to_contain_text("40 of 40")
        assert 1 <= sum(each.endswith("/explain") for each in explained) <= 20


async def test_the_playground_explains_runs_and_copies(tmp_path: Path) -> None:
    async with fake_server(tmp_path) as url, browser_page() as page:
        expect = playwright.expect
        await page.goto(f"{url}/#/playground")
        notice = page.get_by_role("note")
        await expect(notice).to_contain_text("it is for tests; conure serve Qwen/")
        code = page.get_by_role("region", name="Code")
        for kind in ("Prompt", "Program (JSON)", "Program (text)"):
            await page.get_by_label(kind).check(force=True)
            await page.get_by_role("button", name="Explain").click()
            await expect(page.get_by_role("heading", name="Explanation")).to_be_visible()
            for language in ("Python", "LangChain"):
                await page.get_by_label(language).check(force=True)
                compile(await code.inner_text(), language, "exec")
            await page.get_by_label("curl").check(force=True)
            assert f"curl -sSf {url}/v1/programs" in await code.inner_text()
        await page.get_by_label("Prompt").check(force=True)
        await page.get_by_label("Message to the model").fill("SHORT")
        await page.get_by_role("button", name="Run").click()
        await expect(page.get_by_role("region", name="answer_it")).to_contain_text("<img src=")
        await page.get_by_label("Message to the model").fill("")
        await page.get_by_label("Program (JSON)").check(force=True)
        await page.get_by_label("Program", exact=True).fill("{")
        await page.get_by_role("button", name="Run").click()
        await expect(page.get_by_role("alert")).to_contain_text("the program is not JSON")


RECEIPT = {
    "wall_s": 0.05,
    "calls": 3,
    "prompt_tokens": {"logical": 96, "computed": 64},
    "output_tokens": {"decoded": 0, "forced": 0, "discarded": 0},
    "round_trips_saved": 2,
    "truncated": [],
}


@pytest.mark.parametrize(
    ("estimated_s", "computed", "conclusion"),
    [
        (0.4, 64, None),
        (0.04, 64, "What this program shares is too little to save time."),
        (0.04, 96, "The prompts of this program share nothing: only the round trips are saved."),
    ],
)
async def test_a_receipt_compares_with_single_requests_in_plain_words(
    estimated_s: float, computed: int, conclusion: str | None
) -> None:
    receipt = {
        **RECEIPT,
        "prompt_tokens": {"logical": 96, "computed": computed},
        "as_single_requests": {"prompt_tokens": 96, "estimated_s": estimated_s},
    }
    sentences = await result_of("format.js", "receiptSentences(argument, 'done')", receipt)
    compared = (
        "As single requests to an idle engine without a network, the calls would take about "
        f"{round(1000 * estimated_s)} ms and 2 more round trips."
    )
    assert sentences[2:] == [compared, *filter(None, [conclusion])]


async def test_the_api_reference_lists_and_finds_all_operations() -> None:
    async with over_socket(app_of(ScriptedService())) as url, browser_page() as page:
        expect = playwright.expect
        async with client_at(url) as client:
            paths = (await client.get("/schema/openapi.json")).json()["paths"]
        await page.goto(f"{url}/docs")
        await expect(page.locator("article")).to_have_count(sum(map(len, paths.values())))
        await page.get_by_label("Search operations").fill("get activity")
        await expect(page.locator("article:visible")).to_have_count(1)
        await page.get_by_label("Search operations").fill("post /v1/programs")
        body = page.get_by_text("Submission", exact=True)
        await body.first.click()
        await expect(page.locator("details[open]").first).to_contain_text("inputs")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_nothing_serious(tmp_path: Path, scheme: str) -> None:
    async with (
        fake_server(tmp_path, time_per_output_token=0.05) as url,
        browser_page(color_scheme=scheme, bypass_csp=True) as page,
    ):
        ended = await submit(url, generate("a", "SHORT"), outputs=["a_text"], name="ended")
        live = await submit(
            url,
            generate("first", "LONG"),
            *(generate(f"n{number}", "{{first_text}} SHORT") for number in range(9)),
            outputs=["n0_text"],
            name="live",
        )
        shown = {
            "/": "tbody tr",
            f"/#/programs/{ended}": ".split",
            f"/#/programs/{live}": ".box.stack",
            "/#/engines": ".engine tbody tr",
            "/#/playground": ".result",
            "/docs": "article",
        }
        found = {}
        for path, selector in shown.items():
            await page.goto(f"{url}{path}")
            await page.locator(selector).first.wait_for()
            found[path] = await serious_faults(page)
        assert found == {path: [] for path in shown}
