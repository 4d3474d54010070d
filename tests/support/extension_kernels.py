"""What tests of extensions' kernels add to kernel_checks.py: 8-bit caches, and variants of attention."""

from typing import NamedTuple

import pytest
import torch
from kernel_checks import HALF, LAYOUTS, rand

from nanovllm.extensions.int8_cache.layout import Int8Layout
from nanovllm.extensions.models.attention_rule import AttentionRule
from nanovllm.kernels import layernorm
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

    def rule(self, heads, head_dim, device):
        if self == Features():
            return AttentionVariant(head_dim**-0.5)
        sinks = rand(heads, device=device) + 1 if self.has_sinks else None
        return AttentionRule(head_dim**-0.5, self.window, self.softcap, sinks)


def sum_and_norm(parts, residual, weight, eps):
    """What every rank computes from all ranks' parts, which are added in the order of the ranks."""
    total = sum(part.float() for part in parts).to(residual.dtype)
    return layernorm.add_rms_norm_torch(total, residual, weight, eps)
