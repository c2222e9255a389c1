"""Conure's engine as a process that answers rounds: `python ours.py MODEL THREADS`.

Reads one JSON line per round, `{"prompts": [[id, ...], ...], "max_tokens": n}`, and answers
`RESULT {"seconds": s, "ids": [[id, ...], ...]}`. It runs the engine core (batch scheduler, paged
KV cache, sampling) without the server, as the counterpart of an in-process LLM class.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from itertools import count
from typing import Any

from conure.engine import protocol
from conure.engine.config import EngineConfig
from conure.engine.core.engine import EngineCore
from conure.engine.runner.openmp import limit_spinning


def main(model: str, threads: int) -> None:
    """Answer rounds until stdin ends."""
    limit_spinning()
    # Loads torch, which reads the limit once.
    from conure.engine.runner.torch_runner import TorchModelRunner

    engine = EngineCore(
        TorchModelRunner(EngineConfig(model=model, threads=threads, max_sequences=32)), 1
    )
    gc.freeze()
    print("READY", flush=True)
    names = count()
    for line in sys.stdin:
        question = json.loads(line)
        begin = time.perf_counter()
        ids = _answer(engine, question, names)
        seconds = time.perf_counter() - begin
        # A server would also keep the prompts as cache.
        for context, prompt in zip(ids, question["prompts"], strict=True):
            engine.apply(protocol.Free(context, num_cached_tokens=len(prompt)))
        print("RESULT " + json.dumps({"seconds": seconds, "ids": [*ids.values()]}), flush=True)


def _answer(engine: EngineCore, question: dict[str, Any], names: Any) -> dict[int, list[int]]:
    sampling = protocol.SamplingParams(max_tokens=question["max_tokens"], ignore_eos=True)
    ids: dict[int, list[int]] = {}
    for prompt in question["prompts"]:
        context = next(names)
        ids[context] = []
        engine.apply(protocol.Fill(context, prompt))
        engine.apply(protocol.GenerateCommand(context, sampling))
    running = set(ids)
    while running:
        step = engine.step()
        assert step is not None, "the engine is idle with work left"
        for report in step.reports:
            match report:
                case protocol.Tokens():
                    ids[report.context] += report.ids
                case protocol.Finished():
                    running.discard(report.context)
                case protocol.Failed():
                    raise RuntimeError(report.message)
    return ids


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
