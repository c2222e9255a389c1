"""The engine process: `python -m conure.engine --fd N --epoch K --config JSON [--heartbeat M]`.

The process inherits one end of a stream socket as file descriptor N, and a pipe for its heartbeat.
It sends a Hello, then applies commands and sends one frame per step until the peer closes. Between
steps it applies the commands that have arrived, without waiting; when idle it waits for the next
one.

Exit codes: 0 when the peer closed or on SIGTERM, 2 for wrong arguments, 3 when the engine cannot
start (one line on stderr, nothing sent), 1 for internal errors, with a traceback. SIGINT is
ignored: Ctrl-C reaches the whole process group, and the server decides what to do about it.
"""

from __future__ import annotations

import argparse
import gc
import logging
import signal
import socket
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from .config import RUNNERS, ConfigError, EngineConfig
from .core.engine import EngineCore
from .framing import FrameSocket, decode_commands
from .heartbeat import start_heartbeat
from .protocol import EngineError
from .runner.base import Runner
from .runner.openmp import limit_spinning

if TYPE_CHECKING:
    from .constraints.compiler import ConstraintCompiler

_log = logging.getLogger(__name__)


def main(arguments: list[str] | None = None) -> int:
    """Run an engine until its peer closes; return the exit code."""
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if options.heartbeat is not None:
        start_heartbeat(options.heartbeat)
    # Loading creates hundreds of thousands of permanent objects. Collecting garbage meanwhile
    # takes a fifth of the start-up time.
    gc.disable()
    limit_spinning()
    try:
        peer = FrameSocket(_inherit(options.fd))
        runner = _create_runner(options.config)
        constraints = _create_constraint_compiler(runner)
        engine = EngineCore(runner, options.epoch, constraints=constraints)
    except EngineError as error:
        # The server shows this line to its user.
        print(f"conure-engine: {error.message}", file=sys.stderr)  # noqa: T201
        return 3
    finally:
        gc.freeze()
        gc.enable()
    serve(engine, peer, None if constraints is None else constraints.fileno())
    return 0


def serve(engine: EngineCore, peer: FrameSocket, wake: int | None = None) -> None:
    """Send the Hello, then apply commands and send reports until the peer closes.

    Args:
        engine: The engine.
        peer: The connection to the server.
        wake: A file descriptor that becomes readable when the engine has compiled a constraint.
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
        raise EngineError("engine.bad_fd", f"--fd {fd} is not a socket: {error}") from error


def _create_runner(config: EngineConfig) -> Runner:
    """Import the runner of this kind of engine, and create it.

    Raises:
        EngineError: if the model or an option is missing or wrong.
    """
    runner: Runner = import_module(RUNNERS[config.engine]).create_runner(config)
    return runner


def _create_constraint_compiler(runner: Runner) -> ConstraintCompiler | None:
    """Create the constraint compiler if its library is installed and accepts the tokenizer."""
    if find_spec("llguidance") is None:
        return None
    # Imported here because the library is optional.
    from .constraints.compiler import ConstraintCompiler

    try:
        return ConstraintCompiler(runner.tokenizer_json, runner.eos_ids)
    except ValueError as error:
        _log.warning("constraints are not available: %s", error)
        return None


def _parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the arguments. Wrong ones end the process with exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m conure.engine", description=__doc__)
    parser.add_argument(
        "--fd", type=int, required=True, help="file descriptor of the inherited socket"
    )
    parser.add_argument(
        "--heartbeat", type=int, help="file descriptor of an inherited pipe for the heartbeat"
    )
    parser.add_argument("--epoch", type=int, required=True, help="epoch of this engine process")
    parser.add_argument(
        "--config", type=_config, required=True, metavar="JSON", help="engine options"
    )
    return parser.parse_args(arguments)


def _config(text: str) -> EngineConfig:
    try:
        return EngineConfig.from_json(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
