"""RMSNorm (Zhang and Sennrich, 2019), alone or with the residual add that comes before it.

Everything is computed in float32 and rounded where transformers rounds: the sum before it is normalised, and
the normalised row before it is multiplied by the weight. Inputs are never changed.
"""

import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.runtime import (
    masked_load,
    next_power_of_2,
    overlap_options,
    pdl_wait_then_launch,
    tl,
    triton,
    use_triton,
)


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """
    (normed total, total) for total = x + residual, all [..., hidden] and in the dtype of x, where normed is
    total / rms(total) * weight [hidden]. Without a residual the total is x; else the residual is contiguous.
    """
    if not use_triton(x):
        return add_rms_norm_torch(x, residual, weight, eps)
    hidden = x.shape[-1]
    rows = x.reshape(-1, hidden)
    normed = x.new_empty(x.shape)
    total = x if residual is None else x.new_empty(x.shape)
    block = next_power_of_2(hidden)
    _rms_norm_kernel[(len(rows),)](
        rows,
        residual,
        weight,
        normed,
        total,
        eps,
        rows.stride(0),
        hidden,
        BLOCK=block,
        num_warps=max(1, min(16, block // 256)),
        **overlap_options(x.device),
    )
    return normed, total


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed = F.rms_norm(x.float(), x.shape[-1:], eps=eps)
    return normed.to(x.dtype).mul_(weight)


def add_rms_norm_torch(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total = x if residual is None else x + residual
    return rms_norm_torch(total, weight, eps), total


@triton.jit
def _rms_norm_kernel(
    x, residual, weight, normed, total, eps, x_stride, hidden, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    gain = masked_load(weight + column, inside)
    pdl_wait_then_launch(OVERLAP)
    value = masked_load(x + row * x_stride + column, inside)
    place = row * hidden + column
    if residual is not None:
        other = masked_load(residual + place, inside)
        wide = value.to(tl.float32) + other.to(tl.float32)
        value = wide.to(value.dtype)
        tl.store(total + place, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / hidden + eps)
    rounded = (wide * scale).to(value.dtype)
    result = rounded.to(tl.float32) * gain.to(tl.float32)
    tl.store(normed + place, result, mask=inside)
