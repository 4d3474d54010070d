"""Parts of other extensions made exact: experts, weights in 8-bit floating point, an 8-bit cache.

They come as arguments, with what they compute with, and are left as they are but for what makes a row's bits
depend on other rows.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.extensions.exact.kernels.sum import sum_in_order
from nanovllm.extensions.exact.products import ONE_THREAD, exact_linear, exact_silu_and_mul
from nanovllm.kernels.kv_store import CacheLayout
from nanovllm.layers.layernorm import RMSNorm, Stream
from nanovllm.layers.linear import Product
from nanovllm.utils.context import get_context


def use_exact_experts(model: nn.Module, kind: type, choose_kernels: Callable, run_grouped: Callable) -> None:
    """
    Modules of this kind, mixtures of experts, multiply any number of rows as a prefill does, whose grouped
    products take inputs in ascending order. What the experts make of a row is added up in the order in which
    the router names them and rounded, and then added to the residual: on one rank as on several. A CPU takes
    so few rows at a time that one thread computes their activation, see `exact_silu_and_mul`.
    """

    def forward(layer: Any, stream: Stream, next_norm: RMSNorm) -> Stream:
        x, weights = stream.normalised(), layer.experts.weights._replace(linear=exact_linear)
        kernels, chosen = choose_kernels(x, weights, is_prefill=True), layer.gate(stream)
        most = max(1, ONE_THREAD // (2 * weights.width))
        if kernels is not None or len(x) <= most:
            return stream.add(add_up(kernels, x, weights, chosen), next_norm)
        pieces = zip(*(each.split(most) for each in (x, *chosen)), strict=True)
        sums = [add_up(None, piece, weights, type(chosen)(*its)) for piece, *its in pieces]
        return stream.add(torch.cat(sums), next_norm)

    def add_up(kernels: Any, x: Tensor, weights: Any, chosen: Any) -> Tensor:
        return sum_in_order(run_grouped(kernels, x, weights, chosen, get_context().is_prefill))

    for layer in model.modules():
        if isinstance(layer, kind):
            layer.forward = functools.partial(forward, layer)


def use_exact_fp8(model: nn.Module, kind: type, dequantise: Callable) -> None:
    """
    Weights of this kind multiply without what they fold in: torch's library, with a scale for each row, has
    one order for any number of rows. Where it cannot, and on a CPU, the weight is dequantised first. Raises
    ValueError naming a layer whose scales are for blocks.
    """

    def multiply(matrix: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        weight, rows = matrix.quantised, slice(0, matrix.shape[0])
        return exact_linear(x, dequantise(weight, rows, weight.product_dtype).to(x.dtype), bias)

    def products(found: Callable, layer: Any) -> list[Product]:
        return [alone(product) for product in found(layer)]

    def alone(folding: Product) -> Product:
        product = Product()
        product.multiply, product.act_fn = folding.linear, exact_silu_and_mul
        return product

    for name, layer in model.named_modules():
        matrix = getattr(layer, "matrix", None)
        if isinstance(matrix, kind):
            if matrix.quantised.group:
                raise ValueError(f"exact=True needs fp8 weights with a scale for each row: {name} has blocks")
            matrix.multiply, matrix.act_fn = functools.partial(multiply, matrix), exact_silu_and_mul
            matrix.products = functools.partial(products, matrix.products)


def exact_layout(layout: CacheLayout) -> CacheLayout:
    """
    The layout. That of 8-bit pages is changed: decode steps store by the kernel of a prefill, and where no
    kernel rotates, each token is rotated alone.
    """
    if layout.dtype.is_floating_point:
        return layout
    rotate, store_hooks = layout.rotate, layout.store_hooks

    def rotate_alone(q: Tensor, k: Tensor) -> list[Tensor]:
        tokens = map(rotate, q.split(1), k.split(1))
        return [torch.cat(each) for each in zip(*tokens, strict=True)]

    layout.rotate = rotate_alone
    layout.store_hooks = lambda cache, head_dim, _: store_hooks(cache, head_dim, True)
    return layout
