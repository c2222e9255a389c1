"""vLLM's OpenAI-compatible server as a process, started by a Python that has vLLM.

KV memory is as many tokens as for `conure serve --num-blocks`, in blocks of 32, because vLLM's
attention on a CPU accepts only multiples of 32.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import httpx

from temporary_server import stop

BLOCK = 32
NUM_UNUSED = 1
"""Blocks that vLLM never gives to a request."""
MODEL_NAME = "default"
START_S = 180.0


class PeerError(RuntimeError):
    """The server did not start; the message ends with its lines of errors."""


@contextlib.contextmanager
def vllm_served(
    python: str, model: Path, *, num_tokens: int, context_len: int, dtype: str, threads: int
) -> Iterator[str]:
    """Start vLLM and yield its URL once it is healthy.

    Args:
        python: of an environment with vLLM, which is not installed next to Conure.
        model: a folder.
        num_tokens: KV memory, rounded up to whole blocks.
        context_len: longest prompt with its answer, in tokens.
        dtype: of weights and KV memory.
        threads: number of threads of the engine.

    Raises:
        PeerError: If the server ends or is not healthy in time.
    """
    port = _free_port()
    num_blocks = -(-num_tokens // BLOCK) + NUM_UNUSED
    arguments = [
        *("--model", str(model.resolve()), "--served-model-name", MODEL_NAME, "--dtype", dtype),
        *("--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(context_len)),
        *("--block-size", str(BLOCK), "--num-gpu-blocks-override", str(num_blocks)),
        "--enable-prefix-caching",
    ]
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "2",
        # A thread that is bound to a core shares the core with servers and clients: 2.05 s instead
        # of 1.62 for the chain summary on two cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    # Paths of Conure's environment would hide the packages of vLLM's.
    environment.pop("PYTHONPATH", None)
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [python, "-m", "vllm.entrypoints.openai.api_server", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            # Modules of the benchmarks, such as `kernels`, would hide packages of the same name.
            cwd="/",
        )
        try:
            url = f"http://127.0.0.1:{port}"
            if not _is_healthy(process, url):
                output.seek(0)
                raise PeerError("vLLM did not start:\n" + _errors_of(output))
            yield url
        finally:
            stop(process)


def vllm_counters(url: str) -> tuple[int, int]:
    """Return the steps and the computed prompt tokens since the start."""
    sums: dict[str, float] = {}
    for line in httpx.get(f"{url}/metrics", timeout=30).text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("vllm:"):
            metric = name.partition("{")[0]
            sums[metric] = sums.get(metric, 0.0) + float(value)
    cached = sums.get("vllm:prefix_cache_hits_total", 0.0)
    steps = sums.get("vllm:iteration_tokens_total_count", 0.0)
    return round(steps), round(sums.get("vllm:prompt_tokens_total", 0.0) - cached)


def _errors_of(output: Iterable[str]) -> str:
    return "".join(line for line in output if "ERROR" in line or "Error" in line)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def _is_healthy(process: subprocess.Popen[bytes], url: str) -> bool:
    """Wait until the server is healthy; return False if it ends before or takes too long."""
    deadline = time.monotonic() + START_S
    with httpx.Client(timeout=10) as client:
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                if client.get(f"{url}/health").is_success:
                    return True
            time.sleep(0.2)
    return False
