"""Metrics and usage match the receipts of programs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from conure.server.executor import Executor
from conure.server.metrics import MetricsSnapshot, ServerMetrics
from conure.server.program.status import Receipt
from conure.server.runtime.reporting.receipt import make_receipt
from conure.server.runtime.reporting.single_requests import ServerSpeed
from conure.server.store.journal import JournalStatus

from .inprocess import ServerHarness, call, expr, generate, insert, server_harness
from .runtime.test_program_state import execute

JOURNAL = JournalStatus(
    healthy=True, num_pending=0, num_commits=0, num_records=0, last_seq=0, last_error=None
)


async def series(executor: Executor) -> dict[str, float]:
    page = (await executor.metrics()).decode()
    return {
        " ".join([sample.name, *(text for _, text in sorted(sample.labels.items()))]): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


async def run_some(harness: ServerHarness) -> list[Receipt]:
    """Run two programs that share text, and one that fails."""
    receipts = []
    for tail in ("one", "two"):
        nodes = [
            generate("a", "a long text that both calls start with: " * 4),
            generate("b", "a long text that both calls start with: " * 4, insert("a"), tail),
        ]
        program = await harness.submit(nodes, outputs=["a", "b"])
        await program.end()
        receipts.append((await program.status()).receipt)
    failing = await harness.submit([expr("e", {"parse_json": "{"})], outputs=["e"])
    assert (await failing.end()).status == "failed"
    receipts.append((await failing.status()).receipt)
    assert all(isinstance(receipt, Receipt) for receipt in receipts)
    return receipts  # type: ignore[return-value]  # as was just asserted


async def test_usage_sums_receipts_across_restart(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        receipts = await run_some(harness)
        other = ServerHarness(harness.executor, "other")
        await (await other.submit([expr("e", 1)], outputs=["e"])).end()
    async with server_harness(tmp_path) as harness:
        receipts += await run_some(harness)
        report = await harness.executor.usage(tenant=harness.tenant, since=None, until=None)
        assert report.programs == {"done": 4, "failed": 2}
        total = report.receipts
        assert total.calls == sum(receipt.calls for receipt in receipts) == 8
        prompts = [receipt.prompt_tokens for receipt in receipts]
        assert total.prompt_tokens.logical == sum(prompt.logical for prompt in prompts) > 0
        assert total.prompt_tokens.computed == sum(prompt.computed for prompt in prompts)
        shared = total.prompt_tokens.shared
        assert shared.static == sum(prompt.shared.static for prompt in prompts)
        assert shared.cache == sum(prompt.shared.cache for prompt in prompts)
        decoded = sum(receipt.output_tokens.decoded for receipt in receipts)
        assert total.output_tokens.decoded == decoded > 0
        assert abs(total.wall_s - sum(receipt.wall_s for receipt in receipts)) < 1e-6
        assert total.round_trips_saved == sum(receipt.round_trips_saved for receipt in receipts)
        future = await harness.executor.usage(tenant=harness.tenant, since="9000-01-01", until=None)
        assert (future.programs, future.receipts.calls) == ({}, 0)


async def test_metrics_match_receipts_and_state(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        before = await series(harness.executor)
        assert before["conure_programs"] == 0
        assert before["conure_engines"] == before["conure_engines_wanted"] == 1
        receipts = await run_some(harness)
        open_ = await harness.submit([], open=True)
        after = await series(harness.executor)
        assert after["conure_programs"] == 1
        assert after["conure_programs_ended_total done"] == 2
        assert after["conure_programs_ended_total failed"] == 1
        assert after["conure_calls_total"] == 4
        assert after["conure_call_seconds_count decode"] == 4
        expected = Counter({"computed": 0, "static": 0, "cache": 0, "dynamic": 0, "generated": 0})
        for receipt in receipts:
            expected["computed"] += receipt.prompt_tokens.computed
            expected["static"] += receipt.prompt_tokens.shared.static
            expected["cache"] += receipt.prompt_tokens.shared.cache
            expected["dynamic"] += receipt.prompt_tokens.shared.dynamic
            expected["generated"] += receipt.prompt_tokens.shared.generated
        for source, number in expected.items():
            assert after[f"conure_prompt_tokens_total {source}"] == number
        blocks = [after[f"conure_engine_blocks engine-0 {kind}"] for kind in _KINDS]
        assert sum(blocks) == before["conure_engine_blocks engine-0 free"]
        assert after["conure_engine_tokens_total engine-0 decoded"] > 0
        assert after["conure_journal_healthy"] == 1
        await open_.cancel()


def test_calls_cancelled_in_the_queue_have_no_durations() -> None:
    state = execute([generate("ran", "x"), generate("queued", "y")])
    for node in state.nodes.values():
        node.phase, node.started_at, node.finished_at = "done", 1.0, 2.0
    state.nodes["ran"].usage.logical = 5
    state.finished_at = 2.0
    metrics = ServerMetrics()
    metrics.program_ended(state, make_receipt(state, blocks_held=0, speed=ServerSpeed({})))
    page = metrics.render(MetricsSnapshot(0, 0, 0, 0, 0, [], 0, JOURNAL)).decode()
    for stage in ("queued", "prefill", "decode"):
        assert f'conure_call_seconds_count{{stage="{stage}"}} 1.0' in page.splitlines()


async def test_programs_and_tenants_create_no_series(tmp_path: Path) -> None:
    async with server_harness(tmp_path, functions={"f": len, "g": len}) as harness:
        await run_some(harness)
        before = (await series(harness.executor)).keys()
        assert len(before) < 200
        for number in range(5):
            other = ServerHarness(harness.executor, f"tenant-{number}")
            nodes = [generate(f"n{number}", "x"), call("c", "f", args={"obj": "abc"})]
            await (await other.submit(nodes, outputs=["c"])).end()
        assert (await series(harness.executor)).keys() == before


_KINDS = ("free", "held", "cached")
