"""The activations of gated MLPs: SwiGLU's, and GeGLU's."""

from typing import NamedTuple

from torch import Tensor, nn

from nanovllm.kernels.activation import gelu_and_mul, silu_and_mul
from nanovllm.kernels.fp8_linear import QuantisedRows, Unscaled, silu_and_mul_quantise


class SiluAndMul(nn.Module):
    """x [..., 2 * width] -> silu(first half) * second half, [..., width]."""

    def forward(self, x: Tensor) -> Tensor:
        return silu_and_mul(x)


class GeluAndMul(nn.Module):
    """x [..., 2 * width] -> gelu(first half) * second half, [..., width], with the approximation by tanh."""

    def forward(self, x: Tensor) -> Tensor:
        return gelu_and_mul(x)


class Gates(NamedTuple):
    """A product in front of the activation: the product that follows knows whether it wants it quantised."""

    product: Tensor | Unscaled  # [tokens, 2 * width]

    def activated(self) -> Tensor:
        """[tokens, width]."""
        return silu_and_mul(self.product.scaled() if isinstance(self.product, Unscaled) else self.product)

    def quantised(self, group: int) -> QuantisedRows:
        """The same with a scale for so many of its numbers, or, if that is 0, for each row."""
        return silu_and_mul_quantise(self.product, group)
