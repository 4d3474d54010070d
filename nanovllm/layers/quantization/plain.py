"""Weights that are not quantised: a matrix of the model's dtype."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.layers.quantization.scaled import Part, matrix_shape


class Plain:
    """`weight` [out, in]. It is loaded by the layer's `weight_loader`."""

    def __init__(self, parts: dict[Any, Part]):
        self.weight = nn.Parameter(torch.empty(matrix_shape(parts)), requires_grad=False)
        self.parameters = {"weight": self.weight}
        self.stored = {}

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [tokens, in] @ weight.T + bias: [tokens, out]."""
        return F.linear(x, self.weight, bias)
