"""The gated activation of the MLP (SwiGLU, arXiv:2002.05202)."""

import torch
from torch import nn

from nanovllm.kernels.activation import silu_and_mul


class SiluAndMul(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, 2 * n], gate then up -> silu(gate) * up [tokens, n]."""
        return silu_and_mul(x)
