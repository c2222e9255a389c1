"""Linear projections: products of inputs with the weights of a model.

`Projection` multiplies with the weights of one or several modules at once, by the fastest product
of the device. `PackedModules` does so inside of a model that runs by its modules.

Invariants: each weight exists once in memory, except for one that another module uses, too.

Shapes: T tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from conure.kernels.cpu.linear import PackedLinear

Pack: TypeAlias = Callable[[Tensor, Tensor | None], PackedLinear | None]
"""Packs a weight and its bias for a faster product than that of torch; None if there is none."""
Multiply: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Returns the product of inputs with an unpacked weight and its bias, as `functional.linear`."""


class Projection:
    """One linear projection with the concatenated outputs of several modules.

    The weight is packed for the C++ kernels, or for the CPU's matrix library by private operators
    of torch. Without either, it stays unpacked. To save memory, the modules lose their weights to a
    packed projection, and get views of an unpacked one.
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
    classes, and weights that torch multiplies faster, stay as they are.
    """

    def __init__(self, model: nn.Module, pack: Pack) -> None:
        """Pack the weights. The modules lose their own, so code that reads them fails.

        Args:
            model: A model on a CPU, which may be unable to run afterwards until `restore`.
            pack: Packs weights.
        """
        self._packed: Final[list[tuple[nn.Linear | Conv1D, nn.Linear, Projection]]] = []
        """Modules, the same as `nn.Linear`, and their products."""
        num_users = Counter(
            id(parameter)
            for module in model.modules()
            for parameter in module.parameters(recurse=False)
        )
        for module in model.modules():
            if type(module) is nn.Linear:
                linear, is_shared = module, num_users[id(module.weight)] > 1
            elif type(module) is Conv1D and num_users[id(module.weight)] == 1:
                linear, is_shared = _as_linear(module), False
            else:
                continue
            projection = Projection(linear, pack=pack, may_reorder=False, is_shared=is_shared)
            if projection.is_packed:
                module.forward = projection.apply  # type: ignore[method-assign]
                if not is_shared:
                    module.weight.data = linear.weight.data
                self._packed.append((module, linear, projection))

    def __len__(self) -> int:
        """Return the number of packed modules."""
        return len(self._packed)

    def restore(self) -> None:
        """Return the weights to the modules."""
        for module, linear, projection in self._packed:
            projection.restore()
            if module is not linear:
                module.weight.data = linear.weight.data.T.contiguous()
            del module.forward
        self._packed.clear()


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
