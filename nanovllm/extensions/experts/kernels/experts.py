"""What all kernels of a mixture of experts know: its weights, and the activation between their products."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.extensions.quantised.kernels.grouped_gemm import ALPHA, LIMIT
from nanovllm.extensions.quantised.kernels.quantised_weight import QuantisedWeight, dequantise_torch
from nanovllm.kernels.activation import silu_and_mul_torch


class ExpertWeights(NamedTuple):
    """
    The experts' matrices, one below the other. Of `gate_up` [experts * 2 * width, hidden] an expert has its
    gates first, then what they multiply; `down` is [experts * hidden, width]. Biases are as long as their
    matrix is high.
    """

    gate_up: Any  # Tensor, QuantisedWeight, or on a CPU what has a `shape`, and a `part` that can `multiply`
    down: Any
    num_experts: int
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    is_clamped: bool = False  # gpt-oss's activation in place of SwiGLU's
    linear: Any = F.linear  # what the reference multiplies with

    @property
    def width(self) -> int:
        return self.down.shape[1]

    def multiply_torch(self, x: Tensor, weight: Any, bias: Tensor | None, expert: int) -> Tensor:
        """x [rows, in] times an expert's part of one of the two matrices, with its bias."""
        height = weight.shape[0] // self.num_experts
        rows = slice(expert * height, expert * height + height)
        if isinstance(weight, QuantisedWeight):
            matrix = dequantise_torch(weight, rows, weight.product_dtype).to(x.dtype)
        elif isinstance(weight, Tensor):
            matrix = weight[rows]
        else:
            y = weight.part(rows).multiply(x)
            return y if bias is None else y + bias[rows]
        return self.linear(x, matrix, None if bias is None else bias[rows])


def activate_torch(x: Tensor, is_clamped: bool = False) -> Tensor:
    """[..., 2 * width], gates first, -> [..., width]."""
    if not is_clamped:
        return silu_and_mul_torch(x)
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return (up + 1) * gate * torch.sigmoid(ALPHA * gate)
