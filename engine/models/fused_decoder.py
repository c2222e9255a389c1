"""Fused forward pass of Llama-like decoders, without a module tree.

Llama, Mistral, Qwen2 and Qwen3 share one structure: norm, attention with rotary embedding, norm,
gated MLP. `FusedDecoder` takes the weights of such a model and runs the same arithmetic: query, key
and value are one product, gate and up another, and the operations between two products are one
kernel of `conure.kernels.elementwise`. On small models the overhead of transformers' modules is as
large as the computation; an accelerator needs few launches and few passes over memory.

Models that `is_supported` does not recognise run by their modules. A recognised model must pass
`logits_match` against its own logits before the decoder is used.

Invariants: in float32 the logits equal the model's except for the order of additions. Each weight
exists once in memory. The forward pass never synchronises with an accelerator, and the number of
tokens is the only value on the host that it depends on.

Shapes: T packed tokens - H query heads - K kv heads - D head dim - L positions - V tokens of
the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from conure.kernels.cpu.decoder import NativeDecoder, NativeLayer
from conure.kernels.elementwise import ElementwiseOperations

from ..runner.step_inputs import Attention
from . import llama, llama_config
from .probe import LayerKVSpec
from .projection import Multiply, Pack, Projection

MakeNativeDecoder: TypeAlias = Callable[..., NativeDecoder]
"""`NativeDecoder` for one library; see its arguments."""
MODELS: Final = frozenset({llama.LlamaLikeDecoder.__name__, *llama_config.ARCHITECTURES.values()})
"""Names of the model classes."""
_LENGTH_INDEPENDENT_ROPE: Final = frozenset({"default", "linear", "llama3", "yarn"})
_TOLERANCES: Final = {torch.float64: 1e-4, torch.float32: 1e-4}
_TOLERANCE_16_BIT: Final = 0.1
"""Difference of logits, in units of their spread, that rounding to 16 bits explains."""


class _Layer(NamedTuple):
    before: Tensor
    """Weight of the norm before attention."""
    qkv: Projection
    head_norm: Tensor | None
    """Weights of the norms of query and key heads, [H + K, D]."""
    out: Projection
    after: Tensor
    """Weight of the norm after attention."""
    gate_up: Projection
    down: Projection


class FusedDecoder:
    """The forward pass of a supported model. It takes over the weights."""

    def __init__(
        self,
        model: Any,
        num_positions: int,
        operations: ElementwiseOperations,
        pack: Pack | None = None,
        *,
        multiply: Multiply = functional.linear,
        is_recorded: bool = False,
    ) -> None:
        """Fuse and lay out the weights.

        Args:
            model: A supported model. It may be unable to run by itself until `restore`.
            num_positions: Number of positions that are ever used.
            operations: The operations between matrix products.
            pack: Packs weights; None leaves them in torch's layout.
            multiply: Multiplies with weights in torch's layout.
            is_recorded: Launches are recorded, so weights stay in torch's layout.
        """
        config, decoder = model.config, model.model
        self._operations = operations
        self._eps = float(config.rms_norm_eps)
        self._scale = float(decoder.layers[0].self_attn.scaling)
        self._embedding: Tensor = decoder.embed_tokens.weight.data
        self._norm: Tensor = decoder.norm.weight.data
        with torch.no_grad():
            cos, sin = rope_tables(decoder, num_positions)
            self._angles = cos.flatten(1), sin.flatten(1)
            project = partial(Projection, pack=pack, multiply=multiply, may_reorder=not is_recorded)
            self._layers = [_layer(layer, project) for layer in decoder.layers]
            is_shared = model.lm_head.weight is decoder.embed_tokens.weight
            self._output = project(model.lm_head, is_shared=is_shared)
        self._native: NativeDecoder | None = None

    def compile(
        self,
        make: MakeNativeDecoder,
        caches: Sequence[tuple[Tensor, Tensor]],
        windows: Sequence[int | None],
    ) -> None:
        """Run the decoder in one call from now on, if all weights are packed for the kernels.

        Args:
            make: Makes the call.
            caches: Keys and values of each layer, which every step must use.
            windows: Attention window of each layer.
        """
        layers: list[NativeLayer] = []
        norms = self._norms_after_layers()
        for layer, norm, pair, window in zip(self._layers, norms, caches, windows, strict=True):
            qkv, out, gate_up, down = (
                projection.packed
                for projection in (layer.qkv, layer.out, layer.gate_up, layer.down)
            )
            if qkv is None or out is None or gate_up is None or down is None:
                return
            layers.append(
                NativeLayer(
                    qkv, out, gate_up, down, layer.head_norm, layer.after, norm, pair, window
                )
            )
        self._native = make(
            layers,
            self._embedding,
            self._layers[0].before,
            self._angles,
            eps=self._eps,
            scale=self._scale,
        )

    def __call__(
        self, ids: Tensor, positions: Tensor, last: Tensor, attention: Attention
    ) -> Tensor:
        """Return the logits at some of the packed tokens.

        Args:
            ids: [T].
            positions: [T], each below `num_positions`.
            last: Packed tokens whose logits are needed.
            attention: Attention over the caches.

        Returns:
            [len(last), V].
        """
        return self.logits(self.hidden(ids, positions, attention), last)

    def logits(self, hidden: Tensor, last: Tensor) -> Tensor:
        """Return the logits [len(last), V] of hidden states [T, H] at some of the tokens."""
        return self._output(hidden.index_select(0, last))

    def hidden(self, ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Return the states [T, H] that the output layer reads; arguments as of `__call__`."""
        if self._native is not None:
            return self._native(ids, positions, attention.slots, attention.plan)
        hidden = functional.embedding(ids, self._embedding)
        first = self._layers[0].before
        normed = functional.rms_norm(hidden, (hidden.shape[1],), first, self._eps)
        return self._run_layers(hidden, normed, positions, attention)

    def _run_layers(
        self, hidden: Tensor, normed: Tensor, positions: Tensor, attention: Attention
    ) -> Tensor:
        """Run the layers operation by operation; return the norm after the last one."""
        operations, eps = self._operations, self._eps
        norms = self._norms_after_layers()
        for index, (layer, norm) in enumerate(zip(self._layers, norms, strict=True)):
            query = operations.rotate_store(
                layer.qkv(normed),
                positions,
                attention.slots,
                self._angles,
                layer.head_norm,
                eps,
                attention.caches[index],
            )
            attended = attention.read(index, query, self._scale).flatten(1)
            normed = operations.add_norm(hidden, layer.out(attended), layer.after, eps)
            gated = operations.silu_mul(layer.gate_up(normed))
            normed = operations.add_norm(hidden, layer.down(gated), norm, eps)
        return normed

    def _norms_after_layers(self) -> list[Tensor]:
        return [*(layer.before for layer in self._layers[1:]), self._norm]

    def restore(self) -> None:
        """Return the weights to the model."""
        for layer in self._layers:
            for projection in (layer.qkv, layer.out, layer.gate_up, layer.down):
                projection.restore()
        self._output.restore()


def is_supported(model: Any, layers: Sequence[LayerKVSpec]) -> bool:
    """Return whether `FusedDecoder` computes the structure of a model.

    The names of all modules must match: a missing or additional one is another structure.

    Args:
        model: A loaded model.
        layers: Its layers, as probed.
    """
    if type(model).__name__ not in MODELS:
        return False
    config, decoder = model.config, model.model
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        all(set(module._modules) == names for module, names in _modules(model))
        and all(type(linear) is nn.Linear for linear in _linears(model))
        and config.hidden_act == "silu"
        and rope.get("rope_type", "default") in _LENGTH_INDEPENDENT_ROPE
        and all(layer.source == index for index, layer in enumerate(layers))
        and len({parameter.dtype for parameter in model.parameters()}) == 1
        and len({(layer.kv_heads, layer.key_dim, layer.value_dim) for layer in layers}) == 1
        and layers[0].key_dim == layers[0].value_dim == decoder.layers[0].self_attn.head_dim
    )


def logits_match(logits: Tensor, expected: Tensor) -> bool:
    """Return whether logits [T, V] equal the expected ones except for rounding."""
    tolerance = _TOLERANCES.get(expected.dtype, _TOLERANCE_16_BIT)
    logits, expected = logits.float(), expected.float()
    spread = expected.std(dim=-1).square().mean().sqrt()
    difference = (logits - expected).square().mean().sqrt()
    return bool(difference <= tolerance * spread)


def _modules(model: Any) -> Iterator[tuple[Any, set[str]]]:
    """Yield each module that has children, with the expected names of the children."""
    yield model, {"model", "lm_head"}
    yield model.model, {"embed_tokens", "layers", "norm", "rotary_emb"}
    for layer in model.model.layers:
        yield layer, {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
        yield layer.mlp, {"gate_proj", "up_proj", "down_proj", "act_fn"}
        names = {"q_proj", "k_proj", "v_proj", "o_proj"}
        if "q_norm" in layer.self_attn._modules:
            names |= {"q_norm", "k_norm"}
        yield layer.self_attn, names


def _linears(model: Any) -> Iterator[nn.Linear]:
    yield model.lm_head
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        yield from (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        yield from (mlp.gate_proj, mlp.up_proj, mlp.down_proj)


def head_norm(attention: Any) -> Tensor | None:
    """Return the norm weights of query and key heads, [H + K, D]; None without such norms."""
    if "q_norm" not in attention._modules:
        return None
    query, key = (
        norm.weight.data.expand(len(linear.weight) // attention.head_dim, -1)
        for norm, linear in (
            (attention.q_norm, attention.q_proj),
            (attention.k_norm, attention.k_proj),
        )
    )
    return torch.cat((query, key))


def _layer(layer: Any, project: Callable[..., Projection]) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    per_head = head_norm(attention)  # before `Projection` takes the weights whose size it reads
    return _Layer(
        before=layer.input_layernorm.weight.data,
        qkv=project(attention.q_proj, attention.k_proj, attention.v_proj),
        head_norm=per_head,
        out=project(attention.o_proj),
        after=layer.post_attention_layernorm.weight.data,
        gate_up=project(mlp.gate_proj, mlp.up_proj),
        down=project(mlp.down_proj),
    )


def rope_tables(decoder: Any, num_positions: int) -> tuple[Tensor, Tensor]:
    """Return cosines and signed sines [L, 1, D], computed by the model's rotary embedding."""
    device = decoder.embed_tokens.weight.device
    positions = torch.arange(num_positions, device=device)[None]
    cos, sin = decoder.rotary_emb(decoder.embed_tokens.weight[:1, None], positions)
    sin = torch.cat((-sin[..., : sin.shape[-1] // 2], sin[..., sin.shape[-1] // 2 :]), dim=-1)
    return cos[0][:, None].contiguous(), sin[0][:, None].contiguous()
