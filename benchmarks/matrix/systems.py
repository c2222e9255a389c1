"""The ways of sending an application to a server; see `run`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from typing import NamedTuple

import httpx
from langchain_core.language_models import BaseChatModel

from apps.client import AppAnswer, AppClient
from apps.scaled_workloads import ScheduledProgram
from conure.adapters.client import AsyncClient
from conure.adapters.client import Client as ConureClient
from conure.adapters.langchain import ChatConure, accelerate, to_program
from conure.cli.delayed_connection import delayed
from matrix.chains import Chain, MakeModel, Runner, run_chains
from matrix.vllm_server import MODEL_NAME

WITHOUT = "whole-without-"
OPENAI_CLIENTS = ("openai", "peer")
"""Systems that need the package `langchain-openai`."""
SYSTEMS = (
    *("requests", "whole", "langchain", "openai", "accelerated", "program", "peer"),
    *(f"{WITHOUT}{part}" for part in ("order", "holds", "order-and-holds", "starts-between-ends")),
)
SAME_PROMPTS = (("requests", "whole"), ("langchain", "openai", "accelerated", "program"))
"""Systems that send the same text to the same model."""

Run = Callable[[Sequence[ScheduledProgram], str], Awaitable[list[AppAnswer]]]


class Side(NamedTuple):
    """One system on its server."""

    name: str
    url: str
    run: Run


@contextmanager
def side_of(name: str, url: str, round_trip_s: float, loop: asyncio.Runner) -> Iterator[Side]:
    """Yield a system whose round trip to its server is longer.

    Args:
        name: one of `SYSTEMS`.
        url: address of the server.
        round_trip_s: added by a proxy for chains, and by sleeps of the client for `requests` and
            `whole`.
        loop: runs the system.
    """
    if name == "requests" or name.startswith("whole"):
        with _http_client(url, round_trip_s, loop, is_whole=name != "requests") as sender:
            yield Side(name, url, sender.run)
        return
    with ExitStack() as stack:
        far = stack.enter_context(delayed(url, round_trip_s)) if round_trip_s else url
        client = stack.enter_context(ConureClient(far))
        programs = AsyncClient(far)
        stack.callback(lambda: loop.run(programs.close()))

        def conure_model(max_tokens: int) -> BaseChatModel:
            return ChatConure(client=client, temperature=0, max_tokens=max_tokens, ignore_eos=True)

        async def run_plain(chain: Chain) -> dict[str, str]:
            found: dict[str, str] = await chain.ainvoke({})
            return found

        def plain(chain: Chain) -> Runner:
            return lambda: run_plain(chain)

        def accelerated(chain: Chain) -> Runner:
            fast = accelerate(chain)
            return lambda: run_plain(fast)

        def whole(chain: Chain) -> Runner:
            compiled = to_program(chain)

            async def run() -> dict[str, str]:
                found: dict[str, str] = await compiled.arun(programs, {})
                return found

            return run

        model: MakeModel = conure_model
        if name in OPENAI_CLIENTS:
            model = _openai_model(f"{far}/v1")
        prepare = {"accelerated": accelerated, "program": whole}.get(name, plain)

        async def run_all(sent: Sequence[ScheduledProgram], seed: str) -> list[AppAnswer]:
            return await run_chains(sent, seed, model, prepare)

        yield Side(name, url, run_all)


@contextmanager
def _http_client(
    url: str, round_trip_s: float, loop: asyncio.Runner, *, is_whole: bool
) -> Iterator[AppClient]:
    """Yield a client whose connections stay open, as those of chains do."""
    stack = AsyncExitStack()

    async def opened() -> AppClient:
        limits = httpx.Limits(max_connections=None)
        http = httpx.AsyncClient(base_url=url, timeout=600, limits=limits)
        await stack.enter_async_context(http)
        client = AppClient(http, whole=is_whole, round_trip_s=round_trip_s)
        return await stack.enter_async_context(client)

    try:
        yield loop.run(opened())
    finally:
        loop.run(stack.aclose())


def _openai_model(url: str) -> MakeModel:
    def model(max_tokens: int) -> BaseChatModel:
        from langchain_openai import ChatOpenAI  # type: ignore[import-not-found,unused-ignore]

        found: BaseChatModel = ChatOpenAI(
            base_url=url,
            api_key="none",
            model=MODEL_NAME,
            temperature=0,
            max_tokens=max_tokens,
            extra_body={"ignore_eos": True},
            max_retries=0,
        )
        return found

    return model
