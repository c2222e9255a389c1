"""llama.cpp as a process that answers rounds, in a separate environment; see `ours.py`.

Runs under a Python that has `llama-cpp-python` and `gguf`, and not Conure. Prompts share nothing:
each request is a separate sequence, all sequences are decoded together, and tokens are sampled by
llama.cpp.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp  # type: ignore[import-not-found,unused-ignore]

sys.path.insert(0, str(Path(__file__).parents[1]))

from serving import gguf_file

CONTEXT = 2048
SEQUENCES = 16
STEP = 2048
"""Tokens of a call of llama.cpp, which divides them further."""


class Llama:
    """One model and one context of llama.cpp."""

    def __init__(self, path: Path, threads: int) -> None:
        quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(quiet, None)
        self._log_callback = quiet  # llama.cpp keeps only a pointer
        model_options = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_options)
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_seq_max = CONTEXT * SEQUENCES, SEQUENCES
        options.n_batch, options.n_threads = STEP, threads
        options.n_threads_batch, options.no_perf = threads, True
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        self._batch = llama_cpp.llama_batch_init(STEP, 0, 1)
        self._greedy = llama_cpp.llama_sampler_init_greedy()

    def run(self, tokens: list[tuple[int, int, int, bool]]) -> list[int]:
        """Decode tokens; return one sampled token for each that is the last one of its sequence.

        Args:
            tokens: token, position, sequence, and whether the token is the last one.
        """
        batch = self._batch
        batch.n_tokens = len(tokens)
        for index, (token, position, sequence, is_last) in enumerate(tokens):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = is_last
        if llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")
        return [
            llama_cpp.llama_sampler_sample(self._greedy, self._context, index)
            for index, (*_, is_last) in enumerate(tokens)
            if is_last
        ]

    def clear(self) -> None:
        """Forget all sequences."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)


def answer(llama: Llama, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Return the tokens of all requests."""
    new = [
        (token, position, sequence, position == len(prompt) - 1)
        for sequence, prompt in enumerate(prompts)
        for position, token in enumerate(prompt)
    ]
    firsts: list[int] = []
    for at in range(0, len(new), STEP):
        firsts += llama.run(new[at : at + STEP])
    ids: list[list[int]] = [[first] for first in firsts]
    for _ in range(max_tokens - 1):
        following = llama.run(
            [
                (tokens[-1], len(prompt) + len(tokens) - 1, sequence, True)
                for sequence, (prompt, tokens) in enumerate(zip(prompts, ids, strict=True))
            ]
        )
        for tokens, token in zip(ids, following, strict=True):
            tokens.append(token)
    return ids


def main(model: str, threads: int) -> None:
    """Answer rounds until stdin ends."""
    llama = Llama(gguf_file.write(Path(model)), threads)
    print("READY", flush=True)
    for line in sys.stdin:
        question: dict[str, Any] = json.loads(line)
        begin = time.perf_counter()
        ids = answer(llama, question["prompts"], question["max_tokens"])
        seconds = time.perf_counter() - begin
        llama.clear()
        print("RESULT " + json.dumps({"seconds": seconds, "ids": ids}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
