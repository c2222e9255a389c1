"""vLLM on the serving cases, in process, on the same config and random weights.

Written for vLLM 0.26. It imports nothing of Conure, so it runs in a separate environment.
Limits of sequences and tokens are those of our engine; prefix caching is on, its default.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from . import serving_cases
from .record import StageRecord
from .serving_cases import Served

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    # All tokens are greedy; the sampler of FlashInfer would be compiled.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


def run(record: StageRecord, *, is_tiny: bool, rounds: int, begin_when: Path | None = None) -> None:
    """Serve the cases; see `serving_cases.record_rounds`.

    Args:
        record: Receives the rows.
        is_tiny: Whether the model and the requests are small.
        rounds: Rounds that count.
        begin_when: A file to wait for when the engine is ready; None to begin at once.

    Raises:
        ImportError: if vLLM is not installed.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # vLLM reads the environment when it is imported, and is optional.
    vllm: Any = import_module("vllm")
    tokens_prompt: Any = import_module("vllm.inputs").TokensPrompt
    record.about["versions"]["vllm"] = vllm.__version__
    with tempfile.TemporaryDirectory() as scratch:
        folder = serving_cases.write_config(Path(scratch), is_tiny=is_tiny)
        began = time.monotonic()
        engine = vllm.LLM(model=str(folder), **options(is_tiny=is_tiny))
        record.note(f"ready after {time.monotonic() - began:.0f} s")
        while begin_when is not None and not begin_when.exists():
            time.sleep(0.1)

        def serve(prompts: Sequence[Sequence[int]], max_tokens: int) -> Served:
            sampling = vllm.SamplingParams(
                temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
            )
            requests = [tokens_prompt(prompt_token_ids=[*prompt]) for prompt in prompts]
            begin = time.perf_counter()
            answers = engine.generate(requests, sampling, use_tqdm=False)
            seconds = time.perf_counter() - begin
            lengths = {len(answer.outputs[0].token_ids) for answer in answers}
            if lengths != {max_tokens}:
                raise RuntimeError(f"outputs have {sorted(lengths)} tokens")
            return Served(seconds, None)

        serving_cases.record_rounds(record, serve, rounds=rounds, is_tiny=is_tiny)


def options(*, is_tiny: bool) -> dict[str, Any]:
    """Return the arguments of vLLM's engine."""
    context_len = 1024 if is_tiny else serving_cases.CONTEXT_LEN
    return {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "seed": 0,
        "max_model_len": context_len,
        "max_num_seqs": serving_cases.MAX_SEQUENCES,
        "max_num_batched_tokens": serving_cases.STEP_TOKENS,
        # The memory of the cache is given, so this is only what must be free at the start.
        "gpu_memory_utilization": 0.4,
        "kv_cache_memory_bytes": serving_cases.KV_BYTES,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
    }
