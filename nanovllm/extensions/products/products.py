"""The faster products of dense weights, as the core's layers see them (layers/linear.py)."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from nanovllm.extensions.products import onednn
from nanovllm.extensions.products.kernels.fused_linear import MAX_FUSED_ROWS, can_fuse, fused_linear
from nanovllm.extensions.products.kernels.gemv import MAX_ROWS, can_use_gemv, gemv
from nanovllm.extensions.products.kernels.small_gemm import (
    MAX_INPUTS,
    MAX_SMALL_ROWS,
    can_use_small_gemm,
    small_gemm,
)
from nanovllm.layers.layernorm import RMSNorm, Stream
from nanovllm.layers.linear import DenseWeight, LinearBase, Product, activated


@dataclass
class Gemv(Product):
    """
    In decode steps, for up to `max_rows` rows. `multiply` takes (x, bias, norm_weight, eps, residual,
    silu_and_mul) as `gemv`.
    """

    multiply: Callable[..., Tensor]
    max_rows: int = MAX_ROWS

    def accepts(self, rows: int, is_prefill: bool) -> bool:
        return not is_prefill and 0 < rows <= self.max_rows

    def linear(self, x: Any, bias: Tensor | None, gated: bool = False) -> Tensor:
        return self.multiply(activated(x), bias=bias, silu_and_mul=gated)

    def norm_linear(self, stream: Stream, bias: Tensor | None, gated: bool = False) -> Tensor:
        if not stream.is_untouched:
            return super().norm_linear(stream, bias, gated)
        norm = stream.norm
        return self.multiply(stream.x, bias=bias, norm_weight=norm.weight, eps=norm.eps, silu_and_mul=gated)

    def linear_add(self, stream: Stream, x: Any, bias: Tensor | None, next_norm: RMSNorm) -> Stream:
        return Stream(self.multiply(activated(x), bias=bias, residual=stream.residual()), next_norm)


@dataclass
class SplitNorm(Stream):
    """A norm that is half computed: `scaled` is still to be divided by the root mean square of x's rows."""

    scaled: Tensor | None = None  # x * norm.weight, [tokens, hidden]
    sum_of_squares: Tensor | None = None  # float32 [tokens, parts]: their sums are those of x's rows

    @property
    def is_untouched(self) -> bool:
        return False


class FusedGemm(Product):
    """
    In decode batches of small models, on one rank. `multiply` is `fused_linear` or `small_gemm`; a product
    alone is the weight's own.
    """

    def __init__(self, dense: DenseWeight, multiply: Callable[..., tuple[Any, ...]], max_rows: int):
        self.linear = dense.linear
        self.multiply = functools.partial(multiply, weight=dense.weight)
        self.max_rows = max_rows

    def accepts(self, rows: int, is_prefill: bool) -> bool:
        return not is_prefill and rows <= self.max_rows

    def norm_linear(self, stream: Stream, bias: Tensor | None, gated: bool = False) -> Tensor:
        squares = getattr(stream, "sum_of_squares", None)
        x = stream.normalised() if squares is None else stream.scaled
        return self.multiply(x, bias=bias, squares=squares, eps=stream.norm.eps, silu_and_mul=gated)[0]

    def linear_add(self, stream: Stream, x: Any, bias: Tensor | None, next_norm: RMSNorm) -> Stream:
        total, *split = self.multiply(
            activated(x), bias=bias, residual=stream.residual(), next_norm_weight=next_norm.weight
        )
        return SplitNorm(total, next_norm, None, *split)


class FoldingWeight(DenseWeight):
    """A dense weight with products that fold their neighbours in, where a GPU has them, or oneDNN's."""

    make_gemv, library = Gemv, onednn  # quantised weights beside it are multiplied by these, too

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """By the library; few rows and outputs, as a router has, by `small_gemm`."""
        if can_use_small_gemm(x, self.weight):
            return small_gemm(x, self.weight, bias)[0]
        return super().multiply(x, bias)

    def finish(self) -> None:
        """The layout that the weight had is freed."""
        if (packed := onednn.pack(self.weight)) is not None:
            self.weight = self.parameters["weight"] = nn.Parameter(packed, requires_grad=False)
            self.multiply = functools.partial(onednn.multiply, weight=packed)

    def products(self, layer: LinearBase) -> list[Product]:
        if not can_use_gemv(self.weight):
            return []
        found: list[Product] = [Gemv(functools.partial(gemv, weight=self.weight))]
        if layer.hidden_size and layer.group.size == 1 and can_fuse(layer.hidden_size, self.weight):
            if self.weight.shape[1] <= MAX_INPUTS:
                found[0].max_rows = 1
                found.append(FusedGemm(self, small_gemm, MAX_SMALL_ROWS))
            found.append(FusedGemm(self, fused_linear, MAX_FUSED_ROWS))
        return found
