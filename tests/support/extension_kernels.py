"""What tests of extensions' kernels add to kernel_checks.py: 8-bit caches, attention variants, references."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import HALF, LAYOUTS, rand
from torch import Tensor

from nanovllm.extensions.int8_cache.layout import Int8Layout
from nanovllm.extensions.models.attention_rule import AttentionRule
from nanovllm.extensions.quantised.kernels.fp8_linear import QuantisedRows
from nanovllm.extensions.quantised.kernels.quantised_weight import QuantisedWeight, dequantise_torch
from nanovllm.kernels import layernorm
from nanovllm.kernels.activation import silu_and_mul_torch
from nanovllm.kernels.attention_variant import AttentionVariant

INT8 = torch.uint8  # the dtype of 8-bit caches
LAYOUTS[INT8] = Int8Layout()
CACHES = [(torch.float32, torch.float32), (HALF, HALF), (torch.float32, INT8), (HALF, INT8)]
with_caches = pytest.mark.parametrize(
    "dtype, cache_dtype", CACHES, ids=["float32", "half", "float32-int8", "half-int8"]
)


class Features(NamedTuple):
    """What makes a variant of attention for any number of heads."""

    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    has_slopes: bool = False
    in_chunks: bool = False

    def rule(self, heads, head_dim, device):
        if self == Features():
            return AttentionVariant(head_dim**-0.5)
        sinks = rand(heads, device=device) + 1 if self.has_sinks else None
        slopes = torch.rand(heads, device=device) if self.has_slopes else None
        return AttentionRule(head_dim**-0.5, self.window, self.softcap, sinks, slopes, self.in_chunks)


def sum_and_norm(parts, residual, weight, eps):
    """What every rank computes from all ranks' parts, which are added in the order of the ranks."""
    total = sum(part.float() for part in parts).to(residual.dtype)
    return layernorm.add_rms_norm_torch(total, residual, weight, eps)


def linear_fp8_torch(
    x: QuantisedRows, weight: QuantisedWeight, bias: Tensor | None = None, gated: bool = False
) -> Tensor:
    values = x.codes[: x.rows].float() * x.scales[: x.rows, None]
    y = F.linear(values, dequantise_torch(weight, slice(0, weight.shape[0]), torch.float32), bias).to(x.dtype)
    return silu_and_mul_torch(y) if gated else y


def gemv_torch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    silu_and_mul: bool = False,
) -> Tensor:
    if norm_weight is not None:
        x = layernorm.rms_norm_torch(x, norm_weight, eps)
    y = F.linear(x, weight, bias)
    if silu_and_mul:
        y = silu_and_mul_torch(y)
    return y if residual is None else y + residual


def fused_linear_torch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    squares: Tensor | None = None,
    eps: float = 0.0,
    silu_and_mul: bool = False,
    residual: Tensor | None = None,
    next_norm_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    y = F.linear(x, weight)
    if squares is not None:
        y = (y * torch.rsqrt(squares.sum(-1, keepdim=True) / x.shape[-1] + eps)).to(y.dtype)
    if bias is not None:
        y = y + bias
    if silu_and_mul:
        y = silu_and_mul_torch(y)
    if residual is None:
        return y, None, None
    y = y + residual
    return y, y * next_norm_weight, y.float().square().sum(-1, keepdim=True)
