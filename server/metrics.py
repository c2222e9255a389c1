"""What operators watch: counts since the start of this process and the state of the moment.

The names and labels of everything under `/metrics` but HTTP itself. Programs are counted when
they end, by their receipts; engines and the journal are asked when somebody looks.

Knows Prometheus' kinds and text. Refuses to know HTTP, and how anything came about.

Kept true: no label comes from a request. Tenants, programs and models have none (what a
tenant's programs cost is an answer of the journal's), so the number of series depends on the
number of engines alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .program.ir import Generate
from .program.status import Receipt
from .runs.execution import Execution
from .service import EngineInfo
from .store.journal import JournalStatus

SECONDS = (0.01, 0.05, 0.25, 1.0, 5.0, 30.0, 120.0, 600.0)
"""Upper ends of what calls and programs take."""


class Moment(NamedTuple):
    """What is so now."""

    num_programs: int
    """Accepted and not ended."""
    num_calls: int
    """Of these, LLM calls in their graphs that have not ended."""
    max_calls: int
    num_waiting: int
    num_decisions: int
    """Times that an engine was looked for, since the start."""
    engines: list[EngineInfo]
    num_engines: int
    """That there should be."""
    journal: JournalStatus


class Metrics:
    """The counters of one server."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._programs = Counter(
            "conure_programs_ended", "Programs that ended.", ["status"], registry=registry
        )
        self._program_s = Histogram(
            "conure_program_seconds",
            "From acceptance to end of a program.",
            buckets=SECONDS,
            registry=registry,
        )
        self._calls = Counter("conure_calls", "LLM calls of ended programs.", registry=registry)
        self._call_s = Histogram(
            "conure_call_seconds",
            "What LLM calls of ended programs spent waiting (queued), in their prompts (prefill) "
            "and writing (decode).",
            ["stage"],
            buckets=SECONDS,
            registry=registry,
        )
        self._prompt_tokens = Counter(
            "conure_prompt_tokens",
            "Prompt tokens of ended programs: computed, or shared and why; recomputed and "
            "discarded come on top.",
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
            "conure_round_trips_saved", "Calls that no client had to send.", registry=registry
        )
        self._block_seconds = Counter(
            "conure_kv_block_seconds", "Blocks of KV times how long held.", registry=registry
        )
        self._engines_lost = Counter("conure_engines_lost", "Engines that died.", registry=registry)

    def program_ended(self, execution: Execution, receipt: Receipt) -> None:
        """A program has ended, and its end is on disk."""
        self._programs.labels(execution.phase).inc()
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
        for state in execution.nodes.values():
            if isinstance(state.node, Generate) and state.started_at is not None:
                self._call_s.labels("queued").observe(state.usage.queued_s)
                self._call_s.labels("prefill").observe(state.usage.prefill_s)
                self._call_s.labels("decode").observe(state.usage.decode_s)

    def engine_lost(self) -> None:
        """An engine died."""
        self._engines_lost.inc()

    def page(self, moment: Moment) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self._registry) + generate_latest(_State(moment))


class _State(Collector):
    """A moment, as families of series."""

    def __init__(self, moment: Moment) -> None:
        self._moment = moment

    def collect(self) -> Iterator[Metric]:
        moment = self._moment
        yield _gauge("conure_programs", "Programs that have not ended.", moment.num_programs)
        yield _gauge("conure_calls_open", "LLM calls that have not ended.", moment.num_calls)
        yield _gauge("conure_calls_open_limit", "How many of them there may be.", moment.max_calls)
        yield _gauge("conure_calls_waiting", "LLM calls that wait for room.", moment.num_waiting)
        yield _counter("conure_decisions", "Engines looked for.", moment.num_decisions)
        yield _gauge("conure_engines", "Engines that answer.", len(moment.engines))
        yield _gauge("conure_engines_wanted", "Engines there should be.", moment.num_engines)
        yield from _of_engines(moment.engines)
        journal = moment.journal
        yield _gauge("conure_journal_healthy", "The disk took the last commit.", journal.healthy)
        yield _gauge("conure_journal_pending", "Batches not on disk yet.", journal.num_pending)
        yield _counter("conure_journal_commits", "Commits, each an fsync.", journal.num_commits)
        yield _counter("conure_journal_records", "Records on disk.", journal.num_records)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _of_engines(engines: Iterable[EngineInfo]) -> Iterator[Metric]:
    blocks = GaugeMetricFamily(
        "conure_engine_blocks",
        "Blocks of KV: free, held by contexts, or cached.",
        labels=["engine", "state"],
    )
    contexts = GaugeMetricFamily("conure_engine_contexts", "Live contexts.", labels=["engine"])
    steps = CounterMetricFamily(
        "conure_engine_steps", "Steps since the engine began.", labels=["engine"]
    )
    tokens = CounterMetricFamily(
        "conure_engine_tokens",
        "Tokens since the engine began: of prompts computed, shared, taken from cache or "
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
