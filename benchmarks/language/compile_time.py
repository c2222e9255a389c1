"""Compile times of the decoder language: realistic texts up to 64 KiB, and hostile ones.


Usage: `python -m benchmarks.language.compile_time`. Prints, for each kind of text, the size, the
number of syntax nodes, and the least, the median, the 99th percentile and the maximum of the CPU
time, and the least time of Python's parser alone. `again` is the 99th percentile for a text that
the server has kept: it gives a validated submission and its JSON. Other processes on the machine
slow the median and the 99th percentile, so the least times compare versions. Garbage is collected
as in a server.
"""

from __future__ import annotations

import ast
import contextlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

from conure.server.garbage_collection import GarbageCollection
from conure.server.language.compiler import Language, compile_source
from conure.server.language.errors import LanguageError
from conure.server.language.submission import SourceCompiler
from conure.server.language.syntax import MAX_SOURCE_BYTES, rewrite
from conure.server.program.errors import ProgramError
from conure.server.program.ir import SourceSubmission

WORDS = ("the", "answer", "should", "be", "short", "and", "name", "source", "of", "every", "figure")
ROUNDS = 200


def prose(rng: random.Random, size: int) -> str:
    """Return a text of about `size` characters."""
    words: list[str] = []
    length = 0
    while length < size:
        words.append(rng.choice(WORDS))
        length += len(words[-1]) + 1
    return " ".join(words)


def application(rng: random.Random, size: int, num_calls: int) -> str:
    """Return a program of `size` bytes: long instructions, and calls that share a context."""
    share = (size - 170 * num_calls) // (num_calls + 1)
    lines = ["question: str", f"context = [system({prose(rng, share)!r}), user(question)]"]
    for number in range(num_calls):
        lines += [
            "with job():",
            f"    a{number} = llm_chat(context + [system({prose(rng, share)!r})], max_tokens=64)",
            f"    if a{number}.contains('x'):",
            f"        yield {{'a{number}': a{number}['content']}}",
        ]
    return "\n".join(lines)[:size]


def varied(rng: random.Random, size: int, num_calls: int) -> str:
    """Return such a program whose calls all have another shape."""
    source = application(rng, size, num_calls)
    for number in range(num_calls):
        source = source.replace("max_tokens=64)", f"max_tokens={100 + number})", 1)
    return source


def plain(rng: random.Random, size: int, num_calls: int) -> str:
    """Return a program of `size` bytes with calls that do not depend on each other."""
    share = size // num_calls - 40
    lines = [
        f"a{number} = gen({prose(rng, share)[:share]!r}, max_tokens=9)"
        for number in range(num_calls)
    ]
    return "\n".join([*lines, "yield a0"])


def dense(num_calls: int) -> str:
    """Return a program of calls without long texts."""
    call = "a{0} = llm_chat([system('Be brief.'), user(f'{{question}} {0}')], max_tokens=20)"
    lines = ["question: str", *(call.format(number) for number in range(num_calls))]
    return "\n".join([*lines, "yield a0"])


def semantic(rng: random.Random, size: int, num_calls: int) -> str:
    """Return a program of `size` bytes that calls a function with a long prompt."""
    calls = [f"a{number} = advise('{number}')" for number in range(num_calls)]
    prompt = f'''    """{prose(rng, size - 20 * num_calls - 100)} {{{{x}}}} {{{{name=y}}}}"""'''
    return "\n".join(["def advise(x):", prompt, *calls, "yield a0"])


def template(rng: random.Random, size: int, num_outputs: int) -> str:
    """Return a template of `size` bytes."""
    share = size // num_outputs - 70
    return "\n".join(
        f"{prose(rng, share)} {{{{question}}}} {{{{name=a{number}, max_tokens=20, end=<|end|>}}}}"
        for number in range(num_outputs)
    )


def measure(compile_it: Callable[[], object], rounds: int) -> list[float]:
    """Return the CPU times of some rounds in milliseconds."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        compile_it()
        times.append(1000 * (time.process_time() - start))
    return sorted(times)


def percentile_99(times: Sequence[float]) -> float:
    """Return the 99th percentile of ascending times."""
    return times[min(len(times) - 1, int(0.99 * len(times)))]


def again(source: str, language: Language) -> float:
    """Return the 99th percentile for a text that was compiled before; 0.0 if it is invalid."""
    compiler = SourceCompiler([])
    submission = SourceSubmission(source=source, language=language, inputs={"question": "a"})
    try:
        compiler.compile(submission)
    except ProgramError:
        return 0.0
    return percentile_99(measure(partial(compiler.compile, submission), ROUNDS))


def report(name: str, source: str, times: Sequence[float], language: Language = "decoder") -> None:
    """Print one line of the table."""
    num_nodes = 0
    if language == "decoder":
        with contextlib.suppress(SyntaxError, ValueError):
            num_nodes = sum(1 for _ in ast.walk(ast.parse(rewrite(source))))
    p99 = percentile_99(times)
    parser = measure(partial(ast.parse, rewrite(source)), 20)[0] if num_nodes else 0.0
    sys.stdout.write(
        f"{name:28} {len(source.encode()):7,} bytes {num_nodes:6,} nodes   least {times[0]:6.2f}  "
        f"median {statistics.median(times):6.2f}  p99 {p99:6.2f}  max {times[-1]:6.2f} ms  "
        f"parser {parser:5.2f}  again {again(source, language):5.2f}\n"
    )


def attempt(source: str) -> None:
    """Compile a text that may be invalid."""
    with contextlib.suppress(LanguageError):
        compile_source(source, signatures={})


def main() -> None:
    """Print all measurements."""
    GarbageCollection(lambda: 0).begin()
    rng = random.Random(0)
    for num_calls in (200, 500):
        source = plain(rng, MAX_SOURCE_BYTES - 100, num_calls)
        times = measure(partial(compile_source, source, signatures={}), ROUNDS)
        report(f"plain, {num_calls} calls", source, times)
    for num_calls in (3, 10, 30, 60, 150):
        source = application(rng, MAX_SOURCE_BYTES - 100, num_calls)
        compile_source(source, signatures={})
        times = measure(partial(compile_source, source, signatures={}), ROUNDS)
        report(f"application, {num_calls} calls", source, times)
    for num_calls in (60, 150):
        source = varied(rng, MAX_SOURCE_BYTES - 1_000, num_calls)
        times = measure(partial(compile_source, source, signatures={}), ROUNDS)
        report(f"all different, {num_calls} calls", source, times)
    for num_calls in (30, 100, 200):
        source = dense(num_calls)
        times = measure(partial(compile_source, source, signatures={}), ROUNDS // 4)
        report(f"dense, {num_calls} calls", source, times)
    source = semantic(rng, MAX_SOURCE_BYTES - 100, 60)
    times = measure(partial(compile_source, source, signatures={}), ROUNDS)
    report("semantic function, 60 calls", source, times)
    source = template(rng, MAX_SOURCE_BYTES - 100, 60)
    times = measure(partial(compile_source, source, "template"), ROUNDS)
    report("template, 60 outputs", source, times, "template")
    for name, source in {
        "f-string of 16,000 slots": "f'" + "{x}" * 16_000 + "'",
        "64 KiB of `x=1`": "x=1\n" * 16_000,
        "doubling functions": "def f0(x):\n    return gen(x)\n"
        + "".join(f"def f{i}(x):\n    return f{i - 1}(x) + f{i - 1}(x)\n" for i in range(1, 15))
        + "yield f14('a')",
    }.items():
        report(name, source, measure(partial(attempt, source), 5))


if __name__ == "__main__":
    main()
