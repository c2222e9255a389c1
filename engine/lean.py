"""The forward pass of the plain decoder family, without a module tree.

Llama, Mistral, Qwen2 and Qwen3 are one structure: norm, attention with rotary embedding,
norm, gated MLP. `LeanModel` takes the weights of such a model and runs the same arithmetic
with query, key and value in one projection, what follows a projection element by element
within it, weights laid out once for the CPU's matrix library, and angles from a table. On
small models the modules of transformers cost as much as the model.

Whatever `is_plain` does not recognise stays with transformers, and what it recognises is to
be believed only after a trial: `agrees` compares logits with those of the model itself.

Knows the structure and the weights, no contexts and no blocks. Kept true: in float32 the
logits are the model's but for the order of additions; weights exist once.

Shapes: T packed tokens - H query heads - K kv heads - D head dim - L positions - V tokens of
the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from .trial import Layer

FAMILIES: Final = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
)
_STEADY_ROPE: Final = frozenset({"default", "linear", "llama3", "yarn"})
_TOLERANCES: Final = {torch.float64: 1e-4, torch.float32: 1e-4}
_ROUGH: Final = 0.1
"""Difference of logits, in units of their spread, that rounding to 16 bits explains."""


class Attend(Protocol):
    """What happens between the projections of a layer."""

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        """Store key and value [T, K, D], attend query [T, H, D]; return [T, H, D]."""
        ...


class Projection:
    """One linear map whose outputs are those of several modules in a row.

    The weight is laid out as the CPU's matrix library reads it fastest, by operators that are
    private to torch: where they are missing, or the CPU lacks the dtype, the plain one does
    the same. The modules give their weights up, as they would take the memory twice; those
    that are plain get views.
    """

    def __init__(self, *modules: nn.Linear, is_shared: bool = False) -> None:
        """Take the modules' weights; `is_shared`: somebody else reads them too."""
        self._modules = modules
        weight = torch.cat([module.weight.data for module in modules])
        biases = [
            torch.zeros_like(module.weight[:, 0]) if module.bias is None else module.bias.data
            for module in modules
        ]
        has_bias = any(module.bias is not None for module in modules)
        self._bias = torch.cat(biases) if has_bias else None
        self._is_packed = _can_pack(weight)
        self._is_shared = is_shared
        self._sizes = [len(module.weight) for module in modules]
        if not self._is_packed:
            self._weight = modules[0].weight.data if is_shared else weight
            if not is_shared:
                self._give(weight)
            return
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        if not is_shared:
            for module in modules:
                module.weight.data = weight.new_empty(0)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return [T, sum of outputs] from [T, inputs]."""
        if self._is_packed:
            return self._apply(inputs, "none")
        return functional.linear(inputs, self._weight, self._bias)

    def silu(self, inputs: Tensor) -> Tensor:
        """Return the same through the gate's function; like `times` and `plus` in one pass."""
        if self._is_packed:
            return self._apply(inputs, "swish")
        return functional.silu(functional.linear(inputs, self._weight, self._bias))

    def times(self, inputs: Tensor, others: Tensor) -> Tensor:
        """Return the same times others [T, sum of outputs]."""
        if self._is_packed:
            return self._combine(inputs, others, "mul")
        return functional.linear(inputs, self._weight, self._bias).mul_(others)

    def plus(self, inputs: Tensor, others: Tensor) -> Tensor:
        """Return the same plus others [T, sum of outputs]."""
        if self._is_packed:
            return self._combine(inputs, others, "add")
        return functional.linear(inputs, self._weight, self._bias).add_(others)

    def restore(self) -> None:
        """Give the weights back to the modules."""
        if self._is_packed and not self._is_shared:
            self._give(self._weight.to_dense())

    def _apply(self, inputs: Tensor, function: str) -> Tensor:
        library = torch.ops.mkldnn
        out: Tensor = library._linear_pointwise(inputs, self._weight, self._bias, function, [], "")
        return out

    def _combine(self, inputs: Tensor, others: Tensor, function: str) -> Tensor:
        combine = torch.ops.mkldnn._linear_pointwise.binary
        out: Tensor = combine(inputs, others, self._weight, self._bias, function)
        return out

    def _give(self, weight: Tensor) -> None:
        for module, part in zip(self._modules, torch.split(weight, self._sizes), strict=True):
            module.weight.data = part


class _Block(NamedTuple):
    """One layer."""

    before: Tensor
    """Weight of the norm before attention."""
    qkv: Projection
    head_norm: Tensor | None
    """Weights of a norm of each query and key head, [H + K, D]."""
    out: Projection
    after: Tensor
    """Weight of the norm after attention."""
    gate: Projection
    up: Projection
    down: Projection


class LeanModel:
    """The forward pass of a model that `is_plain`; it takes the weights over."""

    def __init__(self, model: Any, num_positions: int) -> None:
        """Fuse and lay out the weights.

        Args:
            model: As loaded. It cannot run any more, until `restore`.
            num_positions: Positions that will ever be asked for.
        """
        config, decoder = model.config, model.model
        attention = decoder.layers[0].self_attn
        self._eps = float(config.rms_norm_eps)
        self._num_heads = int(config.num_attention_heads)
        self._head_dim = int(attention.head_dim)
        self._num_rotated = self._num_heads + int(config.num_key_value_heads)
        self._scale = float(attention.scaling)
        self._embedding: Tensor = decoder.embed_tokens.weight.data
        self._norm: Tensor = decoder.norm.weight.data
        with torch.no_grad():
            self._cos, self._sin = angles(decoder, num_positions)
            self._blocks = [_block(layer) for layer in decoder.layers]
            is_shared = model.lm_head.weight is decoder.embed_tokens.weight
            self._output = Projection(model.lm_head, is_shared=is_shared)

    def __call__(self, ids: Tensor, positions: Tensor, last: Tensor, attend: Attend) -> Tensor:
        """Return the logits at some of the packed tokens.

        Args:
            ids: [T].
            positions: [T], each below the number of positions that the model was built for.
            last: Packed tokens whose logits are wanted.
            attend: Attention over the caches.

        Returns:
            [len(last), V].
        """
        num_tokens, dim, num_heads = len(ids), self._head_dim, self._num_heads
        cos = self._cos.index_select(0, positions)
        sin = self._sin.index_select(0, positions)
        hidden = functional.embedding(ids, self._embedding)
        for index, block in enumerate(self._blocks):
            mixed = block.qkv(rms_norm(hidden, self._eps).mul_(block.before))
            heads = mixed.view(num_tokens, -1, dim)
            turned = heads[:, : self._num_rotated]
            if block.head_norm is not None:
                turned = rms_norm(turned, self._eps).mul_(block.head_norm)
            # The halves of a head change places; the sign is in the table of sines.
            turned = torch.addcmul(turned * cos, turned.roll(dim // 2, -1), sin)
            query, key = turned[:, :num_heads], turned[:, num_heads:]
            found = attend(index, query, key, heads[:, self._num_rotated :], self._scale)
            hidden = block.out.plus(found.view(num_tokens, -1), hidden)
            mixed = rms_norm(hidden, self._eps).mul_(block.after)
            hidden = block.down.plus(block.up.times(mixed, block.gate.silu(mixed)), hidden)
        hidden = hidden.index_select(0, last)
        return self._output(rms_norm(hidden, self._eps).mul_(self._norm))

    def restore(self) -> None:
        """Give the weights back to the model."""
        for block in self._blocks:
            for projection in (block.qkv, block.out, block.gate, block.up, block.down):
                projection.restore()
        self._output.restore()


def rms_norm(inputs: Tensor, eps: float) -> Tensor:
    """Return vectors [.., D] over their root mean square, in float32 until the end.

    Half as many passes as torch's own, which squares and averages one by one.
    """
    wide = inputs if inputs.dtype.itemsize > 2 else inputs.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = norm.square_().div_(inputs.shape[-1]).add_(eps).rsqrt_()
    return wide * scale if wide is inputs else wide.mul_(scale).to(inputs.dtype)


def is_plain(model: Any, layers: Sequence[Layer]) -> bool:
    """Say whether a model is of the structure that `LeanModel` computes.

    Modules are checked by name: one that is missing, or one more, is another structure.

    Args:
        model: As loaded.
        layers: As the trial saw them.
    """
    if type(model).__name__ not in FAMILIES:
        return False
    config, decoder = model.config, model.model
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        all(set(module._modules) == names for module, names in _modules(model))
        and all(type(linear) is nn.Linear for linear in _linears(model))
        and config.hidden_act == "silu"
        and rope.get("rope_type", "default") in _STEADY_ROPE
        and all(layer.source == index for index, layer in enumerate(layers))
        and len({parameter.dtype for parameter in model.parameters()}) == 1
        and len({(layer.kv_heads, layer.key_dim, layer.value_dim) for layer in layers}) == 1
        and layers[0].key_dim == layers[0].value_dim == decoder.layers[0].self_attn.head_dim
    )


def agrees(logits: Tensor, wanted: Tensor) -> bool:
    """Say whether logits [T, V] are those of the model but for rounding."""
    tolerance = _TOLERANCES.get(wanted.dtype, _ROUGH)
    logits, wanted = logits.float(), wanted.float()
    spread = wanted.std(dim=-1).square().mean().sqrt()
    difference = (logits - wanted).square().mean().sqrt()
    return bool(difference <= tolerance * spread)


def _modules(model: Any) -> Iterator[tuple[Any, set[str]]]:
    """Yield each module that has others, with the names that these should have."""
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
    """Return the weights of the norms of each query and key head, [H + K, D], if there are."""
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


def _block(layer: Any) -> _Block:
    attention, mlp = layer.self_attn, layer.mlp
    per_head = head_norm(attention)  # before `Projection` takes the weights that it counts
    return _Block(
        before=layer.input_layernorm.weight.data,
        qkv=Projection(attention.q_proj, attention.k_proj, attention.v_proj),
        head_norm=per_head,
        out=Projection(attention.o_proj),
        after=layer.post_attention_layernorm.weight.data,
        gate=Projection(mlp.gate_proj),
        up=Projection(mlp.up_proj),
        down=Projection(mlp.down_proj),
    )


def _can_pack(weight: Tensor) -> bool:
    library = torch.ops.mkldnn
    names = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    if weight.device.type != "cpu" or not all(hasattr(library, name) for name in names):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(library._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def angles(decoder: Any, num_positions: int) -> tuple[Tensor, Tensor]:
    """Return cosines and signed sines [L, 1, D] as the model itself makes them."""
    device = decoder.embed_tokens.weight.device
    positions = torch.arange(num_positions, device=device)[None]
    cos, sin = decoder.rotary_emb(decoder.embed_tokens.weight[:1, None], positions)
    sin = torch.cat((-sin[..., : sin.shape[-1] // 2], sin[..., sin.shape[-1] // 2 :]), dim=-1)
    return cos[0][:, None].contiguous(), sin[0][:, None].contiguous()
