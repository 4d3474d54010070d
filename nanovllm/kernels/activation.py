"""SwiGLU's and GeGLU's activation (Shazeer, 2020): silu, or gelu in its approximation by tanh, of the first
half of a row times its second half, in one pass.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.runtime import cdiv, tl, triton, use_triton

BLOCK = 1024


def silu_and_mul(x: Tensor) -> Tensor:
    """x [..., 2 * width] -> silu(x[..., :width]) * x[..., width:]; silu is computed in float32."""
    return _launch(x, is_gelu=False) if use_triton(x) else silu_and_mul_torch(x)


def gelu_and_mul(x: Tensor) -> Tensor:
    """x [..., 2 * width] -> gelu(x[..., :width]) * x[..., width:]; gelu is computed in float32."""
    return _launch(x, is_gelu=True) if use_triton(x) else gelu_and_mul_torch(x)


def silu_and_mul_torch(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_and_mul_torch(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def _launch(x: Tensor, is_gelu: bool) -> Tensor:
    width = x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
    rows = x.reshape(-1, 2 * width)
    if len(rows):
        grid = len(rows), cdiv(width, BLOCK)
        _activate_and_mul_kernel[grid](rows, out, rows.stride(0), width, IS_GELU=is_gelu, BLOCK=BLOCK)
    return out


@triton.jit
def _activate_and_mul_kernel(x, out, x_stride, width, IS_GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    up = tl.load(x + row * x_stride + width + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    slope = wide
    if IS_GELU:  # y sigmoid(2 sqrt(2 / pi) (y + 0.044715 y^3)) is gelu by tanh
        slope = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)
    activated = (wide / (1.0 + tl.exp(-slope))).to(gate.dtype)
    tl.store(out + row * width + column, activated.to(tl.float32) * up.to(tl.float32), mask=inside)
