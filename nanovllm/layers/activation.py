"""The activation of a gated MLP: SwiGLU's."""

from torch import nn

from nanovllm.kernels.activation import silu_and_mul


class SiluAndMul(nn.Module):
    """x [..., 2 * width] -> silu(first half) * second half, [..., width]."""

    forward = staticmethod(silu_and_mul)
