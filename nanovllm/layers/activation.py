"""The activation of a gated MLP: SwiGLU's."""

from torch import Tensor, nn

from nanovllm.kernels.activation import silu_and_mul


class SiluAndMul(nn.Module):
    """x [..., 2 * width] -> silu(first half) * second half, [..., width]."""

    def forward(self, x: Tensor) -> Tensor:
        return silu_and_mul(x)
