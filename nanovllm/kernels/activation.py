"""SwiGLU's activation (Shazeer, 2020): silu of the first half of a row times its second half, in one pass."""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.runtime import cdiv, tl, triton, use_triton

BLOCK = 1024


def silu_and_mul(x: Tensor) -> Tensor:
    """x [..., 2 * width] -> silu(x[..., :width]) * x[..., width:]; silu is computed in float32."""
    if not use_triton(x):
        return silu_and_mul_torch(x)
    width = x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
    rows = x.reshape(-1, 2 * width)
    if len(rows):
        grid = len(rows), cdiv(width, BLOCK)
        _silu_and_mul_kernel[grid](rows, out, rows.stride(0), width, BLOCK=BLOCK)
    return out


def silu_and_mul_torch(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@triton.jit
def _silu_and_mul_kernel(x, out, x_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    up = tl.load(x + row * x_stride + width + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out + row * width + column, activated.to(tl.float32) * up.to(tl.float32), mask=inside)
