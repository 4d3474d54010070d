"""Exact attention of prefill and decode.

On a CPU torch computes it; the kernels of GPUs are still to come.
"""

from typing import Any

from torch import Tensor

from nanovllm.extensions.exact.kernels.attention_torch import exact_decode_torch, exact_prefill_torch
from nanovllm.kernels.attention_variant import AttentionVariant
from nanovllm.kernels.kv_store import CacheLayout


def exact_prefill(
    q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, step: Any, layout: CacheLayout
) -> Tensor:
    if q.device.type == "cpu":
        return exact_prefill_torch(q, k, v, variant, step, layout)
    raise NotImplementedError


def exact_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, variant: AttentionVariant, step: Any, layout: CacheLayout
) -> Tensor:
    if q.device.type == "cpu":
        return exact_decode_torch(q, k_cache, v_cache, variant, step, layout)
    raise NotImplementedError
