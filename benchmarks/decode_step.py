"""Cost of an engine step, compared with the lower bound of the machine.

    decode     one token for each of B contexts, compared with the time to read the weights and
               the KV of these contexts at the bandwidth measured here
    prefill    one prompt in one step, compared with the rate of a large matrix product measured
               here

    python benchmarks/decode_step.py [--device cuda] [--config FILE] [--batch 1 64]
        [--context 1024] [--prefill 4096] [--repeats 30] [--tiny] [--profile] [--out FOLDER]

The model has the shape of Llama 3 8B or of another config, and random weights created on the
device. A step is timed from the rows to the ids of the next tokens, as the engine core calls it:
planning, copies, the model, sampling and reading are included. The captured part alone
(`replay`, by device events) and the same step without capture (`eager`) are reported, too.

Accuracy is checked first: a small model of the same family must produce the same tokens and
logprobs on this device as on the CPU in float32, captured and not captured, and captured steps
of the large model must have the same logprobs as others. Otherwise nothing is timed.

`--tiny` runs everything with a small shape, also on `--device cpu`; the figures are meaningless.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import transformers

from conure.engine.config import EngineConfig
from conure.engine.protocol import SamplingParams
from conure.engine.runner.base import ScheduledSequence
from conure.engine.runner.torch_runner import TorchModelRunner
from conure.engine.testing import dummy_checkpoint
from gpu.shapes import LLAMA_3_8B, SMALL

TARGETS: Final = {"decode": 0.80, "prefill": 0.55}
"""Target shares of the lower bound."""
RESULTS: Final = Path(__file__).parent / "results"
BLOCK: Final = 16
WARM_STEPS: Final = 5
COPY_BYTES: Final = 2**32
MATRIX: Final = 8192
LOGPROB_ERROR: Final = {"float32": 2e-3, "bfloat16": 0.25}
"""Maximum difference of a logprob, for additions in another order."""


class MachineRates(NamedTuple):
    """Measured rates of the device."""

    bytes_per_s: float
    """Bandwidth of a large copy, counting bytes read and written."""
    flops: float
    """Rate of a large matrix product in the model's dtype."""


class StepFigure(NamedTuple):
    """The measurement of one step; times in milliseconds."""

    name: str
    batch: int
    context: int
    tokens: int
    step_ms: float
    lower_bound_ms: float
    share: float
    """Lower bound divided by the step time."""
    replay_ms: float | None
    eager_ms: float | None
    runs: list[float]

    def line(self) -> str:
        """Return the figure as one line of a table."""
        target = TARGETS[self.name]
        others = ", ".join(
            f"{name} {value:.3f} ms"
            for name, value in (("replay", self.replay_ms), ("eager", self.eager_ms))
            if value is not None
        )
        verdict = "met" if self.share >= target else "MISSED"
        return (
            f"{self.name:8} batch {self.batch:3} after {self.context:5} tokens: "
            f"{self.step_ms:8.3f} ms, bound {self.lower_bound_ms:8.3f} ms: {self.share:6.1%}, "
            f"target {target:.0%} {verdict} ({others})"
        )


class DecodingContexts:
    """Rows that decode, driven like the engine core does; blocks are in random order."""

    def __init__(self, runner: TorchModelRunner, num: int, length: int, *, seed: int = 0) -> None:
        chance = random.Random(seed)
        self.runner = runner
        self._free = list(range(runner.limits.num_blocks))
        chance.shuffle(self._free)
        width = runner.limits.step_tokens
        self.rows = [
            ScheduledSequence(index, chance.choices(range(256), k=length), 0, 0, [])
            for index in range(num)
        ]
        for row in self.rows:
            # Prefill all but the last token, which is the first one to decode.
            while row.start < length - 1:
                self._grow(row, min(width, length - 1 - row.start))
                runner.run([row], [])
                row.start += row.num_new

    def step(self, sampling: SamplingParams, tokens: Sequence[int] | None = None) -> list[int]:
        """Decode one token per row; append it, or `tokens`. Return the sampled tokens."""
        self.prepare(sampling)
        result = self.runner.run(self.rows, [])
        for row, token in zip(self.rows, tokens or result, strict=True):
            row.start += 1
            row.ids.append(token)
        return result

    def prepare(self, sampling: SamplingParams) -> None:
        """Prepare the rows of the next step."""
        for row in self.rows:
            self._grow(row, 1)
            row.sampling, row.num_prompt = sampling, len(row.ids)

    def _grow(self, row: ScheduledSequence, num_new: int) -> None:
        row.num_new = num_new
        while len(row.blocks) * BLOCK < row.start + num_new:
            row.blocks.append(self._free.pop())


def main(arguments: list[str] | None = None) -> int:
    """Check, measure, print and write the results."""
    options = parse(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        checked = check(folder, options.device)
        print(
            f"small model: {checked} tokens and logprobs as on the CPU, captured and not captured"
        )
        config = options.config or write_config(folder / "large.json", is_tiny=options.tiny)
        runner = make_runner(str(config), options)
        print(f"{runner.description} on {_device_name(runner)}")
        worst = check_recorded(runner, max(options.batch))
        print(f"large model: logprobs of captured steps within {worst:.3f} of the others")
        machine = measure(runner, tiny=options.tiny)
        rates = machine.bytes_per_s / 1e9, machine.flops / 1e12
        print("copy {:.0f} GB/s, product {:.1f} TFLOP/s".format(*rates))
        figures = [decode(runner, batch, options, machine) for batch in options.batch]
        figures.append(prefill(runner, options, machine))
        for figure in figures:
            print(figure.line())
        if options.profile:
            profile(runner, max(options.batch), options.context)
    record = {
        "device": _device_name(runner),
        "model": runner.description,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "copy_bytes_per_s": machine.bytes_per_s,
        "product_flops": machine.flops,
        "figures": [figure._asdict() for figure in figures],
    }
    out = options.out
    if out is None and runner._model.device.type == "cuda" and not options.tiny:
        out = RESULTS
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        name = "-".join(_device_name(runner).lower().split())
        path = out / f"decode_step-{name}.json"
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"written to {path}")
    return 0


def check(folder: Path, device: str) -> int:
    """Compare a small model on the device with the CPU; return the number of tokens.

    Raises:
        AssertionError: if they differ by more than rounding.
    """
    config = write_config(folder / "small.json", is_tiny=True, dtype="float32")
    model = dummy_checkpoint.write(str(config), folder / "small", dtype="float32")
    limits: dict[str, Any] = {"num_blocks": 256, "block_size": BLOCK, "max_sequences": 8}
    device_runner = TorchModelRunner(
        EngineConfig(model=str(model), dtype="float32", device=device, **limits)
    )
    cpu_runner = TorchModelRunner(
        EngineConfig(model=str(model), dtype="float32", device="cpu", **limits)
    )
    with_logprobs = SamplingParams(max_tokens=64, logprobs=2)
    sampled = SamplingParams(max_tokens=64, temperature=0.8, top_p=0.95, seed=11)
    num = 0
    for batch in (1, 3, 8):
        pairs = [
            DecodingContexts(runner, batch, 40, seed=batch)
            for runner in (cpu_runner, device_runner)
        ]
        recorded = device_runner._graphs
        for sampling in (with_logprobs, SamplingParams(max_tokens=64), sampled) * 4:
            # Every third round is not captured.
            device_runner._graphs = None if num % 3 == 2 else recorded
            expected = pairs[0].step(sampling)
            result = pairs[1].step(sampling, expected)
            for ours, theirs, row, other in zip(
                expected, result, pairs[0].rows, pairs[1].rows, strict=True
            ):
                if sampling is with_logprobs:
                    _assert_same_logprob(row, other)
                else:
                    assert ours == theirs, f"the device chose {theirs}, the CPU {ours}"
                num += 1
        device_runner._graphs = recorded
    return num


def check_recorded(runner: TorchModelRunner, batch: int) -> float:
    """Compare captured decode steps with others; return the largest logprob difference.

    Raises:
        AssertionError: if it exceeds rounding.
    """
    with_logprobs = SamplingParams(max_tokens=64, logprobs=1)
    recorded = runner._graphs
    contexts = [DecodingContexts(runner, batch, 50, seed=1)]
    worst = 0.0
    for _ in range(4):
        contexts[0].prepare(with_logprobs)
        result = []
        # Run the same rows twice: the second run writes the same keys and values again.
        for graphs in (recorded, None):
            runner._graphs = graphs
            tokens = runner.run(contexts[0].rows, [])
            result.append([row.logprob for row in contexts[0].rows])
        runner._graphs = recorded
        for one, other in zip(*result, strict=True):
            assert one is not None
            assert other is not None
            worst = max(worst, abs(one.top[0][1] - other.top[0][1]))
        for row, token in zip(contexts[0].rows, tokens, strict=True):
            row.start += 1
            row.ids.append(token)
    bound = LOGPROB_ERROR.get(_dtype_name(runner), 0.25)
    assert worst <= bound, f"a logprob of a captured step is {worst} off"
    return worst


def measure(runner: TorchModelRunner, *, tiny: bool) -> MachineRates:
    """Measure the device's bandwidth and its rate of matrix products."""
    device, dtype = runner._model.device, runner._model.dtype
    size = COPY_BYTES >> 8 if tiny else COPY_BYTES
    copy_s = _copy_s(size, device)
    side = MATRIX >> 4 if tiny else MATRIX
    one, other = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(one)
    product_s = _seconds(lambda: torch.mm(one, other, out=out), device)
    return MachineRates(2 * size / copy_s, 2 * side**3 / product_s)


def _copy_s(size: int, device: torch.device) -> float:
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _seconds(lambda: target.copy_(source), device)


def decode(
    runner: TorchModelRunner, batch: int, options: argparse.Namespace, machine: MachineRates
) -> StepFigure:
    """Time decode steps of `batch` contexts."""
    contexts = DecodingContexts(runner, batch, options.context)
    greedy = SamplingParams(max_tokens=options.repeats * 4)
    runs = _steps(contexts, greedy, options.repeats)
    replay_ms = None
    if runner._graphs is not None and (replay := runner._graphs.last_replay) is not None:
        with torch.inference_mode():
            replay_ms = 1e3 * _seconds(replay, runner._model.device)
    recorded, runner._graphs = runner._graphs, None
    eager = _steps(contexts, greedy, max(3, options.repeats // 3))
    runner._graphs = recorded
    length = len(contexts.rows[0].ids)
    num_bytes = _weight_bytes(runner) + batch * options.context * _token_bytes(runner)
    lower_bound_ms = 1e3 * num_bytes / machine.bytes_per_s
    step_ms = statistics.median(runs)
    assert length < runner.limits.context_len
    return StepFigure(
        name="decode",
        batch=batch,
        context=options.context,
        tokens=batch,
        step_ms=step_ms,
        lower_bound_ms=lower_bound_ms,
        share=lower_bound_ms / step_ms,
        replay_ms=replay_ms,
        eager_ms=statistics.median(eager) if recorded is not None else None,
        runs=runs,
    )


def prefill(
    runner: TorchModelRunner, options: argparse.Namespace, machine: MachineRates
) -> StepFigure:
    """Time the prefill of one prompt in one step."""
    num = min(options.prefill, runner.limits.step_tokens, runner.limits.context_len - 1)
    chance = random.Random(2)
    blocks = list(range(-(-num // BLOCK)))
    chance.shuffle(blocks)
    row = ScheduledSequence(
        0, chance.choices(range(256), k=num), 0, num, blocks, SamplingParams(max_tokens=1), num
    )
    runs = []
    for _ in range(2 + max(3, options.repeats // 3)):
        begin = time.perf_counter()
        runner.run([row], [])
        runs.append(1e3 * (time.perf_counter() - begin))
    runs = runs[2:]
    lower_bound_ms = 1e3 * _prefill_flops(runner, num) / machine.flops
    step_ms = statistics.median(runs)
    return StepFigure(
        "prefill", 1, 0, num, step_ms, lower_bound_ms, lower_bound_ms / step_ms, None, None, runs
    )


def profile(runner: TorchModelRunner, batch: int, length: int) -> None:
    """Print the time of each kernel in a decode step."""
    contexts = DecodingContexts(runner, batch, length)
    greedy = SamplingParams(max_tokens=64)
    for _ in range(WARM_STEPS):
        contexts.step(greedy)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if runner._model.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        contexts.step(greedy)
    order = "self_device_time_total" if len(activities) > 1 else "self_cpu_time_total"
    print(profiler.key_averages().table(sort_by=order, row_limit=25))


def _steps(contexts: DecodingContexts, sampling: SamplingParams, repeats: int) -> list[float]:
    """Return the milliseconds of each decode step."""
    runs = []
    for index in range(WARM_STEPS + repeats):
        contexts.prepare(sampling)
        begin = time.perf_counter()
        result = contexts.runner.run(contexts.rows, [])
        end = time.perf_counter()
        for row, token in zip(contexts.rows, result, strict=True):
            row.start += 1
            row.ids.append(token)
        if index >= WARM_STEPS:
            runs.append(1e3 * (end - begin))
    return runs


def _seconds(work: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """Return the seconds of one call on the device, the best of three series."""
    result = []
    for _ in range(3):
        work()
        _wait(device)
        begin = time.perf_counter()
        for _ in range(repeats):
            work()
        _wait(device)
        result.append((time.perf_counter() - begin) / repeats)
    return min(result)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _assert_same_logprob(row: ScheduledSequence, other: ScheduledSequence) -> None:
    ours, theirs = row.logprob, other.logprob
    assert ours is not None
    assert theirs is not None
    difference = abs(ours.top[0][1] - theirs.top[0][1])
    assert difference <= LOGPROB_ERROR["float32"], f"a logprob is {difference} off"


def _weight_bytes(runner: TorchModelRunner) -> int:
    """Return the bytes of the weights that a step reads: all but the input embedding."""
    model: Any = runner._model
    total: int = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    embedding = model.get_input_embeddings().weight
    is_shared = embedding is model.get_output_embeddings().weight
    if not is_shared:
        total -= embedding.numel() * embedding.element_size()
    return total


def _token_bytes(runner: TorchModelRunner) -> int:
    element: int = runner._model.dtype.itemsize
    return element * sum(
        layer.kv_heads * (layer.key_dim + layer.value_dim)
        for index, layer in enumerate(runner.layers)
        if layer.source == index
    )


def _prefill_flops(runner: TorchModelRunner, num: int) -> float:
    """Return the operations of a prompt: products with weights, and causal attention."""
    model: Any = runner._model
    config = model.config
    output = model.get_output_embeddings()
    inner = sum(weight.numel() for weight in model.parameters())
    inner -= model.get_input_embeddings().weight.numel()
    if output.weight is not model.get_input_embeddings().weight:
        inner -= output.weight.numel()
    attention = sum(
        2 * config.num_attention_heads * (layer.key_dim + layer.value_dim) * num * (num + 1) / 2
        for layer in runner.layers
    )
    return float(2 * inner * num + 2 * output.weight.numel() + attention)


def make_runner(config: str, options: argparse.Namespace) -> TorchModelRunner:
    """Return a runner of random weights with room for all steps."""
    max_batch = max(options.batch)
    length = max(options.context + 5 * WARM_STEPS + 2 * options.repeats, 256)
    num_blocks = max_batch * -(-length // BLOCK) + -(-options.prefill // BLOCK) + 16
    return TorchModelRunner(
        EngineConfig(
            dummy_weights=config,
            num_blocks=num_blocks,
            block_size=BLOCK,
            max_sequences=max_batch,
            step_tokens=max(options.prefill, 512),
            device=options.device,
        )
    )


def write_config(path: Path, *, is_tiny: bool, **changes: Any) -> Path:
    """Write the config of Llama 3 8B, or of a small model of its kind; return `path`."""
    config = {**LLAMA_3_8B, **(SMALL if is_tiny else {}), **changes}
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def _device_name(runner: TorchModelRunner) -> str:
    device = runner._model.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def _dtype_name(runner: TorchModelRunner) -> str:
    return str(runner._model.dtype).removeprefix("torch.")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:N or auto")
    parser.add_argument("--config", type=Path, help="a config.json; default: Llama 3 8B")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64], metavar="B")
    parser.add_argument("--context", type=int, default=1024, help="context length of a decode step")
    parser.add_argument("--prefill", type=int, default=4096, help="tokens of the prompt")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument(
        "--tiny", action="store_true", help="use a small shape, to test the benchmark"
    )
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step")
    parser.add_argument(
        "--out", type=Path, help="folder for the results; on a GPU benchmarks/results"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
