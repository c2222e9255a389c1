"""Engine options: type, default, bounds and help text of each, listed once.

The server's configuration and command line derive from `EngineConfig`. The engine process receives
it as JSON, and runners read their options from it. A new option is a field here and the code that
uses it; a new runner is an entry in `RUNNERS` and a module.

Importing this module loads neither torch nor a runner, so the server can import it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Final, NamedTuple, get_args, get_origin

import msgspec
from msgspec import Struct

RUNNERS: Final = {
    "local": "conure.engine.runner.torch_runner",
    "fake": "conure.engine.testing.scripted_runner",
}
"""Modules by kind of engine. Each defines `create_runner(config: EngineConfig) -> Runner`."""

_TOKENS: Final = (1, 16_777_216)
_SECONDS: Final = (0, 3600)


class ConfigError(ValueError):
    """A setting is malformed or out of bounds. The message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """How a setting is checked and, if it has a group, shown on the command line."""

    help: str = ""
    group: str | None = None
    """Heading in the help. Settings without one are not on the command line."""
    flag: str | None = None
    """Name on the command line, where it differs from the field's."""
    metavar: str | None = None
    bounds: tuple[int, int] | None = None
    """Smallest and largest allowed number."""
    choices: tuple[str, ...] | None = None


def _engine(text: str, **rest: Any) -> Option:
    return Option(help=text, group="engine", **rest)


def _fake(text: str, **rest: Any) -> Option:
    return Option(help=text, group="fake engine", **rest)


class EngineConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of one engine. None lets the engine choose."""

    engine: Annotated[
        str,
        _engine("local: a transformers model; fake: scripted text", choices=tuple(RUNNERS)),
    ] = "local"
    model: str | None = None
    """Directory or Hugging Face name. None: the built-in model. `seeded`: a small random one."""
    dummy_weights: Annotated[
        str | None,
        _engine(
            "config.json, or its directory: create random weights for it and load no model",
            metavar="CONFIG",
        ),
    ] = None
    dtype: Annotated[
        str,
        _engine("data type of the weights: float32, bfloat16, float16 (GPU only) or auto"),
    ] = "auto"
    device: Annotated[str, _engine("cpu, cuda, cuda:N or auto (a GPU if there is one)")] = "auto"
    context_len: Annotated[
        int | None,
        _engine(
            "maximum tokens of a prompt and its output together (default: what the model supports "
            "and fits into memory, at most 32,768)",
            metavar="TOKENS",
            bounds=_TOKENS,
        ),
    ] = None
    num_blocks: Annotated[
        int | None,
        _engine("KV cache blocks (default: from free memory)", metavar="N", bounds=_TOKENS),
    ] = None
    block_size: Annotated[
        int | None,
        _engine("tokens per KV cache block (default: 16)", metavar="TOKENS", bounds=(1, 1_024)),
    ] = None
    step_tokens: Annotated[
        int | None,
        _engine(
            "maximum tokens per step (default: 512 on a CPU, 4096 on a GPU)",
            metavar="TOKENS",
            bounds=(1, 1_048_576),
        ),
    ] = None
    max_sequences: Annotated[
        int | None,
        _engine(
            "maximum sequences decoded per step (default: 16 on a CPU, 128 on a GPU)",
            metavar="N",
            bounds=(1, 65_536),
        ),
    ] = None
    threads: Annotated[
        int | None,
        _engine(
            "CPU threads of each engine (default: its share of the cores, at most one per 8 MiB of "
            "weights)",
            metavar="N",
            bounds=(1, 1_024),
        ),
    ] = None
    cpu_instructions: Annotated[
        str,
        _engine(
            "instruction set of the CPU kernels: avx512bf16, avx512, avx2, neonbf16, neon, plain; "
            "none: torch operators only (auto: the fastest of the processor)",
            metavar="NAME",
        ),
    ] = "auto"
    embeddings: Annotated[
        bool,
        _engine("answer /v1/embeddings with the mean of the model's last hidden states"),
    ] = False
    batch_invariant: Annotated[
        bool,
        _engine(
            "compute the same tokens for a prompt whatever else is in the batch, also in bfloat16 "
            "(CPU only; slower)"
        ),
    ] = False

    num_engines: Annotated[
        int,
        _engine(
            "number of engine processes; they share cores and memory",
            flag="engines",
            metavar="N",
            bounds=(1, 64),
        ),
    ] = 1
    """Each engine takes its share of what it would take alone."""

    script: Annotated[
        Path | None,
        _fake(
            'JSON list of {"match": REGEX, "text": ANSWER}; the first entry that matches a prompt '
            "answers it (default: words derived from the prompt)",
            metavar="FILE",
        ),
    ] = None
    time_per_call: Annotated[
        float,
        _fake("seconds added to a call's first output token", metavar="S", bounds=_SECONDS),
    ] = 0.0
    time_per_prompt_token: Annotated[
        float, _fake("seconds per prompt token", metavar="S", bounds=_SECONDS)
    ] = 0.0
    time_per_output_token: Annotated[
        float, _fake("seconds per step that samples tokens", metavar="S", bounds=_SECONDS)
    ] = 0.0

    @classmethod
    def from_json(cls, text: str) -> EngineConfig:
        """Decode what `to_json` returned.

        Raises:
            ConfigError: if an option is unknown, malformed or out of bounds.
        """
        try:
            config = msgspec.convert(
                json.loads(text), cls, dec_hook=lambda kind, value: kind(value)
            )
        except (json.JSONDecodeError, msgspec.MsgspecError) as error:
            raise ConfigError(str(error)) from error
        check_bounds(config)
        return config

    def to_json(self) -> str:
        """Encode all options, without those that a subclass adds."""
        options = {name: getattr(self, name) for name in EngineConfig.__struct_fields__}
        # ASCII with escapes: a path may contain bytes that are not UTF-8.
        return json.dumps(options, default=str)


class ConfigField(NamedTuple):
    """A field of a configuration that has an `Option`."""

    name: str
    kind: type
    default: Any
    """None for a required field."""
    option: Option


def fields_of(config: type[Struct]) -> Iterator[ConfigField]:
    """Yield the fields of a configuration that have an `Option`, in order."""
    for field in msgspec.structs.fields(config):
        if get_origin(field.type) is not Annotated:
            continue
        annotated, option = get_args(field.type)
        kind = next(kind for kind in (*get_args(annotated), annotated) if kind is not NoneType)
        default = None if field.default is msgspec.NODEFAULT else field.default
        yield ConfigField(field.name, kind, default, option)


def check_bounds(config: Struct) -> None:
    """Check every field that has an `Option`.

    Raises:
        ConfigError: if one is out of bounds.
    """
    for name, _, _, option in fields_of(type(config)):
        value = getattr(config, name)
        if value is None:
            continue
        if option.choices is not None and value not in option.choices:
            choices = ", ".join(option.choices)
            raise ConfigError(f"{name} is {value!r}; it must be one of: {choices}")
        if option.bounds is not None and not option.bounds[0] <= value <= option.bounds[1]:
            low, high = option.bounds
            raise ConfigError(f"{name} is {value}; it must be between {low} and {high}")
