"""An engine as a process: `python -m conure.engine --fd N --epoch K fake|local ...`.

Inherits one end of a stream socket as file descriptor N. Sends a Hello, then obeys commands
and sends one frame per step until the peer closes. Between steps it takes what has come and
never waits for it; without work it sleeps until something comes.

Exit codes: 0 when the peer closed or SIGTERM came, 2 for wrong arguments, 3 where the engine
cannot start (one line on stderr, nothing sent), 1 for our own mistakes, with a traceback.
SIGINT is ignored: Ctrl-C reaches the whole group, and what it means is the server's decision.
"""

from __future__ import annotations

import argparse
import gc
import logging
import math
import signal
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from .api import EngineError
from .engine import Engine
from .fake import DEFAULT_LIMITS, FakeRunner, load_script
from .frames import FrameSocket, decode_commands
from .runner import Runner

if TYPE_CHECKING:
    from .constraints import Constraints

_log = logging.getLogger(__name__)

_LIMITS: Final = {
    "context-len": "tokens of one context, at most",
    "block-size": "tokens of one block of KV memory",
    "num-blocks": "blocks of KV memory in all",
    "step-tokens": "tokens of one step, at most",
    "max-sequences": "contexts of one step, at most",
}
_TIMES: Final = {
    "time-per-call": "seconds that a first output token takes besides",
    "time-per-prompt-token": "seconds that a prompt token takes",
    "time-per-output-token": "seconds that a step with output takes",
}


def main(arguments: list[str] | None = None) -> int:
    """Run an engine until its peer closes; return the exit code."""
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    # Loading makes hundreds of thousands of objects that stay. To look through them again and
    # again for what could go takes a fifth of the time until the engine is ready.
    gc.disable()
    try:
        peer = FrameSocket(_inherit(options.fd))
        runner = _load(options)
        constraints = _constraints(runner)
        engine = Engine(runner, options.epoch, constraints=constraints)
    except EngineError as error:
        print(f"conure-engine: {error.message}", file=sys.stderr)  # noqa: T201 - its user reads it
        return 3
    finally:
        gc.freeze()
        gc.enable()
    serve(engine, peer, None if constraints is None else constraints.fileno())
    return 0


def serve(engine: Engine, peer: FrameSocket, wake: int | None = None) -> None:
    """Say hello, then obey and report until the peer closes.

    `wake` is a file descriptor that is readable when the engine has something to collect.
    """
    is_open = peer.send(engine.hello())
    while is_open:
        frames = peer.receive(wait=engine.is_idle, wake=wake)
        if frames is None:
            return
        for payload in frames:
            for command in decode_commands(payload).commands:
                engine.apply(command)
        step = engine.step()
        if step is not None:
            is_open = peer.send(step)


def _inherit(fd: int) -> socket.socket:
    try:
        return socket.socket(fileno=fd)
    except OSError as error:
        raise EngineError("engine.bad_fd", f"--fd {fd} is no socket: {error}") from error


def _load(options: argparse.Namespace) -> Runner:
    """Build the runner that the arguments ask for.

    Raises:
        EngineError: if what it needs is missing or wrong.
    """
    limits = {
        name: value
        for name in ("context_len", "block_size", "num_blocks", "step_tokens", "max_sequences")
        if (value := getattr(options, name)) is not None
    }
    if options.kind == "fake":
        return FakeRunner(
            limits=msgspec.structs.replace(DEFAULT_LIMITS, **limits),
            answer=load_script(options.script) if options.script else None,
            time_per_call=options.time_per_call,
            time_per_prompt_token=options.time_per_prompt_token,
            time_per_output_token=options.time_per_output_token,
        )
    # Imported here: everything else in this process does without torch.
    from .local import LocalRunner
    from .named import BUILTIN

    runner = LocalRunner(
        model=options.dummy_weights or options.model or BUILTIN,
        dummy=options.dummy_weights is not None,
        dtype=options.dtype,
        device=options.device,
        threads=options.threads,
        batch_invariant=options.batch_invariant,
        **limits,
    )
    runner.warm()
    return runner


def _constraints(runner: Runner) -> Constraints | None:
    """Build what keeps outputs to grammars, where its library is there and can do it."""
    if find_spec("llguidance") is None:
        return None
    # Imported here: an engine can do without.
    from .constraints import Constraints

    try:
        return Constraints(runner.tokenizer_json, runner.eos_ids)
    except ValueError as error:
        _log.warning("constraints are not available: %s", error)
        return None


def _parse(arguments: list[str]) -> argparse.Namespace:
    """Read the arguments; wrong ones end the process with code 2."""
    parser = argparse.ArgumentParser(prog="python -m conure.engine", description=__doc__)
    parser.add_argument("--fd", type=_natural, required=True, help="of an inherited socket")
    parser.add_argument("--epoch", type=_natural, required=True, help="which life this is")
    kinds = parser.add_subparsers(dest="kind", required=True)
    fake = kinds.add_parser("fake", help="scripted text, no model")
    local = kinds.add_parser("local", help="a transformers model")
    for kind in (fake, local):
        for name, what in _LIMITS.items():
            kind.add_argument(f"--{name}", type=_positive, metavar="N", help=what)
    fake.add_argument("--script", type=Path, metavar="FILE", help="what it answers, as JSON")
    for name, what in _TIMES.items():
        fake.add_argument(f"--{name}", type=_duration, default=0.0, metavar="S", help=what)
    source = local.add_mutually_exclusive_group()
    source.add_argument("--model", metavar="PATH_OR_NAME", help="default: the built-in one")
    source.add_argument(
        "--dummy-weights", metavar="CONFIG", help="random weights for this config file or folder"
    )
    local.add_argument("--dtype", default="auto", help="of the weights")
    local.add_argument("--device", default="cpu", help="cpu, cuda, cuda:N or auto: where they lie")
    local.add_argument("--threads", type=_positive, metavar="N", help="of the tensor library")
    local.add_argument(
        "--batch-invariant", action="store_true", help="the same bits whatever else is in a step"
    )
    return parser.parse_args(arguments)


def _natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def _duration(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no duration in seconds")
    return value


if __name__ == "__main__":
    sys.exit(main())
