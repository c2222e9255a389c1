"""The apps of both frameworks as functions: plain and accelerated, with and without await."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from conure.adapters import langchain, llamaindex
from conure.adapters.client import Client

from . import langchain_apps, llamaindex_apps

Run = Callable[[], Any]
AsyncRun = Callable[[], Awaitable[Any]]


class Counts(NamedTuple):
    """Calls of all accelerated runs of an app."""

    num_calls: int
    num_planned: int
    num_in_first: int
    """Calls that ran in the first program of their run."""


class AppCase(NamedTuple):
    """One app."""

    name: str
    run: Run | None
    """Run it plain with blocking calls; None for a Workflow, which has none."""
    fast: Run
    """`run`, accelerated."""
    arun: AsyncRun
    afast: AsyncRun
    counts: Callable[[], Counts]


def langchain_cases(client: Client) -> list[AppCase]:
    """Return the LangChain apps."""
    llm = langchain.ChatConure(client=client, temperature=0, max_tokens=400)
    apps = langchain_apps.cookbook(llm)
    return [_of_chain(name, app, llm) for name, app in apps.items()]


def _of_chain(name: str, app: langchain_apps.LangChainApp, llm: langchain.ChatConure) -> AppCase:
    fast = langchain.accelerate(app.chain, model=llm)

    def counts() -> Counts:
        runs = fast.explain().runs
        return Counts(
            sum(run.num_served + len(run.misses) for run in runs),
            sum(run.num_served for run in runs),
            sum(run.num_in_first_program for run in runs),
        )

    return AppCase(
        name,
        lambda: app.chain.invoke(app.given),
        lambda: fast.invoke(app.given),
        lambda: app.chain.ainvoke(app.given),
        lambda: fast.ainvoke(app.given),
        counts,
    )


def llamaindex_cases(client: Client) -> list[AppCase]:
    """Return the LlamaIndex apps."""
    llm = llamaindex.Conure(client=client, temperature=0, max_tokens=200, context_window=1500)
    return [_of_app(name, app) for name, app in llamaindex_apps.cookbook(llm).items()]


def _of_app(name: str, app: llamaindex_apps.LlamaIndexApp) -> AppCase:
    reports: list[llamaindex.Report] = []
    part = None if app.part is None else llamaindex.accelerate(app.part)

    def fast() -> Any:
        assert app.run is not None
        with llamaindex.conure_run() as report:
            reports.append(report)
            return app.run(part)

    async def afast() -> Any:
        with llamaindex.conure_run() as report:
            reports.append(report)
            return await app.arun(part)

    def counts() -> Counts:
        return Counts(
            sum(len(each.calls) for each in reports),
            sum(each.num_planned for each in reports),
            sum(len(each.calls) for each in reports if len(each.programs) == 1),
        )

    plain = app.run
    return AppCase(
        name,
        None if plain is None else lambda: plain(app.part),
        fast,
        lambda: app.arun(app.part),
        afast,
        counts,
    )
