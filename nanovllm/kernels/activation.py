"""The activation of a gated MLP in one pass: a function of the first half of a row, times its second half.

Qwen3 uses SwiGLU (Shazeer, 2020), whose function is silu. A model with another one hands the kernel a Triton
function of its own, which is compiled into it.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.runtime import cdiv, masked_load, tl, triton, use_triton

BLOCK = 1024


def silu_and_mul(x: Tensor) -> Tensor:
    """x [..., 2 * width] -> silu(x[..., :width]) * x[..., width:]; silu is computed in float32."""
    return activate_and_mul(x, silu) if use_triton(x) else silu_and_mul_torch(x)


def silu_and_mul_torch(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def activate_and_mul(x: Tensor, activation: Any) -> Tensor:
    """The same for any Triton function of a float32 tensor."""
    width = x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], width)
    rows = x.reshape(-1, 2 * width)
    _activate_and_mul_kernel[(len(rows), cdiv(width, BLOCK))](
        rows,
        out,
        rows.stride(0),
        width,
        ACTIVATION=activation,
        BLOCK=BLOCK,
    )
    return out


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _activate_and_mul_kernel(x, out, x_stride, width, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x += row * x_stride
    gate = masked_load(x + column, inside)
    up = masked_load(x + width + column, inside)
    activated = ACTIVATION(gate.to(tl.float32)).to(gate.dtype)
    address = out + row * width + column
    tl.store(address, activated.to(tl.float32) * up.to(tl.float32), mask=inside)
