"""GeGLU's activation (Shazeer, 2020), with gelu in its approximation by tanh: Gemma's."""

import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.kernels.activation import activate_and_mul
from nanovllm.kernels.runtime import tl, triton, use_triton


class GeluAndMul(nn.Module):
    """x [..., 2 * width] -> gelu(first half) * second half, [..., width]."""

    def forward(self, x: Tensor) -> Tensor:
        return activate_and_mul(x, gelu) if use_triton(x) else gelu_and_mul_torch(x)


def gelu_and_mul_torch(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


@triton.jit
def gelu(x):
    """x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3))"""
    return x / (1.0 + tl.exp(-(1.5957691216057308 * (x + 0.044715 * x * x * x))))
