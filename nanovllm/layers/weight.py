"""Weights of linear layers: which shard of a checkpoint's matrices a rank holds, and how they are multiplied.

A layer knows its weight by the interface `Weight`. The one of this file is dense: a matrix of the model's
dtype, which torch's library multiplies. When it has been loaded, it may list faster products for some numbers
of rows. They fold in what stands around a product in a decoder layer: the norm in front of it, the activation
or the residual addition behind it. They may leave work half done for the product that follows: in a subclass
of `Stream`, or as a gated result that still has to be `activated`.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.residual_stream import Stream
from nanovllm.utils.loader import default_weight_loader


@dataclass
class Shard:
    """
    This rank's share of a checkpoint's matrix of this shape: `rows` and `columns` (None: all). `size` says
    how many these are, `place` which rows of the layer's own matrix.
    """

    shape: tuple[int, int]
    rows: slice | None = None
    columns: slice | None = None

    def __post_init__(self) -> None:
        self.rows = self.rows or slice(0, self.shape[0])
        self.columns = self.columns or slice(0, self.shape[1])
        self.size = self.rows.stop - self.rows.start, self.columns.stop - self.columns.start
        self.place = slice(0, self.size[0])

    def load(self, param: Tensor, loaded: Any) -> None:
        """Copy it into the layer's own matrix, or bias."""
        dims = param.dim()
        cut = (self.rows, self.columns)[:dims]
        default_weight_loader(param[self.place], loaded, cut, self.shape[:dims])


def activated(x: Any) -> Tensor:
    """[tokens, width], from that or from a gated result in front of its activation."""
    return x if isinstance(x, Tensor) else x.activated()


class Product:
    """
    One way to multiply by a weight [out, in]. With `gated` the first half of the outputs are gates, the
    second half is what they multiply, and the result has half as many. An x may be such a result whose
    activation is left to do, see `activated`.
    """

    act_fn = SiluAndMul()

    def accepts(self, rows: int, is_prefill: bool) -> bool:
        """Whether it works for so many rows and is preferred to what is listed behind it."""
        return True

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [tokens, in] @ weight.T + bias: [tokens, out]. Not asked for where `linear` is another."""
        raise NotImplementedError

    def linear(self, x: Any, bias: Tensor | None, gated: bool = False) -> Any:
        """x [tokens, in] @ weight.T + bias: [tokens, out]."""
        y = self.multiply(activated(x), bias=bias)
        return self.act_fn(y) if gated else y

    def norm_linear(self, stream: Stream, bias: Tensor | None, gated: bool = False) -> Any:
        """norm(x) @ weight.T + bias for the stream's x and norm: [tokens, out]."""
        return self.linear(stream.normalised(), bias, gated)

    def linear_add(self, stream: Stream, x: Any, bias: Tensor | None, next_norm: RMSNorm) -> Stream:
        """The stream plus x @ weight.T + bias, in front of the next norm. Asked for on one rank alone."""
        return stream.add(self.linear(x, bias), next_norm)


class Weight(Product):
    """
    A matrix [out, in] in some format, which these shards make up. `parameters` are its tensors. As a product
    it takes any number of rows, with kernels of their own for the norm, the activation and the addition
    around it.
    """

    parameters: dict[str, Tensor]

    def __init__(self, shards: dict[Any, Shard]):
        *_, last = shards.values()
        self.shape = last.place.stop, last.size[1]

    def finish(self) -> None:
        """Called when all tensors are loaded: bring them into the layout that multiplies fastest here."""

    def products(self, layer: Any) -> list[Product]:
        """
        What multiplies by it faster than itself in this layer, in order of preference. Called when the layer
        gets the weight and again after `finish`.
        """
        return []


class DenseWeight(Weight):
    """`weight` [out, in], in the dtype of the model. It is loaded by the layer's `weight_loader`."""

    def __init__(self, shards: dict[Any, Shard]):
        super().__init__(shards)
        self.weight = nn.Parameter(torch.empty(self.shape), requires_grad=False)
        self.parameters = {"weight": self.weight}

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, self.weight, bias)
