"""The parts of the server that running programs use."""

from __future__ import annotations

from collections.abc import Mapping

from ..engines.fleet import Fleet
from ..engines.protocol import Engine
from ..functions.registry import FunctionRegistry
from ..functions.threads import FunctionThreads
from ..prompts.served_model import ServedModel
from ..scheduling.scheduler import Scheduler
from ..store.journal import Journal
from .admission.call_quota import CallQuota
from .admission.load import LoadMonitor
from .calls.prompt_encoder import PromptEncoder
from .calls.suspects import SuspectGate
from .clock import SteadyClock
from .program_watch import ProgramWatch
from .quota import QuotaLimits
from .reporting.request_times import CallCounts, RequestTimeMeter
from .reporting.single_requests import EngineSpeed, ServerSpeed
from .turns import Turns


class RuntimeServices:
    """The server's components, shared by all of its programs.

    `journal`, `fleet` and `model` are set while the server starts.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        call_quota: CallQuota,
        load: LoadMonitor,
        functions: FunctionRegistry,
        *,
        idle_s: float | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.call_quota = call_quota
        self.load = load
        self.idle_s = idle_s
        """Seconds after which a program is ended that waits for a client that is gone."""
        self.clock = SteadyClock()
        self.functions = functions
        # Separate from the server's own threads, because functions may block for a long time.
        self.function_threads = FunctionThreads()
        self.encoder = PromptEncoder()
        self.turns = Turns()
        self.quota_limits = QuotaLimits()
        self.watch = ProgramWatch()
        self.suspects = SuspectGate()
        self.request_times = RequestTimeMeter(
            lambda: CallCounts(scheduler.num_running, load.num_observed)
        )
        self.fleet: Fleet | None = None
        self.open_journal: Journal | None = None
        self.served_model: ServedModel | None = None

    @property
    def journal(self) -> Journal:
        """The open journal."""
        assert self.open_journal is not None, "the server has not started"
        return self.open_journal

    @property
    def model(self) -> ServedModel:
        """The model that the engines run."""
        assert self.served_model is not None, "no engine has started"
        return self.served_model

    @property
    def engines(self) -> Mapping[str, Engine]:
        """The live engines by name."""
        return {} if self.fleet is None else self.fleet.engines

    @property
    def num_sequences(self) -> int:
        """Calls that the live engines run at once."""
        return sum(engine.hello.limits.max_sequences for engine in self.engines.values())

    def server_speed(self) -> ServerSpeed:
        """Return what has been measured of requests and of the live engines."""
        speeds: dict[str, EngineSpeed] = {}
        for name, engine in self.engines.items():
            limits, costs = engine.hello.limits, engine.cost_meter.costs
            if costs is not None:
                speeds[name] = EngineSpeed(costs, limits.step_tokens, limits.max_sequences)
        return ServerSpeed(speeds, self.request_times.times)

    def engine(self, name: str) -> Engine | None:
        """Return a live engine, or None if it is dead."""
        return self.engines.get(name)
