"""Linear projections: products of inputs with the weights of a model.

`Projection` multiplies with the weights of one or several modules at once, by the fastest product
of the device. `PackedModules` does so inside of a model that runs by its modules, and
`PackedExperts` inside of one with a mixture of experts.

Invariants: each weight exists once in memory, except for one that another module uses, too.

Shapes: T tokens, H hidden size, E experts of which each token uses K.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from conure.kernels.cpu.linear import PackedLinear

if TYPE_CHECKING:
    from transformers.pytorch_utils import Conv1D

Pack: TypeAlias = Callable[[Tensor, Tensor | None], PackedLinear | None]
"""Packs a weight and its bias for a faster product than that of torch; None if there is none."""
Multiply: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Returns the product of inputs with an unpacked weight and its bias, as `functional.linear`."""


class Projection:
    """One linear projection with the concatenated outputs of several modules.

    The weight is packed for the C++ kernels, or for the CPU's matrix library by private operators
    of torch. Without either, it stays unpacked. To save memory, the modules' own weights are
    dropped if the projection is packed, and become views of its weight if not.
    """

    def __init__(
        self,
        *modules: nn.Linear,
        pack: Pack | None = None,
        multiply: Multiply = functional.linear,
        may_reorder: bool = True,
        is_shared: bool = False,
    ) -> None:
        """Take the modules' weights.

        Args:
            modules: The linear modules.
            pack: Packs weights for the C++ kernels.
            multiply: Multiplies with weights in torch's layout.
            may_reorder: Other weights may get the layout of the CPU's matrix library.
            is_shared: Other modules keep using the weights.
        """
        self._modules = modules
        self._multiply = multiply
        self._is_shared = is_shared
        self._sizes = [len(module.weight) for module in modules]
        weight = modules[0].weight.data
        if len(modules) > 1:
            weight = torch.cat([module.weight.data for module in modules])
        self._bias = _bias(modules)
        self._weight: Tensor | PackedLinear = weight
        packed = None if pack is None else pack(weight, self._bias)
        if packed is not None:
            self._weight = packed
        elif may_reorder and _can_reorder(weight):
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        elif len(modules) > 1:
            self._set_weights(weight)
        if self.is_packed and not is_shared:
            for module in modules:
                module.weight.data = weight.new_empty(0)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return [T, sum of outputs] from [T, inputs]."""
        weight = self._weight
        if isinstance(weight, PackedLinear):
            return weight(inputs)
        if weight.is_mkldnn:
            library = torch.ops.mkldnn
            out: Tensor = library._linear_pointwise(inputs, weight, self._bias, "none", [], "")
            return out
        return self._multiply(inputs, weight, self._bias)

    def apply(self, inputs: Tensor) -> Tensor:
        """Return [..., sum of outputs] from [..., inputs], which need not be contiguous."""
        rows = inputs.reshape(-1, inputs.shape[-1]).contiguous()
        return self(rows).view(*inputs.shape[:-1], sum(self._sizes))

    @property
    def packed(self) -> PackedLinear | None:
        """The weight, if the C++ kernels can multiply with it in one call with others."""
        weight = self._weight
        return weight if isinstance(weight, PackedLinear) and not weight.is_padded else None

    @property
    def is_packed(self) -> bool:
        """Whether the weight has another layout than torch's."""
        return isinstance(self._weight, PackedLinear) or self._weight.is_mkldnn

    def restore(self) -> None:
        """Return the weights to the modules."""
        if not self.is_packed or self._is_shared:
            return
        weight = self._weight
        self._set_weights(
            weight.unpack() if isinstance(weight, PackedLinear) else weight.to_dense()
        )

    def _set_weights(self, weight: Tensor) -> None:
        for module, part in zip(self._modules, torch.split(weight, self._sizes), strict=True):
            module.weight.data = part


class PackedModules:
    """The linear modules of a model, whose products the C++ kernels compute.

    `Conv1D`, the linear module of GPT-2, holds the transpose of its weight. Modules of derived
    classes, and weights that torch multiplies faster, stay as they are. So do the mixtures of
    experts of the few families that do not use transformers' interface for them.
    """

    def __init__(self, model: nn.Module, pack: Pack) -> None:
        """Pack the weights. The modules lose their own, so code that reads them fails.

        Args:
            model: A model on a CPU, which may be unable to run afterwards until `restore`.
            pack: Packs weights.
        """
        # Imported on demand: only these models need transformers, which takes a second to load.
        from transformers.pytorch_utils import Conv1D

        self._packed: Final[list[_PackedModule | PackedExperts]] = []
        num_users = Counter(
            id(parameter)
            for module in model.modules()
            for parameter in module.parameters(recurse=False)
        )
        for module in model.modules():
            packed: _PackedModule | PackedExperts
            if PackedExperts.is_supported(module):
                packed = PackedExperts(module, pack)
            elif type(module) is nn.Linear:
                packed = _PackedModule(module, module, pack, num_users[id(module.weight)] > 1)
            elif type(module) is Conv1D and num_users[id(module.weight)] == 1:
                packed = _PackedModule(module, _as_linear(module), pack)
            else:
                continue
            if packed.is_packed:
                self._packed.append(packed)

    def __len__(self) -> int:
        """Return the number of packed modules."""
        return len(self._packed)

    def restore(self) -> None:
        """Return the weights to the modules."""
        for packed in self._packed:
            packed.restore()
        self._packed.clear()


class _PackedModule:
    """A linear module whose forward pass is a product with a packed weight."""

    def __init__(
        self, module: nn.Linear | Conv1D, linear: nn.Linear, pack: Pack, is_shared: bool = False
    ) -> None:
        """Take the weight of `linear`: the module, or a linear module that computes the same."""
        self._module = module
        self._linear = linear
        self._projection = Projection(linear, pack=pack, may_reorder=False, is_shared=is_shared)
        self.is_packed: Final = self._projection.is_packed
        if self.is_packed:
            module.forward = self._projection.apply  # type: ignore[method-assign]
            if module is not linear:
                module.weight.data = linear.weight.data

    def restore(self) -> None:
        """Return the weight to the module."""
        self._projection.restore()
        if self._module is not self._linear:
            self._module.weight.data = self._linear.weight.data.T.contiguous()
        del self._module.forward


class PackedExperts:
    """The products of a module with a mixture of experts, one for each expert that a token uses.

    The module is one of transformers' `use_experts_implementation`: its weights have a dimension
    for experts, and its attributes tell their layout.
    """

    def __init__(self, module: Any, pack: Pack) -> None:
        """Pack the weights and replace the module's forward pass, unless torch is faster."""
        self._module: Final = module
        names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
        packed = [_packed_experts(module, name, pack) for name in names]
        self.is_packed: Final = all(packed)
        self._weights: Final = dict(zip(names, packed, strict=True))
        if self.is_packed:
            for name in names:
                weight = getattr(module, name)
                weight.data = weight.data.new_empty(0)
            module.forward = self.apply

    @staticmethod
    def is_supported(module: nn.Module) -> bool:
        """Return whether a module has a mixture of experts that this class can compute."""
        names = ("has_gate", "has_bias", "is_transposed", "num_experts", "down_proj", "_apply_gate")
        is_mixture = all(hasattr(module, name) for name in names)
        return is_mixture and not getattr(module, "_is_expert_parallel", False)

    def apply(self, inputs: Tensor, experts: Tensor, shares: Tensor) -> Tensor:
        """Return the sum of the outputs of each token's experts.

        Args:
            inputs: Hidden states. [T, H].
            experts: Numbers of the experts. [T, K].
            shares: Weights of the experts' outputs. [T, K].
        """
        module: Any = self._module
        up, down = self._weights.values()
        numbers, order = torch.sort(experts.reshape(-1))
        ends = torch.bincount(numbers, minlength=module.num_experts).cumsum(0).tolist()
        parts = [
            (expert, start, end)
            for expert, (start, end) in enumerate(pairwise([0, *ends]))
            if end > start
        ]
        rows = _products(up, inputs[order // experts.shape[1]], parts)
        rows = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
        rows = _products(down, rows.contiguous(), parts)
        if getattr(module, "has_post_expert_norm", False):
            rows = module.post_expert_norm(rows)
        rows = rows * shares.reshape(-1)[order, None]
        out = torch.empty_like(rows)
        out[order] = rows
        return out.view(*experts.shape, -1).sum(1).to(inputs.dtype)

    def restore(self) -> None:
        """Return the weights to the module."""
        module = self._module
        for name, packed in self._weights.items():
            weight = torch.stack([each.unpack() for each in packed])
            if module.is_transposed:
                weight = weight.transpose(1, 2).contiguous()
            getattr(module, name).data = weight
        del module.forward


def _packed_experts(module: Any, name: str, pack: Pack) -> list[PackedLinear]:
    """Return the packed weight of each expert, or none if torch's product is faster."""
    weights = getattr(module, name).data
    if module.is_transposed:
        weights = weights.transpose(1, 2)
    biases = getattr(module, f"{name}_bias").data if module.has_bias else [None] * len(weights)
    packed: list[PackedLinear] = []
    for weight, bias in zip(weights, biases, strict=True):
        one = pack(weight, bias)
        if one is None:
            return []
        packed.append(one)
    return packed


def _products(
    weights: Sequence[PackedLinear], rows: Tensor, parts: Sequence[tuple[int, int, int]]
) -> Tensor:
    """Return the rows' products with their experts' weights: expert, first row, end."""
    return torch.cat([weights[expert](rows[start:end]) for expert, start, end in parts])


def _as_linear(module: Conv1D) -> nn.Linear:
    """Return a linear module with the transpose of the weight, which is contiguous."""
    num_inputs, num_outputs = module.weight.shape
    linear = nn.Linear(num_inputs, num_outputs, device="meta")
    linear.weight = nn.Parameter(module.weight.data.T.contiguous(), requires_grad=False)
    linear.bias = module.bias
    return linear


def _bias(modules: Sequence[nn.Linear]) -> Tensor | None:
    """Return the concatenated biases of modules, or None if no module has one."""
    if all(module.bias is None for module in modules):
        return None
    if len(modules) == 1:
        return modules[0].bias.data
    return torch.cat(
        [
            torch.zeros_like(module.weight[:, 0]) if module.bias is None else module.bias.data
            for module in modules
        ]
    )


def _can_reorder(weight: Tensor) -> bool:
    library = torch.ops.mkldnn
    names = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    if weight.device.type != "cpu" or not all(hasattr(library, name) for name in names):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(library._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
