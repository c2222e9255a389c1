"""Prometheus metrics: counters since the start of the process, and gauges of its current state.

Defines the names and labels of everything under `/metrics` except HTTP itself. Programs are counted
when they end, from their receipts; engines and the journal are queried at each scrape.

Invariant: no label value is from a request. Tenants, programs and models are not labels
(`/v1/usage` has a tenant's costs), so the number of series depends on the number of engines only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .program.ir import GenerateNode
from .program.status import Receipt
from .runtime.calls.pins import PinTotals
from .runtime.program_state import ProgramState
from .service import EngineInfo
from .store.journal import JournalStatus

SECONDS = (0.01, 0.05, 0.25, 1.0, 5.0, 30.0, 120.0, 600.0)
"""Histogram buckets of the durations of calls and programs."""


class MetricsSnapshot(NamedTuple):
    """The current state of the server."""

    num_programs: int
    """Programs accepted and not ended."""
    num_calls: int
    """LLM calls in these programs that have not ended."""
    max_calls: int
    num_waiting: int
    num_decisions: int
    """Number of times that an engine was looked for, since the start."""
    engines: list[EngineInfo]
    num_engines: int
    """Configured number of engines."""
    journal: JournalStatus
    pins: PinTotals = PinTotals()


class ServerMetrics:
    """The counters of one server."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._programs = Counter(
            "conure_programs_ended", "Programs that ended.", ["status"], registry=registry
        )
        self._program_s = Histogram(
            "conure_program_seconds",
            "Time from acceptance to end of a program.",
            buckets=SECONDS,
            registry=registry,
        )
        self._calls = Counter("conure_calls", "LLM calls of ended programs.", registry=registry)
        self._call_s = Histogram(
            "conure_call_seconds",
            "Time that LLM calls of ended programs spent waiting (queued), in their prompts "
            "(prefill) and writing (decode).",
            ["stage"],
            buckets=SECONDS,
            registry=registry,
        )
        self._prompt_tokens = Counter(
            "conure_prompt_tokens",
            "Prompt tokens of ended programs: computed, or shared by origin; recomputed and "
            "discarded tokens are additional.",
            ["source"],
            registry=registry,
        )
        self._output_tokens = Counter(
            "conure_output_tokens",
            "Output tokens of ended programs: decoded by the model, forced by a grammar, or "
            "discarded.",
            ["kind"],
            registry=registry,
        )
        self._round_trips = Counter(
            "conure_round_trips_saved",
            "Calls that clients did not have to send separately.",
            registry=registry,
        )
        self._block_seconds = Counter(
            "conure_kv_block_seconds",
            "KV blocks multiplied by the time they were held.",
            registry=registry,
        )
        self._deadlines = Counter(
            "conure_deadlines",
            "Deadlines of outputs of ended programs: met, missed, or open if the program ended "
            "earlier without the value.",
            ["result"],
            registry=registry,
        )
        self._engines_lost = Counter("conure_engines_lost", "Engines that died.", registry=registry)

    def program_not_resumed(self, status: str) -> None:
        """Count a program that a start of the server ended instead of resuming it."""
        self._programs.labels(status).inc()

    def program_ended(self, program_state: ProgramState, receipt: Receipt) -> None:
        """Count a program whose end is durable. May run in a thread."""
        self._programs.labels(program_state.phase).inc()
        self._program_s.observe(receipt.wall_s)
        self._calls.inc(receipt.calls)
        prompt, shared, output = (
            receipt.prompt_tokens,
            receipt.prompt_tokens.shared,
            receipt.output_tokens,
        )
        sources = {
            "computed": prompt.computed,
            "static": shared.static,
            "dynamic": shared.dynamic,
            "generated": shared.generated,
            "cache": shared.cache,
            "recomputed": prompt.recomputed,
            "discarded": prompt.discarded,
        }
        for source, number in sources.items():
            self._prompt_tokens.labels(source).inc(number)
        kinds = {"decoded": output.decoded, "forced": output.forced, "discarded": output.discarded}
        for kind, number in kinds.items():
            self._output_tokens.labels(kind).inc(number)
        self._round_trips.inc(receipt.round_trips_saved)
        self._block_seconds.inc(receipt.kv_block_seconds)
        for name in program_state.graph.deadlines:
            self._deadlines.labels(_deadline_result(program_state, name)).inc()
        queued_s, prefill_s, decode_s = map(self._call_s.labels, ("queued", "prefill", "decode"))
        for state in program_state.nodes.values():
            if isinstance(state.node, GenerateNode) and state.usage.has_begun:
                queued_s.observe(state.usage.queued_s)
                prefill_s.observe(state.usage.prefill_s)
                decode_s.observe(state.usage.decode_s)

    def engine_lost(self) -> None:
        """Count an engine that died."""
        self._engines_lost.inc()

    def render(self, snapshot: MetricsSnapshot) -> bytes:
        """Return all metrics in Prometheus text format."""
        return generate_latest(self._registry) + generate_latest(_SnapshotCollector(snapshot))


def _deadline_result(program_state: ProgramState, output: str) -> str:
    if output in program_state.missed_deadlines:
        return "missed"
    return "met" if output in program_state.values else "open"


class _SnapshotCollector(Collector):
    """Exposes a snapshot as metric families."""

    def __init__(self, snapshot: MetricsSnapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        snapshot = self._snapshot
        yield _gauge("conure_programs", "Programs that have not ended.", snapshot.num_programs)
        yield _gauge("conure_calls_open", "LLM calls that have not ended.", snapshot.num_calls)
        yield _gauge(
            "conure_calls_open_limit", "Maximum number of open LLM calls.", snapshot.max_calls
        )
        yield _gauge(
            "conure_calls_waiting", "LLM calls that wait for an engine.", snapshot.num_waiting
        )
        yield _counter(
            "conure_decisions", "Times that an engine was looked for.", snapshot.num_decisions
        )
        yield _gauge("conure_engines", "Engines that respond.", len(snapshot.engines))
        yield _gauge("conure_engines_wanted", "Configured number of engines.", snapshot.num_engines)
        yield from _engine_families(snapshot.engines)
        yield from _pin_families(snapshot.pins)
        journal = snapshot.journal
        yield _gauge(
            "conure_journal_healthy",
            "Whether the journal can be read and written.",
            journal.healthy,
        )
        yield _gauge(
            "conure_journal_pending", "Batches that are not durable yet.", journal.num_pending
        )
        yield _counter("conure_journal_commits", "Commits, each an fsync.", journal.num_commits)
        yield _counter("conure_journal_records", "Records committed.", journal.num_records)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _pin_families(pins: PinTotals) -> Iterator[Metric]:
    yield _gauge("conure_pins", "Pinned versions of procedures.", pins.num_pins)
    yield _gauge("conure_pinned_tokens", "Tokens of pinned prefixes.", pins.num_tokens)
    yield _gauge(
        "conure_pinned_blocks",
        "KV blocks that pinned prefixes keep on all engines.",
        pins.num_held_blocks,
    )
    yield _counter(
        "conure_pin_computed_tokens", "Tokens computed for pins.", pins.num_computed_tokens
    )
    yield _counter("conure_pins_expired", "Pins that ended by their time.", pins.num_expired)
    yield _counter(
        "conure_pins_released",
        "Times that an engine's pins were released because its memory was short.",
        pins.num_releases,
    )


def _engine_families(engines: Iterable[EngineInfo]) -> Iterator[Metric]:
    blocks = GaugeMetricFamily(
        "conure_engine_blocks",
        "Blocks of KV: free, held by contexts, or cached.",
        labels=["engine", "state"],
    )
    contexts = GaugeMetricFamily("conure_engine_contexts", "Live contexts.", labels=["engine"])
    steps = CounterMetricFamily(
        "conure_engine_steps", "Steps since the start of the engine.", labels=["engine"]
    )
    tokens = CounterMetricFamily(
        "conure_engine_tokens",
        "Tokens since the start of the engine: of prompts computed, shared, taken from cache or "
        "recomputed, and of outputs decoded.",
        labels=["engine", "kind"],
    )
    for engine in engines:
        report = engine.report
        blocks.add_metric([engine.id, "free"], report.num_free)
        blocks.add_metric([engine.id, "held"], report.num_held)
        blocks.add_metric([engine.id, "cached"], report.num_cached)
        contexts.add_metric([engine.id], report.num_contexts)
        steps.add_metric([engine.id], report.num_steps)
        tokens.add_metric([engine.id, "computed"], report.num_computed_tokens)
        tokens.add_metric([engine.id, "shared"], report.num_shared_tokens)
        tokens.add_metric([engine.id, "cached"], report.num_cached_tokens)
        tokens.add_metric([engine.id, "recomputed"], report.num_recomputed_tokens)
        tokens.add_metric([engine.id, "decoded"], report.num_decoded_tokens)
    yield from (blocks, contexts, steps, tokens)
