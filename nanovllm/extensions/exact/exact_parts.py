"""An engine's parts made exact: its attention, and what other extensions have brought.

What others have brought comes as an argument. Only what would make a row's bits depend on other rows is
replaced in it.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.config import Config
from nanovllm.engine.interfaces import Parts
from nanovllm.extensions.exact.attention import ExactBackend
from nanovllm.extensions.exact.backend_check import BackendCheck
from nanovllm.extensions.exact.options import check_exact
from nanovllm.extensions.exact.products import dense_weight as dense_weight  # for assembly
from nanovllm.extensions.exact.products import exact_linear, exact_mixture, exact_silu_and_mul
from nanovllm.extensions.exact.products import use_heads as use_heads
from nanovllm.kernels.kv_store import CacheLayout
from nanovllm.layers.layernorm import RMSNorm, Stream
from nanovllm.layers.linear import Product
from nanovllm.utils.context import get_context


def make_exact(parts: Parts, config: Config, read_prefixes: Callable, read_scheme: Callable) -> None:
    """
    `read_prefixes` makes a back-end that plans for the exact one, of that and the config; `read_scheme` reads
    the formats of weights. Raises ValueError naming what cannot be exact.
    """
    scheme = read_scheme(config.hf_config.quantization_config, config.quantization)
    check_exact(config, scheme.kinds if scheme else {"dense"})
    parts.layout = exact_layout(parts.layout)
    parts.make_backend = lambda *where: read_prefixes(ExactBackend(where[-1]), config)
    filters = parts.logits_processor("filters")
    # Their kernel adds up narrower logits in another order, and a neighbour may have made them wide.
    filters.apply = functools.partial(apply_to_wide, filters.apply)
    if not config.hf_config.architectures:
        parts.observers += (BackendCheck(config.hf_config),)


def apply_to_wide(apply: Callable, logits: Tensor, step: Any) -> Tensor:
    apply(logits.float(), step)
    return logits


def use_exact(model: nn.Module, moe: Any, fp8: type) -> None:
    """
    Of a model whose dense weights and head are exact: mixtures of experts, which are in the module `moe`, and
    weights of the class `fp8`. Raises ValueError naming a layer whose scales are for blocks.
    """

    class ExactMixture(moe.MixtureOfExperts):
        """The sum is rounded and then added to the residual: on one rank as on several."""

        def forward(self, stream: Stream, next_norm: RMSNorm) -> Stream:
            x, weights, is_prefill = stream.normalised(), self.experts.weights, get_context().is_prefill
            logits = self.gate(stream)
            y = exact_mixture(moe, x, weights, self.gate.choose(logits), is_prefill)
            return stream.add(self.add_shared(y, stream, logits), next_norm)

    class ExactFp8(fp8):
        """
        Multiplies without what its products fold in: torch's library, which is the last of them, has one
        order for any number of rows, with a scale for each. Where it cannot, and on a CPU, the weight is
        dequantised first.
        """

        act_fn = staticmethod(exact_silu_and_mul)

        def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
            weight = self.quantised  # with a scale for each row; rounded as `dequantise_torch` does
            codes, scales = (each.to(weight.product_dtype) for each in (weight.codes, weight.scales))
            return exact_linear(x, codes.mul_(scales).to(x.dtype), bias)

        def products(self, layer: Any) -> list[Product]:
            return [*map(Unfolded, super().products(layer)[-1:])]

    for name, layer in model.named_modules():
        if isinstance(layer, moe.MixtureOfExperts):
            layer.__class__ = ExactMixture
        matrix = getattr(layer, "matrix", None)
        if isinstance(matrix, fp8):
            if matrix.quantised.group:
                raise ValueError(f"exact=True needs fp8 weights with a scale for each row: {name} has blocks")
            matrix.__class__ = ExactFp8


class Unfolded(Product):
    """Another product without what it folds in."""

    act_fn = staticmethod(exact_silu_and_mul)

    def __init__(self, product: Product):
        self.multiply = product.linear


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
