"""Conure's engine core on the serving cases, in process, on a Llama 3 8B of random weights."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Final

from conure.engine import protocol
from conure.engine.config import EngineConfig
from conure.engine.core.engine import EngineCore
from conure.engine.runner.torch_runner import TorchModelRunner

from . import serving_cases
from .record import StageRecord
from .serving_cases import Served

BLOCK: Final = 16
"""Tokens of a block, as in vLLM."""
NUM_BLOCKS: Final = serving_cases.KV_BYTES // serving_cases.KV_BYTES_PER_TOKEN // BLOCK


def run(record: StageRecord, *, device: str, is_tiny: bool, rounds: int) -> None:
    """Serve the cases; see `serving_cases.record_rounds`."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = serving_cases.write_config(Path(scratch), is_tiny=is_tiny)
        began = time.monotonic()
        runner = TorchModelRunner(
            EngineConfig(
                dummy_weights=str(folder / "config.json"),
                device=device,
                max_sequences=serving_cases.MAX_SEQUENCES,
                step_tokens=serving_cases.STEP_TOKENS,
                context_len=1024 if is_tiny else serving_cases.CONTEXT_LEN,
                block_size=BLOCK,
                num_blocks=4096 if is_tiny else NUM_BLOCKS,
            )
        )
        runner.warm()
        engine = EngineCore(runner, 1)
        gc.freeze()
        record.note(f"ready after {time.monotonic() - began:.0f} s: {runner.description}")
        names = count()
        serving_cases.record_rounds(
            record,
            lambda prompts, max_tokens: serve(engine, names, prompts, max_tokens),
            rounds=rounds,
            is_tiny=is_tiny,
        )


def serve(
    engine: EngineCore, names: count[int], prompts: Sequence[Sequence[int]], max_tokens: int
) -> Served:
    """Serve prompts with greedy tokens, and free their contexts.

    Raises:
        RuntimeError: if a context fails or an output has another length.
    """
    sampling = protocol.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    num_tokens: dict[int, int] = {}
    last_first_s = 0.0
    begin = time.perf_counter()
    for prompt in prompts:
        context = next(names)
        num_tokens[context] = 0
        engine.apply(protocol.Fill(context, [*prompt]))
        engine.apply(protocol.GenerateCommand(context, sampling))
    running = set(num_tokens)
    while running:
        step = engine.step()
        for report in step.reports if step is not None else ():
            match report:
                case protocol.Tokens():
                    if not num_tokens[report.context]:
                        last_first_s = time.perf_counter() - begin
                    num_tokens[report.context] += len(report.ids)
                case protocol.Finished():
                    running.discard(report.context)
                case protocol.Failed():
                    raise RuntimeError(report.message)
    seconds = time.perf_counter() - begin
    for context in num_tokens:
        engine.apply(protocol.Free(context))
    engine.step()
    if set(num_tokens.values()) != {max_tokens}:
        raise RuntimeError(f"outputs have {sorted(set(num_tokens.values()))} tokens")
    return Served(seconds, last_first_s)
