"""The forward pass of the plain decoder family on an accelerator.

The same structure as in `lean`, cut differently: an accelerator wants few launches and few
passes through memory, so what lies between two matrix products is one kernel of
`conure.kernels.fused`. Queries, keys and values are one product, gate and up another; their
weights lie behind one another, and the modules keep views of them, so that the model itself
still runs.

Knows the structure and the weights, no contexts. Kept true: nothing here asks the device for
a number, nor depends on one that the host knows, but the number of tokens; weights exist once.

Shapes: T packed tokens - W width of the hidden state - H query heads - K kv heads - D head dim -
V tokens of the vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from conure.kernels.fused import Fused

from . import lean
from .step import Attention


class _Linear(NamedTuple):
    weight: Tensor
    bias: Tensor | None


class _Layer(NamedTuple):
    before: Tensor
    """Weight of the norm before attention."""
    qkv: _Linear
    head_norm: Tensor | None
    """Weights of a norm of each query and key head, [H + K, D]."""
    out: _Linear
    after: Tensor
    """Weight of the norm after attention."""
    gate_up: _Linear
    down: _Linear


class FusedModel:
    """The forward pass of a model that `lean.is_plain`."""

    def __init__(self, model: Any, num_positions: int, operations: Fused) -> None:
        """Join the weights that are used together.

        Args:
            model: As loaded; it keeps views of its weights.
            num_positions: Positions that will ever be asked for.
            operations: What lies between matrix products.
        """
        config, decoder = model.config, model.model
        self._operations = operations
        self._eps = float(config.rms_norm_eps)
        self._scale = float(decoder.layers[0].self_attn.scaling)
        self._embedding: Tensor = decoder.embed_tokens.weight.data
        self._norm: Tensor = decoder.norm.weight.data
        self._output = _joined(model.lm_head)
        with torch.no_grad():
            cos, sin = lean.angles(decoder, num_positions)
            self._angles = cos.flatten(1), sin.flatten(1)
            self._layers = [_layer(layer) for layer in decoder.layers]

    def __call__(
        self, ids: Tensor, positions: Tensor, last: Tensor, attention: Attention
    ) -> Tensor:
        """Return the logits at some of the packed tokens.

        Args:
            ids: [T].
            positions: [T], each below the number of positions that the model was built for.
            last: Packed tokens whose logits are wanted.
            attention: Over the caches.

        Returns:
            [len(last), V].
        """
        operations, eps = self._operations, self._eps
        hidden = functional.embedding(ids, self._embedding)
        normed = functional.rms_norm(hidden, (hidden.shape[1],), self._layers[0].before, eps)
        following = [layer.before for layer in self._layers[1:]]
        for index, (layer, norm) in enumerate(
            zip(self._layers, [*following, self._norm], strict=True)
        ):
            query = operations.rotate_store(
                functional.linear(normed, *layer.qkv),
                positions,
                attention.slots,
                self._angles,
                layer.head_norm,
                eps,
                attention.caches[index],
            )
            found = attention.read(index, query, self._scale).flatten(1)
            delta = functional.linear(found, *layer.out)
            normed = operations.add_norm(hidden, delta, layer.after, eps)
            gated = operations.gate(functional.linear(normed, *layer.gate_up))
            delta = functional.linear(gated, *layer.down)
            normed = operations.add_norm(hidden, delta, norm, eps)
        return functional.linear(normed.index_select(0, last), *self._output)

    def restore(self) -> None:
        """Leave the weights to the model, which has them."""


def _layer(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return _Layer(
        before=layer.input_layernorm.weight.data,
        qkv=_joined(attention.q_proj, attention.k_proj, attention.v_proj),
        head_norm=lean.head_norm(attention),
        out=_joined(attention.o_proj),
        after=layer.post_attention_layernorm.weight.data,
        gate_up=_joined(mlp.gate_proj, mlp.up_proj),
        down=_joined(mlp.down_proj),
    )


def _joined(*modules: nn.Linear) -> _Linear:
    """Return modules in a row as one; they keep views of its weight."""
    if len(modules) == 1:
        bias = modules[0].bias
        return _Linear(modules[0].weight.data, None if bias is None else bias.data)
    weight = torch.cat([module.weight.data for module in modules])
    sizes = [len(module.weight) for module in modules]
    for module, part in zip(modules, torch.split(weight, sizes), strict=True):
        module.weight.data = part
    biases = [
        weight.new_zeros(size) if module.bias is None else module.bias.data
        for module, size in zip(modules, sizes, strict=True)
    ]
    has_bias = any(module.bias is not None for module in modules)
    return _Linear(weight, torch.cat(biases) if has_bias else None)
