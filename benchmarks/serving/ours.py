"""Our engine as a process that answers rounds: `python ours.py MODEL THREADS`.

Reads one JSON line for each round, `{"prompts": [[id, ...], ...], "max_tokens": n}`, and
answers `RESULT {"seconds": s, "ids": [[id, ...], ...]}`. It is the engine of the server
(batcher, paged memory, sampling) without the server: the peer of an LLM class in process.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from itertools import count
from typing import Any

from conure.engine import api
from conure.engine.engine import Engine
from conure.engine.local import LocalRunner


def main(model: str, threads: int) -> None:
    """Answer rounds until stdin ends."""
    engine = Engine(LocalRunner(model=model, threads=threads, max_sequences=32), 1)
    gc.freeze()
    print("READY", flush=True)
    names = count()
    for line in sys.stdin:
        question = json.loads(line)
        begin = time.perf_counter()
        ids = _answer(engine, question, names)
        seconds = time.perf_counter() - begin
        # What a server would keep for later calls: the prompts.
        for context, prompt in zip(ids, question["prompts"], strict=True):
            engine.apply(api.Free(context, keep=len(prompt)))
        print("RESULT " + json.dumps({"seconds": seconds, "ids": [*ids.values()]}), flush=True)


def _answer(engine: Engine, question: dict[str, Any], names: Any) -> dict[int, list[int]]:
    sampling = api.Sampling(max_tokens=question["max_tokens"], ignore_eos=True)
    ids: dict[int, list[int]] = {}
    for prompt in question["prompts"]:
        context = next(names)
        ids[context] = []
        engine.apply(api.Fill(context, prompt))
        engine.apply(api.Generate(context, sampling))
    running = set(ids)
    while running:
        step = engine.step()
        assert step is not None, "the engine is idle with work left"
        for report in step.reports:
            match report:
                case api.Tokens():
                    ids[report.context] += report.ids
                case api.Finished():
                    running.discard(report.context)
                case api.Failed():
                    raise RuntimeError(report.message)
    return ids


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
