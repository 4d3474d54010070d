"""How a linear layer multiplies: the interface. The plain way is the weight's own (weight.py).

A layer lists its products when its weight has been loaded, and asks them in order which takes a step's rows.
Faster ones fold in what stands around a product in a decoder layer: the norm in front of it, the activation
or the residual addition behind it. They may leave work half done for the product that follows: in a subclass
of `Stream`, or as a gated result that still has to be `activated`.
"""

from typing import Protocol

from torch import Tensor

from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.residual_stream import Stream


class Gated(Protocol):
    """The result of a gated product in front of its activation."""

    def activated(self) -> Tensor:
        """[tokens, width]."""


def activated(x: Tensor | Gated) -> Tensor:
    return x if isinstance(x, Tensor) else x.activated()


class Product:
    """
    One way to multiply by a weight [out, in]. With `gated` the first half of the outputs are gates, the
    second half is what they multiply, and the result has half as many.
    """

    def accepts(self, rows: int, is_prefill: bool) -> bool:
        """Whether it works for so many rows and is preferred to what is listed behind it."""
        return True

    def linear(self, x: Tensor | Gated, bias: Tensor | None, gated: bool = False) -> Tensor | Gated:
        """x [tokens, in] @ weight.T + bias: [tokens, out]."""
        raise NotImplementedError

    def norm_linear(self, stream: Stream, bias: Tensor | None, gated: bool = False) -> Tensor | Gated:
        """norm(x) @ weight.T + bias for the stream's x and norm: [tokens, out]."""
        return self.linear(stream.normalised(), bias, gated)

    def linear_add(
        self, stream: Stream, x: Tensor | Gated, bias: Tensor | None, next_norm: RMSNorm
    ) -> Stream:
        """The stream plus x @ weight.T + bias, in front of the next norm. Asked for on one rank alone."""
        return stream.add(self.linear(x, bias), next_norm)
