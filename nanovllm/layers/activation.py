"""The activations of gated MLPs: SwiGLU's, and GeGLU's."""

from torch import Tensor, nn

from nanovllm.kernels.activation import gelu_and_mul, silu_and_mul


class SiluAndMul(nn.Module):
    """x [..., 2 * width] -> silu(first half) * second half, [..., width]."""

    def forward(self, x: Tensor) -> Tensor:
        return silu_and_mul(x)


class GeluAndMul(nn.Module):
    """x [..., 2 * width] -> gelu(first half) * second half, [..., width], with the approximation by tanh."""

    def forward(self, x: Tensor) -> Tensor:
        return gelu_and_mul(x)
