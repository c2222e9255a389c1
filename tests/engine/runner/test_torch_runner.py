"""The transformers runner, driven by rows as the engine core drives it."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from conure.cache_folder import cache_folder
from conure.engine.config import EngineConfig
from conure.engine.kv import capacity
from conure.engine.models import fused_decoder, probe
from conure.engine.protocol import EngineError, SamplingParams
from conure.engine.runner import device
from conure.engine.runner.base import ScheduledSequence
from conure.engine.runner.torch_runner import TorchModelRunner
from conure.engine.testing import random_model
from conure.engine.testing.fake_cuda import fake_cuda
from conure.kernels.planning.planner import Planner

from .. import shrunk

BLOCK = 4
GREEDY = SamplingParams(max_tokens=64)
SMALL_SHARED_BYTES = 101_376
"""Shared memory of a program on most consumer GPUs."""


@dataclass
class Context:
    """One context of a miniature core: its ids, its blocks, how much of it is computed."""

    ids: list[int]
    blocks: list[int]
    num_prompt: int
    computed: int = 0

    @property
    def is_done(self) -> bool:
        return len(self.ids) - self.num_prompt >= 16


@dataclass
class Core:
    """Hands out blocks and drives a runner step by step."""

    runner: TorchModelRunner
    free: list[int] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free = list(range(self.runner.limits.num_blocks))
        random.Random(1).shuffle(self.free)

    def new(self, ids: list[int]) -> Context:
        return Context(list(ids), [], len(ids))

    def fork(self, parent: Context, length: int, rest: list[int]) -> Context:
        """Fork at any length: whole blocks are shared, a partial one is copied."""
        shared = parent.blocks[: length // BLOCK]
        if length % BLOCK:
            own = self.free.pop()
            self.copies.append((parent.blocks[length // BLOCK], own))
            shared = [*shared, own]
        ids = parent.ids[:length] + rest
        return Context(ids, shared, len(ids), length)

    def row(self, context: Context, chunk: int) -> ScheduledSequence:
        start = context.computed
        num_new = min(chunk, len(context.ids) - start)
        while len(context.blocks) * BLOCK < start + num_new:
            context.blocks.append(self.free.pop())
        ends = start + num_new == len(context.ids)
        return ScheduledSequence(
            0,
            context.ids,
            start,
            num_new,
            context.blocks,
            GREEDY if ends else None,
            context.num_prompt,
        )

    def step(self, contexts: list[Context], chunk: Callable[[], int]) -> None:
        rows = [self.row(context, chunk()) for context in contexts]
        copies, self.copies = self.copies, []
        sampled = iter(self.runner.run(rows, copies))
        for context, row in zip(contexts, rows, strict=True):
            context.computed += row.num_new
            if row.sampling is not None:
                context.ids.append(next(sampled))
        assert next(sampled, None) is None

    def finish(self, contexts: list[Context], chunk: Callable[[], int]) -> None:
        while pending := [context for context in contexts if not context.is_done]:
            self.step(pending, chunk)


@dataclass
class Pair:
    """A runner, and transformers on the same folder."""

    folder: Path
    runner: TorchModelRunner
    reference: PreTrainedModel
    ties: int = 0

    def judge(self, contexts: list[Context]) -> None:
        self.ties += sum(
            shrunk.count_ties(self.reference, context.ids, context.num_prompt)
            for context in contexts
        )
        assert self.ties <= 2, "so many ties make the rule meaningless"


def runner_of(folder: Path, **options: Any) -> TorchModelRunner:
    return shrunk.runner_on(folder, **{"num_blocks": 512, "block_size": BLOCK, **options})


@pytest.fixture(scope="module", params=[*shrunk.FAMILIES])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = shrunk.write(tmp_path_factory.mktemp("model") / request.param, request.param)
    return Pair(folder, runner_of(folder, min_saved=0), shrunk.load(folder))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shrunk.write(tmp_path_factory.mktemp("model") / "tiny-llama", "llama")


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_greedy_tokens_match_transformers_for_any_chunk(pair: Pair, chunk: int) -> None:
    core = Core(pair.runner)
    context = core.new(prompt(chunk, 37))
    core.finish([context], lambda: chunk)
    pair.judge([context])


def test_greedy_tokens_match_transformers_generate(pair: Pair) -> None:
    core = Core(pair.runner)
    context = core.new(prompt(5, 21))
    core.finish([context], lambda: 1000)
    ids = torch.tensor([context.ids[:21]])
    with torch.inference_mode():
        out = pair.reference.generate(  # type: ignore[operator]  # the mixin's method
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=16,
            do_sample=False,
            eos_token_id=None,
        )
    wanted = out[0].tolist()
    if context.ids != wanted:
        first = next(i for i, (a, b) in enumerate(zip(context.ids, wanted, strict=True)) if a != b)
        assert shrunk.count_ties(pair.reference, context.ids[: first + 1], first) == 1


def test_forks_within_a_block_stay_exact(pair: Pair) -> None:
    core = Core(pair.runner)
    root = core.new(prompt(1, 30))
    core.finish([root], lambda: 11)
    forks = [core.fork(root, length, prompt(length, 5)) for length in (8, 30, 29, 30, 41)]
    core.step(forks, lambda: 1000)
    grandchildren = [core.fork(forks[1], 33, prompt(9, 1)), core.fork(forks[1], 32, prompt(8, 3))]
    everyone = [*forks, *grandchildren]
    core.finish(everyone, lambda: 3)
    pair.judge([root, *everyone])


def test_row_reads_kv_of_earlier_row_in_step(pair: Pair) -> None:
    core = Core(pair.runner)
    writer = core.new(prompt(2, 26))
    reader = core.new(prompt(2, 24) + prompt(3, 6))
    writing = core.row(writer, 1000)
    reader.blocks, reader.computed = writer.blocks[:6], 24
    reading = core.row(reader, 1000)
    first, second = pair.runner.run([writing, reading], [])
    writer.ids.append(first)
    reader.ids.append(second)
    pair.judge([writer, reader])


@pytest.mark.parametrize("num_contexts", [1, 4, 16])
def test_mixed_prefill_and_decode_stay_exact(pair: Pair, num_contexts: int) -> None:
    rng = random.Random(num_contexts)
    core = Core(pair.runner)
    contexts = [core.new(prompt(i % 3, 5 + i) + prompt(i, i % 7)) for i in range(num_contexts)]
    waiting = list(contexts)
    running: list[Context] = []
    while waiting or any(not context.is_done for context in running):
        if waiting and rng.random() < 0.5:
            running.append(waiting.pop())
        if pending := [context for context in running if not context.is_done]:
            core.step(pending, lambda: rng.choice((1, 1, 7, 1000)))
        # Now and then one is evicted and computed again in other blocks.
        if running and rng.random() < 0.1:
            victim = rng.choice(running)
            victim.blocks, victim.computed = [], 0
    pair.judge(contexts)


def test_planner_without_sharing_gives_same_tokens(pair: Pair) -> None:
    outputs = []
    for saved in (0, 10**9):
        runner = pair.runner
        runner._planner = Planner(block_size=BLOCK, min_saved=saved)
        core = Core(runner)
        root = core.new(prompt(4, 40))
        core.finish([root], lambda: 1000)
        forks = [core.fork(root, 40, prompt(i, 3)) for i in range(4)]
        core.finish(forks, lambda: 1000)
        pair.judge(forks)
        outputs.append([fork.ids for fork in forks])
    pair.runner._planner = Planner(block_size=BLOCK, min_saved=0)
    assert pair.ties or outputs[0] == outputs[1]


def test_seeded_model_is_exact_without_ties(tmp_path: Path) -> None:
    folder = random_model.create(tmp_path / "seeded")
    pair = Pair(folder, runner_of(folder), shrunk.load(folder))
    core = Core(pair.runner)
    texts = ("Once upon a time", "<question>", "x")
    contexts = [core.new(list(text.encode())) for text in texts]
    core.finish(contexts, lambda: 1000)
    pair.judge(contexts)
    assert pair.ties == 0


@pytest.mark.parametrize("optimize", [False, True])
def test_only_sampling_rows_reach_the_output_layer(
    llama: Path, optimize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(llama, optimize=optimize)
    shapes: list[int] = []
    if optimize:
        assert isinstance(runner._fused_decoder, fused_decoder.FusedDecoder)
        output = runner._fused_decoder._output

        def watched(hidden: Tensor) -> Tensor:
            shapes.append(len(hidden))
            return output(hidden)

        monkeypatch.setattr(runner._fused_decoder, "_output", watched)
    else:
        model: Any = runner._model
        model.lm_head.register_forward_hook(lambda *call: shapes.append(call[2].shape[1]))
    core = Core(runner)
    contexts = [core.new(prompt(0, 9)), core.new(prompt(1, 30))]
    core.step(contexts, lambda: 10)
    core.step([contexts[1]], lambda: 10)
    assert shapes == [1, 0]


def test_step_without_rows_copies_blocks(llama: Path) -> None:
    runner = runner_of(llama)
    key_cache = runner._caches[0][0]
    with torch.inference_mode():
        key_cache[3] = 7.0
    assert runner.run([], [(3, 5)]) == []
    assert (key_cache[5] == 7.0).all()


def test_bfloat16_model_has_bfloat16_caches(llama: Path) -> None:
    runner = TorchModelRunner(
        EngineConfig(model=str(llama), dtype="bfloat16", num_blocks=64, block_size=BLOCK, threads=1)
    )
    assert {cache.dtype for cache_pair in runner._caches for cache in cache_pair} == {
        torch.bfloat16
    }
    core = Core(runner)
    contexts = [core.new(prompt(1, 20)), core.new(prompt(2, 5))]
    core.finish(contexts, lambda: 7)
    assert all(0 <= token < 259 for context in contexts for token in context.ids)


def test_runner_describes_its_model(llama: Path) -> None:
    runner = TorchModelRunner(EngineConfig(model=str(llama), dtype="float32", threads=1))
    assert runner.model == "tiny-llama"
    assert runner.eos_ids == (258,)
    assert runner.bos_id is None
    assert "<|im_start|>" in runner.chat_template
    assert runner.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert json.loads(runner.tokenizer_json)["model"]["type"] == "BPE"
    assert "LlamaForCausalLM" in runner.description
    assert runner.num_ids == len(runner._model.model.embed_tokens.weight)
    assert runner.limits.context_len == 256
    assert runner.limits.num_blocks == capacity.DEFAULT_CONTEXTS * 256 // 16


def test_seeded_model_is_created_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The compiled kernels of the real cache: compiling them again takes half a minute.
    kernels = cache_folder() / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    (tmp_path / "conure").mkdir()
    (tmp_path / "conure" / "kernels").symlink_to(kernels)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    runner = TorchModelRunner(EngineConfig(model="seeded", threads=1, num_blocks=64))
    assert runner.model == "seeded"
    assert "means nothing" in runner.description
    assert runner.limits.context_len == 64 * 16
    assert (tmp_path / "conure" / f"seeded-{random_model.VERSION}" / "model.safetensors").is_file()


def test_little_memory_shortens_the_context(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 3 layers of 2 heads of 16 + 16 floats: 768 bytes a token.
    share = capacity.MEMORY_SHARE["cpu"]
    monkeypatch.setattr(device, "free_bytes", lambda _: int(100 * 768 / share))
    runner = TorchModelRunner(EngineConfig(model=str(llama), dtype="float32", threads=1))
    assert (runner.limits.num_blocks, runner.limits.context_len) == (6, 96)


@pytest.mark.parametrize(
    ("num_bytes", "most", "expected"),
    [(2 * 2**20, 8, 1), (48 * 2**20, 8, 6), (48 * 2**20, 2, 2), (2**30, 8, 8)],
)
def test_small_model_uses_few_threads(num_bytes: int, most: int, expected: int) -> None:
    assert capacity.threads(num_bytes, most) == expected


def test_threads_follow_option_or_model_size(llama: Path) -> None:
    before = torch.get_num_threads()
    try:
        TorchModelRunner(EngineConfig(model=str(llama), dtype="float32", threads=2))
        assert torch.get_num_threads() == 2
        TorchModelRunner(EngineConfig(model=str(llama), dtype="float32"))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_nan_weights_are_rejected(llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama, tmp_path / "broken")
    weights = load_file(folder / "model.safetensors")
    next(iter(weights.values())).fill_(float("nan"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineError, match="NaN"):
        TorchModelRunner(EngineConfig(model=str(folder), dtype="float32", threads=1))


@pytest.mark.parametrize(
    ("options", "code", "named"),
    [
        ({"model": "/no/such/folder"}, "model.not_found", "/no/such/folder"),
        ({"model": "nosuchname"}, "model.not_found", "nosuchname"),
        ({"dtype": "float16"}, "engine.bad_option", "float16"),
        ({"device": "cuda"}, "engine.bad_option", "cuda"),
        ({"context_len": 300}, "engine.bad_option", "the model supports 256"),
        ({"context_len": 200, "num_blocks": 3}, "engine.bad_option", "200"),
        ({"block_size": 0}, "engine.bad_option", "block_size"),
        ({"num_blocks": 10**9}, "engine.bad_option", "1000000000 blocks of 16 tokens take 11,444"),
        ({"block_size": 10**9}, "engine.bad_option", "1 blocks of 1000000000 tokens take 715"),
    ],
)
def test_wrong_option_is_rejected_in_one_sentence(
    llama: Path, options: dict[str, str | int], code: str, named: str
) -> None:
    with pytest.raises(EngineError) as refused:
        TorchModelRunner(EngineConfig(**{"model": str(llama), **options}))  # type: ignore[arg-type]  # wrong on purpose
    assert refused.value.code == code
    assert named in refused.value.message
    assert "\n" not in refused.value.message


@pytest.mark.parametrize("options", [{"context_len": 300}, {"context_len": 200, "num_blocks": 3}])
def test_impossible_context_fails_before_loading_weights(
    llama: Path, tmp_path: Path, options: dict[str, int]
) -> None:
    for path in llama.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(EngineError, match="context_len"):
        TorchModelRunner(EngineConfig(model=str(tmp_path), **options))  # type: ignore[arg-type]  # numbers are numbers


def test_missing_tensor_is_rejected(llama: Path, tmp_path: Path) -> None:
    for path in llama.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.self_attn.k_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineError, match="k_proj") as refused:
        runner_of(tmp_path)
    assert refused.value.code == "model.invalid"


def test_weights_of_wrong_shape_are_rejected(llama: Path, tmp_path: Path) -> None:
    for path in llama.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    wanted = list(weights[name].shape)
    weights[name] = weights[name][:-1].clone()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineError) as refused:
        runner_of(tmp_path)
    assert refused.value.code == "model.invalid"
    there = [wanted[0] - 1, wanted[1]]
    assert f"{name} has shape {there}, the config needs {wanted}" in refused.value.message


def test_truncated_weights_file_is_rejected(llama: Path, tmp_path: Path) -> None:
    for path in llama.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(EngineError, match="not fully covered") as refused:
        runner_of(tmp_path)
    assert refused.value.code == "model.invalid"


def test_damaged_weights_file_is_rejected(llama: Path, tmp_path: Path) -> None:
    for path in llama.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 64)
    with pytest.raises(EngineError, match="cannot load") as refused:
        runner_of(tmp_path)
    assert refused.value.code == "model.invalid"


def dummy(folder: Path) -> EngineConfig:
    """Return the options of an engine without weights on the first GPU."""
    sizes: dict[str, Any] = {"num_blocks": 40, "max_sequences": 6, "step_tokens": 128}
    return EngineConfig(dummy_weights=str(folder / "config.json"), dtype="bfloat16", **sizes)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9)])
def test_launches_of_an_older_gpu_do_not_overlap(llama: Path, capability: tuple[int, int]) -> None:
    pytest.importorskip("triton")
    layers = [probe.LayerKVSpec(2, 16, 16, None, index) for index in range(3)]
    with fake_cuda(layers, capability=capability, shared_bytes=SMALL_SHARED_BYTES) as gpu:
        TorchModelRunner(dummy(llama))
    # Small and large items in three layers, by the modules and by the fused decoder.
    assert gpu.launches["attend_kernel"] == 12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 192}, "head size 192, .* at most 128 on this device"),
        (
            {"num_attention_heads": 160, "num_key_value_heads": 1, "hidden_size": 160},
            "160 heads per KV head",
        ),
    ],
)
def test_heads_that_no_kernel_of_the_gpu_supports_are_refused(
    changes: dict[str, int], message: str, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    folder = shrunk.write(tmp_path, "llama", num_hidden_layers=1, **changes)
    kv_heads, dim = changes.get("num_key_value_heads", 2), changes.get("head_dim", 16)
    with (
        fake_cuda(
            [probe.LayerKVSpec(kv_heads, dim, dim, None, 0)], shared_bytes=SMALL_SHARED_BYTES
        ),
        pytest.raises(EngineError, match=f"{message}.* use device=cpu") as refused,
    ):
        TorchModelRunner(dummy(folder))
    assert refused.value.code == "model.unsupported"
