"""Train the small language model that ships with Conure, on generated text only.

    python examples/train_tiny/train.py FOLDER [--steps N] [--cooldown N] [--seed S]

A second run with the same folder resumes from the last checkpoint, with the options of the second
run. All randomness depends on the seed and the step number only, so an interrupted and resumed run
has the same result as an uninterrupted one. `export.py` turns a checkpoint into a model folder, and
`evaluate.py` measures its accuracy.

The model is a plain Llama. Muon trains the matrices, AdamW the embedding and the norms, in bfloat16
with float32 master weights. The learning rate is constant and falls to zero in the last
`--cooldown` steps. The maximum passage length grows according to `GROWTH`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.masking_utils import sdpa_mask

from bpe import train_tokenizer
from cases import about_passage, about_texts
from conure.engine.text.byte_tokenizer import TURN_END, TURN_START
from trees import Batch, batch, prompt_end, trees, trunk
from words import Words

VOCAB_SIZE: Final = 1024
CONTEXT_LEN: Final = 1024
SHARDS: Final = 2
"""Parts of a step's data; one or two processes compute them."""
SHARD_TOKENS: Final = 1344
MUON_RATE: Final = 0.02
ADAM_RATE: Final = 0.004
ATTENTION: Final = "written-out"
WARMUP: Final = 60
GROWTH: Final = ((0, 3, 336), (150, 5, 448), (400, 6, 448))
"""(first step, maximum number of facts of a passage, row length)"""


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **settings: Any
) -> tuple[Tensor, None]:
    """Compute attention with plain matrix products, faster than the fused one for short rows."""
    scores = query @ key.transpose(-1, -2) * settings["scaling"] + mask
    mixed = scores.softmax(-1) @ value
    return mixed.transpose(1, 2).contiguous(), None


def config() -> LlamaConfig:
    """Return the configuration of the model."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=CONTEXT_LEN,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
    )


def tokenizer_at(folder: Path, seed: int) -> Tokenizer:
    """Return the tokenizer of a folder; train it first if it does not exist."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        words = Words(random.Random(f"{seed} tokenizer"))
        cases = [
            case
            for number in range(6000)
            for case in (about_texts(words, 2) if number % 3 else about_passage(words, 5, 2))
        ]
        texts = [trunk(case) + prompt_end(case.question) + case.answer for case in cases]
        texts = [text.replace(TURN_START, "").replace(TURN_END, "") for text in texts]
        train_tokenizer(texts, VOCAB_SIZE).save(str(path))
    return Tokenizer.from_file(str(path))


def growth_at(step: int) -> tuple[int, int]:
    """Return the maximum number of facts of a passage at a step, and the row length."""
    return max((max_facts, length) for start, max_facts, length in GROWTH if step >= start)


@torch.no_grad()
def initialise(model: Any) -> None:
    """Initialise the weights randomly, except for approximate copying heads.

    Copying needs heads in two layers: the first attend to the previous tokens at distance one and
    two, the second search for the current tokens among those (induction heads, Olsson et al.
    2022). Training finds such heads by itself, but late. Here a few heads start as approximations
    of them ("mimetic initialisation", Trockman and Kolter 2023). All weights are trained.
    """
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.normal_(std=parameter.shape[1] ** -0.5)
    embedding = model.model.embed_tokens.weight
    half = embedding.shape[1] // 2
    # The first half of the residual stream identifies the token, with one direction constant for
    # all tokens. The second half is free for the tokens at distance one and two.
    embedding *= half**0.5 / embedding[:, :half].norm(dim=1, keepdim=True)
    embedding[:, half:] *= 0.1
    embedding[:, half - 1] = 1.5
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(0.3)
        layer.mlp.down_proj.weight.mul_(0.3)
    # The embedding is also the output layer: larger logits would make the initial model certain.
    model.model.norm.weight.fill_(0.2)
    size = model.config.head_dim
    pairs, quarter = size // 2, half // 2
    theta = model.config.rope_parameters["rope_theta"]
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    content = torch.nn.init.orthogonal_(torch.empty(size, half - 1))
    for distance, rows in ((1, slice(0, size)), (2, slice(size, 2 * size))):
        # Scores sum(cos(frequency * (d - distance))) are largest at d = distance.
        frequencies = theta ** (-torch.arange(5) / pairs)
        at = rows.start + torch.arange(5)
        for projection in (first.q_proj, first.k_proj):
            projection.weight[rows] *= 0.1
        first.k_proj.weight[at, half - 1] = 3.5
        first.q_proj.weight[at, half - 1] = 3.5 * (distance * frequencies).cos()
        first.q_proj.weight[at + pairs, half - 1] = -3.5 * (distance * frequencies).sin()
        offset = half + (distance - 1) * quarter
        first.v_proj.weight[rows] *= 0.1
        first.v_proj.weight[rows, : half - 1] = content
        first.o_proj.weight[:, rows] *= 0.1
        first.o_proj.weight[offset : offset + size, rows] = torch.eye(size)
    # Slowly rotating dimensions compare contents independently of the distance. One head compares
    # the current token, the other the current and the previous one.
    slow = torch.tensor([*range(7, pairs), *range(pairs + 7, size)])
    for number, rows in enumerate((slice(0, size), slice(size, 2 * size))):
        for projection in (second.q_proj, second.k_proj, second.v_proj):
            projection.weight[rows] *= 0.1
        second.o_proj.weight[:, rows] *= 0.1
        mix = 2.5 * torch.nn.init.orthogonal_(torch.empty(len(slow), size))
        at = (rows.start + slow).tensor_split(1 + number)
        parts = mix.tensor_split(1 + number)
        second.q_proj.weight[at[0], : half - 1] = parts[0] @ content
        second.k_proj.weight[at[0], half : half + size] = parts[0]
        if number == 1:
            second.q_proj.weight[at[1], half : half + size] = parts[1]
            second.k_proj.weight[at[1], half + size :] = parts[1]
        part = torch.arange(number * quarter, (number + 1) * quarter)
        second.v_proj.weight[rows.start + torch.arange(quarter), part] = 1.0
        second.o_proj.weight[part, rows.start + torch.arange(quarter)] = 2.0


class Training:
    """A model, its optimizers and the number of the next step."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        torch.manual_seed(seed)
        AttentionInterface.register(ATTENTION, attend)
        AttentionMaskInterface.register(ATTENTION, sdpa_mask)
        self.model: Any = LlamaForCausalLM(config())
        self.model.set_attn_implementation(ATTENTION)
        initialise(self.model)
        self.masters = [p.detach().clone().float() for p in self.model.parameters()]
        self.model = self.model.bfloat16()
        names = [name for name, _ in self.model.named_parameters()]
        is_matrix = ["layers" in name and "norm" not in name for name in names]
        matrices = [m for m, yes in zip(self.masters, is_matrix, strict=True) if yes]
        others = [m for m, yes in zip(self.masters, is_matrix, strict=True) if not yes]
        self.optimizers = (
            torch.optim.Muon(
                matrices,
                lr=MUON_RATE,
                momentum=0.95,
                weight_decay=0.0,
                adjust_lr_fn="original",
            ),
            torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0),
        )
        self.rates = (MUON_RATE, ADAM_RATE)
        self.step = 0
        self.num_tokens = self.num_learnt = 0

    def load_masters(self) -> None:
        """Copy the master weights into the model, and clear its gradients."""
        with torch.no_grad():
            for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
                parameter.copy_(master)
                parameter.grad = None

    def gradients(self, data: Batch) -> Tensor:
        """Return the gradients of one shard as a vector, followed by its loss and its accuracy."""
        hidden = self.model.model(
            input_ids=data.ids,
            position_ids=data.positions,
            attention_mask=data.mask,
            use_cache=False,
        ).last_hidden_state
        logits = self.model.lm_head(hidden.flatten(0, 1)[data.sources]).float()
        losses = torch.nn.functional.cross_entropy(logits, data.targets, reduction="none")
        loss = (losses * data.weights).sum() / data.weights.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        right = (logits.argmax(-1) == data.targets).float().mean()
        grads = [parameter.grad.float().flatten() for parameter in self.model.parameters()]
        for parameter in self.model.parameters():
            parameter.grad = None
        return torch.cat([*grads, loss.detach()[None], right[None]])

    def apply(self, gradients: Tensor, factor: float) -> None:
        """Take one step of the optimizers."""
        ends = torch.tensor([master.numel() for master in self.masters]).cumsum(0)
        for master, grad in zip(self.masters, gradients.tensor_split(ends), strict=False):
            master.grad = grad.view_as(master).clone()
        for optimizer, rate in zip(self.optimizers, self.rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
        self.step += 1

    def save(self, path: Path) -> None:
        """Write a checkpoint atomically."""
        scratch = path.with_suffix(".new")
        torch.save(
            {
                "seed": self.seed,
                "step": self.step,
                "num_tokens": self.num_tokens,
                "num_learnt": self.num_learnt,
                "masters": self.masters,
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            },
            scratch,
        )
        os.replace(scratch, path)

    def restore(self, path: Path) -> None:
        """Restore a checkpoint of the same seed."""
        checkpoint = torch.load(path)
        assert checkpoint["seed"] == self.seed
        self.step = checkpoint["step"]
        self.num_tokens, self.num_learnt = checkpoint["num_tokens"], checkpoint["num_learnt"]
        with torch.no_grad():
            for master, stored in zip(self.masters, checkpoint["masters"], strict=True):
                master.copy_(stored)
        for optimizer, state in zip(self.optimizers, checkpoint["optimizers"], strict=True):
            optimizer.load_state_dict(state)


def run(rank: int, options: argparse.Namespace) -> None:
    """Train in one of the processes, which all have the same model."""
    torch.set_num_threads(1)
    if options.workers > 1:
        rendezvous = f"file://{options.folder.resolve()}/.meeting"
        dist.init_process_group("gloo", rendezvous, rank=rank, world_size=options.workers)
    tokenizer = Tokenizer.from_file(str(options.folder / "tokenizer.json"))
    training = Training(options.seed)
    path = options.folder / "checkpoint.pt"
    if path.is_file():
        training.restore(path)
    start_s, recent = time.monotonic(), []
    while training.step < options.steps:
        max_facts, row_len = growth_at(training.step)
        training.load_masters()
        total: Tensor | None = None
        for shard in range(rank, SHARDS, options.workers):
            words = Words(random.Random(f"{options.seed} {training.step} {shard}"))
            data = batch(
                trees(words, tokenizer, max_facts), SHARD_TOKENS // row_len, row_len, torch.bfloat16
            )
            training.num_tokens += data.ids.numel() * options.workers
            training.num_learnt += len(data.targets) * options.workers
            gradients = training.gradients(data)
            total = gradients if total is None else total + gradients
        assert total is not None
        if options.workers > 1:
            dist.all_reduce(total)
        total /= SHARDS
        left = (options.steps - training.step) / max(1, options.cooldown)
        training.apply(total, min(1.0, (training.step + 1) / WARMUP, left))
        recent.append(total[-2:].tolist())
        if not math.isfinite(recent[-1][0]):
            raise SystemExit(f"loss is {recent[-1][0]} at step {training.step}: training diverged")
        if rank == 0 and training.step % 20 == 0:
            loss, right = (sum(column) / len(recent) for column in zip(*recent, strict=True))
            line = {
                "step": training.step,
                "facts": max_facts,
                "loss": round(loss, 4),
                "right": round(right, 4),
                "num_tokens": training.num_tokens,
                "num_learnt": training.num_learnt,
                "cpu_s": round(time.process_time(), 1),
                "wall_s": round(time.monotonic() - start_s, 1),
            }
            with (options.folder / "log.jsonl").open("a") as log:
                print(json.dumps(line), file=log)
            recent = []
        if rank == 0 and (training.step % 60 == 0 or training.step == options.steps):
            training.save(path)


def main() -> None:
    """Parse the arguments and train."""
    parser = argparse.ArgumentParser(
        description="train the small model of Conure",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="folder of tokenizer, checkpoint and log")
    parser.add_argument(
        "--steps",
        type=int,
        default=9000,
        help="total number of steps, including those before a resume",
    )
    parser.add_argument(
        "--cooldown",
        type=int,
        default=2500,
        help="number of last steps in which the rate falls to zero",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data")
    parser.add_argument(
        "--workers",
        type=int,
        default=SHARDS,
        choices=(1, SHARDS),
        help="number of single-threaded processes",
    )
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / "checkpoint.pt"
    if path.is_file() and (seed := torch.load(path)["seed"]) != options.seed:
        parser.error(f"{path} was started with seed {seed}: pass --seed {seed}, or another folder")
    tokenizer_at(options.folder, options.seed)
    (options.folder / ".meeting").unlink(missing_ok=True)
    spawn(run, (options,), nprocs=options.workers)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
