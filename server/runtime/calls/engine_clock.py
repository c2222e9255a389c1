"""What a prompt token and a step cost on one engine, measured from outside.

An engine computes prompts and outputs in the same steps: a step takes a fixed time and a time per
prompt token, and gives each output one token. A fill therefore takes `steps * step_s + tokens *
prompt_token_s`, also while outputs are decoded. An `EngineClock` fits both by least squares to the
fills that it has seen. If they cannot be told apart, all time belongs to the prompts.

A prompt that was sent to an engine waits while outputs occupy all of its rows. That time does not
count as a fill.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from ..node_state import NodeState

KEEP = 0.998
"""Weight of earlier fills when one is added: an engine becomes slower and quicker with its load."""


class FillMark(NamedTuple):
    """Fills of an engine until a moment."""

    busy_s: float = 0.0
    """Time in which at least one prompt was being filled."""
    num_steps: int = 0
    """Steps of the engine in this time."""


class FillCosts:
    """Moments of the fills of an engine, from which the costs are fitted."""

    def __init__(self) -> None:
        self._steps_steps = 0.0
        self._steps_tokens = 0.0
        self._tokens_tokens = 0.0
        self._steps_s = 0.0
        self._tokens_s = 0.0
        self._count = 0.0

    def add(self, num_steps: int, num_tokens: int, seconds: float) -> None:
        """Add a fill."""
        self._steps_steps = KEEP * self._steps_steps + num_steps * num_steps
        self._steps_tokens = KEEP * self._steps_tokens + num_steps * num_tokens
        self._tokens_tokens = KEEP * self._tokens_tokens + num_tokens * num_tokens
        self._steps_s = KEEP * self._steps_s + num_steps * seconds
        self._tokens_s = KEEP * self._tokens_s + num_tokens * seconds
        self._count = KEEP * self._count + 1

    def fit(self) -> tuple[float, float]:
        """Return the seconds of a step and of a prompt token, both at least 0."""
        if not self._tokens_tokens:
            return 0.0, 0.0
        # As if one more average fill had shown that a step takes no time: only fills of different
        # lengths show the opposite.
        steps_steps = self._steps_steps * (1 + 1 / self._count)
        determinant = steps_steps * self._tokens_tokens - self._steps_tokens**2
        of_step = self._steps_s * self._tokens_tokens - self._tokens_s * self._steps_tokens
        of_token = self._tokens_s * steps_steps - self._steps_s * self._steps_tokens
        if determinant <= 0 or of_step <= 0:
            return 0.0, self._tokens_s / self._tokens_tokens
        return of_step / determinant, max(of_token / determinant, 0.0)


class EngineClock:
    """The fills and outputs of one engine. Times are seconds on one monotonic clock."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._num_filling = 0
        self._num_outputs = 0
        self._fills = FillMark()
        self._changed_s = 0.0
        self._step = 0
        self._costs = FillCosts()
        self._added = FillMark()
        """The end of the last fill in `costs`."""
        self._last = FillMark()
        """The end of the last fill."""
        self._last_step = -1
        self._num_tokens = 0
        """Tokens of the fills that ended in the last step with an end; not in `costs` yet."""

    def read(self, now: float, step: int) -> FillMark:
        """Advance the clock to the time `now`, at which the engine has ended `step` steps."""
        if self._num_filling and self._num_outputs < self._num_rows:
            self._fills = FillMark(
                self._fills.busy_s + max(now - self._changed_s, 0.0),
                self._fills.num_steps + max(step - self._step, 0),
            )
        self._changed_s, self._step = now, step
        return self._fills

    def costs(self) -> tuple[float, float]:
        """Return the seconds of a step and of a prompt token."""
        self._add_last()
        return self._costs.fit()

    def begin_fill(self, now: float, step: int) -> None:
        """Start the fill of a prompt that was sent to the engine."""
        self.read(now, step)
        self._num_filling += 1

    def end_fill(self, now: float, step: int, num_tokens: int | None) -> None:
        """End a fill, for which `num_tokens` were computed; None if its prompt was given up."""
        assert self._num_filling > 0, "a fill that has not begun"
        mark = self.read(now, step)
        self._num_filling -= 1
        if num_tokens is None:
            return
        if step != self._last_step:
            self._add_last()
        self._num_tokens += num_tokens
        self._last, self._last_step = mark, step

    def begin_output(self, now: float, step: int) -> FillMark:
        """Start an output, which takes a row of the engine."""
        mark = self.read(now, step)
        self._num_outputs += 1
        return mark

    def end_output(self, now: float, step: int) -> FillMark:
        """End an output."""
        assert self._num_outputs > 0, "an output that has not begun"
        mark = self.read(now, step)
        self._num_outputs -= 1
        return mark

    def _add_last(self) -> None:
        """Add the fills that ended together, as one."""
        if self._num_tokens:
            num_steps = self._last.num_steps - self._added.num_steps
            seconds = self._last.busy_s - self._added.busy_s
            self._costs.add(num_steps, self._num_tokens, seconds)
            self._added, self._num_tokens = self._last, 0


class Stepped(Protocol):
    """An engine that counts its steps."""

    @property
    def num_steps(self) -> int:
        """Steps that the engine has ended."""
        ...


class CallTimer:
    """Measures the fills and outputs of one call."""

    def __init__(self, state: NodeState) -> None:
        self._state = state
        self._clock = EngineClock(1)
        self._engine: Stepped | None = None
        """The engine of a fill or output that has not ended."""
        self._is_filling = False
        self._num_computed = 0
        """Tokens that were computed for the call before the fill began."""
        self._filled = FillMark()
        self._filled_s = 0.0
        """When the output began."""

    def begin(self, clock: EngineClock, engine: Stepped, now: float) -> None:
        """Start a fill on an engine with this clock."""
        assert self._engine is None, "a call fills one prompt at a time"
        self._clock, self._engine, self._is_filling = clock, engine, True
        clock.begin_fill(now, engine.num_steps)
        self._num_computed = self._num_computed_now()

    def filled(self, now: float) -> None:
        """End the fill, whose tokens are in the usage of the node, and start the output."""
        assert self._engine is not None, "a fill that has not begun"
        assert self._is_filling, "a fill that has not begun"
        self._is_filling = False
        step = self._engine.num_steps
        self._clock.end_fill(now, step, self._num_computed_now() - self._num_computed)
        self._filled, self._filled_s = self._clock.begin_output(now, step), now

    def finish(self, now: float, num_prompt: int) -> None:
        """End the output; add to the usage of the node what a single request would take.

        Args:
            now: the time.
            num_prompt: tokens before the output.
        """
        assert self._engine is not None, "an output that has not begun"
        assert not self._is_filling, "an output that has not begun"
        fills = self._clock.end_output(now, self._engine.num_steps)
        self._engine = None
        step_s, token_s = self._clock.costs()
        usage = self._state.usage
        usage.unshared_fill_s += num_prompt * token_s
        # The last step of the fill gave the first token, and each step of a pause gave one more.
        num_steps = fills.num_steps - self._filled.num_steps + 1
        paused_s = fills.busy_s - self._filled.busy_s
        usage.unpaused_decode_s += max(now - self._filled_s - paused_s + num_steps * step_s, 0.0)

    def stop(self, now: float) -> None:
        """End what has begun, if anything, without a result."""
        if self._engine is None:
            return
        if self._is_filling:
            self._clock.end_fill(now, self._engine.num_steps, None)
        else:
            self._clock.end_output(now, self._engine.num_steps)
        self._engine = None

    def _num_computed_now(self) -> int:
        usage = self._state.usage
        return usage.computed + usage.recomputed
