"""Writes docs/models.md: `python -m tests.engine.models_page` in the repository's root.

Every family of `families` is judged as the tests judge it, and the page says what came out.
What depends on the machine (ties, rounding) stands in columns of its own; the test that the
page is current looks at the others.
"""

from __future__ import annotations

import re
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import transformers
from transformers.utils import logging as transformers_logging

from conure.engine import checkpoint, trial, weights
from conure.engine.api import EngineError
from conure.engine.local import LocalRunner

from . import exactness, shrunk
from .families import REFUSED, RUNNING, changes, model_type

PAGE: Final = Path(__file__).parents[2] / "docs" / "models.md"

BOUND: Final = 0.125
"""Of a token's logits in bfloat16: root mean square of what differs, over their spread."""
USUAL: Final = 0.03
"""The same for the median token."""
REROUTED: Final = 0.15
"""Share of tokens that another expert may take beyond `BOUND`."""

_INTRODUCTION: Final = """\
# Models

The engine runs any decoder of transformers that attends through `AttentionInterface`, over
its own paged keys and values. What it would compute wrongly it refuses at start, in one
sentence: some models by their config, the others by a trial on the loaded weights, which
compares the hook with the model's own attention, and tokens that continue stored keys and
values beside strangers with the same tokens alone. A family that is in neither table is
judged by that trial when it is loaded.

Made by `python -m tests.engine.models_page` with transformers {version}.
`tests/engine/test_models.py` judges every row again and checks that this page is current.

## Exact

Shrunk random models of {layers} layers, judged against transformers alone: each context by
itself, eager attention, no cache. The engine computes the same contexts with prompts in
chunks of 1, 7 and all tokens, prefixes shared by arrival, by fork in mid context and from
the cache, batches of 1 to 32, and a pool of a quarter of the demand, where contexts are
preempted and computed again.

- **Exact**: in float32 every greedy token is the reference's best. Where the two differ, the
  reference's logits of both must lie within {tie}; that is a *tie*, and the check goes on
  behind it. *Difference* is the largest of any logit of any step.
- **bfloat16**: the logits of the same steps against transformers in bfloat16. A token's
  error is the root mean square of what differs, over the spread of its logits. Bound: at
  most {bound} for every token, {usual} for the median one. Where rounding lets a router
  choose another expert, no bound can hold: of these families up to {rerouted:.0%} of the
  tokens may lie beyond. (Transformers' own bfloat16 lies as far from its float32.)

*Keeps* is what the layers of the shrunk model store: key/value heads x size of a key (/ of a
value), the window that they attend to, and whether they read an earlier layer's.

| family | keeps | verdict | tokens | ties | difference | bfloat16, median | worst | remarks |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""

_REFUSALS: Final = """
## Refused

| family | found by | the sentence |
| --- | --- | --- |
"""

_OUTRO: Final = """
A rotary embedding that changes with length (`dynamic`, `longrope`) is right up to the
length where it changes, so contexts end there: keys are stored rotated.

## Random weights

`conure serve --dummy-weights CONFIG` serves a model of the shape that a config.json
describes, a file or its folder: seeded random weights, made in place on the device. Without
a tokenizer.json beside the config, text is bytes, and ids behind the bytes are written as
numbers. `python -m conure.engine.dummy CONFIG FOLDER` writes the same model as a folder, for
measuring another server on the same weights.
"""


@dataclass
class Row:
    """What one family's judgement came to."""

    keeps: str
    exact: exactness.Verdict
    rounding: exactness.Verdict


def judge(name: str, folder: Path, *, thorough: bool = False) -> Row:
    """Write a family's model to `folder` and judge it.

    Raises:
        AssertionError: where it is not exact.
    """
    shrunk.write(folder, model_type(name), **changes(name))
    recorder, judging = exactness.load(folder, "float32")
    exact = exactness.examine(recorder, judging, thorough=thorough)
    rounding = exactness.measure(*exactness.load(folder, "bfloat16"))
    return Row(keeps(recorder.layers), exact, rounding)


def refusal(name: str, folder: Path) -> str:
    """Return the sentence that an engine refuses a family with; empty if it does not."""
    config = shrunk.config_of(model_type(name), **changes(name))
    config.to_json_file(folder / "config.json")
    try:
        LocalRunner(model=str(folder), dummy=True, num_blocks=64, threads=1)
    except EngineError as error:
        assert error.code == "model.unsupported"
        return error.message.replace(f"cannot run {folder}: ", "")
    return ""


def render(rows: Mapping[str, Row], sentences: Mapping[str, str]) -> str:
    """Return the page."""
    lines = []
    for name, row in rows.items():
        errors = row.rounding.errors
        numbers = (
            f"{row.exact.tokens} | {row.exact.ties} | {row.exact.difference:.0e}"
            f" | {statistics.median(errors):.3f} | {max(errors):.3f}"
        )
        lines.append(f"| {name} | {row.keeps} | exact | {numbers} | {RUNNING[name].remark} |\n")
    refused = [
        f"| {name} | {'config' if REFUSED[name].is_known else 'trial'} | {sentence} |\n"
        for name, sentence in sentences.items()
    ]
    introduction = _INTRODUCTION.format(
        version=transformers.__version__,
        layers="two to four",
        tie=shrunk.TIE,
        bound=BOUND,
        usual=USUAL,
        rerouted=REROUTED,
    )
    return introduction + "".join(lines) + _REFUSALS + "".join(refused) + _OUTRO


def without_measurements(page: str) -> str:
    """Return a page without what may differ from machine to machine."""
    page = re.sub(r"with transformers [\w.]+", "with transformers", page)
    return re.sub(r"\| exact \|.*\| ([^|]*)\|\n", r"| exact | \1|\n", page)


def keeps(layers: list[trial.Layer]) -> str:
    """Describe the layers, equal ones once."""
    found: dict[str, None] = {}
    for index, layer in enumerate(layers):
        size = f"{layer.kv_heads}x{layer.key_dim}"
        if layer.value_dim != layer.key_dim:
            size += f"/{layer.value_dim}"
        if layer.window is not None:
            size += f" window {layer.window}"
        found[size + (" of an earlier layer" if layer.source != index else "")] = None
    return ", ".join(found)


def layers_of(folder: Path) -> list[trial.Layer]:
    """Return the layers of a model of random weights for a folder's config."""
    found = checkpoint.read_dummy(str(folder))
    return trial.probe(weights.make(found, weights.read_config(found), "float32"), "it")


def main() -> int:
    """Judge every family and write the page."""
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # theirs
    rows, sentences = {}, {}
    for name in RUNNING:
        with tempfile.TemporaryDirectory() as folder:
            rows[name] = judge(name, Path(folder) / "model")
    for name in REFUSED:
        with tempfile.TemporaryDirectory() as folder:
            sentences[name] = refusal(name, Path(folder))
    PAGE.write_text(render(rows, sentences), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
