"""Weights that are not quantised: a matrix of the model's dtype.

On a CPU oneDNN multiplies fastest from a layout of its own, into which a weight is brought once, when it is
loaded. Such a tensor (`is_mkldnn`) can only be multiplied, or read with `to_dense`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.kernels.matvec import can_use_matvec, linear_small
from nanovllm.kernels.runtime import is_on_gpu
from nanovllm.layers.quantization.scaled import Part, matrix_shape
from nanovllm.layers.quantization.weight_format import WeightFormat
from nanovllm.utils.loader import default_weight_loader

FEWEST_ROWS = 1  # the layout is chosen for so many rows; measured, it is no slower for many


class Plain(WeightFormat):
    """`weight` [out, in]. It is loaded by the layer's `weight_loader`."""

    def __init__(self, parts: dict[Any, Part]):
        self.shape = matrix_shape(parts)
        self.weight = nn.Parameter(torch.empty(self.shape), requires_grad=False)
        self.parameters = {"weight": self.weight}
        self.stored = {}

    def load(self, loaded: Any, part: Part) -> None:
        default_weight_loader(self.weight.data[part.place], loaded, (part.rows, part.columns), part.shape)

    def fill(self, matrix: Tensor) -> None:
        self.weight.data.copy_(matrix)

    def multiply(self, x: Tensor, bias: Tensor | None, leave_scales: bool = False) -> Tensor:
        return multiply(x, self.weight, bias)

    def can_use_matvec(self, x: Tensor) -> bool:
        return can_use_matvec(x)

    def matvec(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        return linear_small(x, self.weight, *args, **options)

    def pack(self) -> None:
        """Bring the weight into the layout that multiplies fastest here. The one it had is freed."""
        if can_pack(self.weight):
            self.weight = nn.Parameter(packed(self.weight), requires_grad=False)
            self.parameters["weight"] = self.weight


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN is there, and computes in the weight's dtype."""
    if is_on_gpu(weight) or not torch.backends.mkldnn.is_available() or not weight.numel():
        return False
    computes = {
        torch.float32: lambda: True,
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return computes[weight.dtype]()


def packed(weight: Tensor) -> Tensor:
    """The weight [out, in] in oneDNN's layout."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), FEWEST_ROWS)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [tokens, in] @ weight.T + bias: [tokens, out]."""
    if not weight.is_mkldnn:
        return F.linear(x, weight, bias)
    num_rows = len(x)
    # oneDNN makes code for each number of rows and each shape of a weight: milliseconds, and half a megabyte
    # that it keeps. So that there are few, rows are filled up, by an eighth at most.
    step = 1 << max(0, (num_rows - 1).bit_length() - 4)
    if num_rows % step == 0:
        return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    x = F.pad(x, (0, 0, 0, -num_rows % step))
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")[:num_rows]
