"""Products with one order of addition, and the choice between them.

The answer is what a loop over the inputs in ascending order gives that adds into one float32 and rounds once.
On Hopper every product has these bits that does not split the loop, whatever its tiles and its instruction
are: `multiply` below, and the library's, except where few rows meet a long sum. So the library is used for
those numbers of rows for which it has been seen to agree with `multiply`, on this device and for this shape.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels import runtime
from nanovllm.kernels.activation import silu
from nanovllm.kernels.runtime import (
    cdiv,
    empty_padded,
    masked_load,
    overlap_options,
    pdl_wait,
    tl,
    triton,
)

# Up to so many rows `multiply` is as fast as the library, or faster; measured on an H100. With small weights,
# where a kernel's start counts, up to more.
FEW_ROWS, MORE_ROWS, SMALL_WEIGHT = 64, 256, 1 << 23


def few_rows(rows: int, weight: Tensor) -> bool:
    """Whether `multiply` is the faster way."""
    return rows <= (MORE_ROWS if weight.numel() <= SMALL_WEIGHT else FEW_ROWS)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, is_exact: bool = True) -> Tensor:
    """x [rows, in] @ weight.T + bias: [rows, out], for weight [out, in], on a GPU; exact, or the fastest."""
    if not few_rows(len(x), weight):
        if not is_exact or library_agrees(len(x), weight.shape, weight.dtype, weight.device):
            return F.linear(x, weight, bias)
    return multiply(x, weight, bias)


@functools.cache
def library_agrees(rows: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> bool:
    """
    Whether the library's product of so many rows and a weight of this shape has the bits of `multiply`. Found
    out when first asked for, which takes as long as some layers' products.
    """
    with runtime.on_default_stream(device):
        x, weight = (torch.empty(size, shape[1], dtype=dtype, device=device) for size in (rows, shape[0]))
        if runtime.compiling_for is None:  # else nothing is computed
            generator = torch.Generator(device).manual_seed(0)
            x.normal_(generator=generator)
            weight.normal_(generator=generator)
        return torch.equal(F.linear(x, weight), multiply(x, weight))


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None, gated: bool = False) -> Tensor:
    """
    x [rows, in] @ weight.T + bias: [rows, out], by the kernel below. If `gated`, the first half of the
    outputs are gates, the second half is what they multiply, and the result is silu(gate) * up,
    [rows, out / 2], rounded where `silu_and_mul` rounds.
    """
    rows, in_features = x.shape
    parts = 1 + gated
    width = len(weight) // parts
    block_m, block_n, block_k, num_warps, num_stages = _tile(rows, len(weight))
    if not runtime.has_hopper_shared_memory(x.device):  # what fits into that of a desktop GPU
        num_stages = 2
    block_n //= parts
    out = empty_padded(rows, width, x)
    if rows:
        _product_kernel[(cdiv(rows, block_m) * cdiv(width, block_n),)](
            x, weight, bias, out, rows, width, in_features, x.stride(0),
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, PARTS=parts, EVEN=in_features % block_k == 0,
            num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=False, **overlap_options(x.device),
        )  # fmt: skip
    return out


def _tile(rows: int, outputs: int) -> tuple[int, int, int, int, int]:
    """
    Rows, outputs and inputs of a tile, warps, pipeline stages. All give the same bits. With few outputs small
    tiles keep more of the device busy.
    """
    if rows <= 16:
        # Where there are few programs, each must have many loads under way. Of many, two with fewer stages
        # fit on a multiprocessor: one reads while the other ends.
        return 16, 64, 128, 4, 4 if outputs > 8192 else 8
    wide = rows if outputs > 4096 else cdiv(rows, 2)  # narrow weights have fewer tiles
    if wide <= 32 or (outputs <= 2048 and rows <= 256):
        return 32, 64, 128, 4, 5
    if wide <= 64:
        return 64, 64, 128, 4, 5
    return (64, 128, 128, 4, 4) if wide <= 128 else (128, 128, 64, 8, 4)


@triton.jit(do_not_specialize=["rows"])
def _product_kernel(
    x, weight, bias, out, rows, width, in_features, x_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
    EVEN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """
    A program computes BLOCK_M x BLOCK_N outputs. The weight is the left factor: the matrix unit takes 64 or
    16 of its rows, and as few as 8 of x.
    """
    blocks_m = tl.cdiv(rows, BLOCK_M)
    row = tl.program_id(0) % blocks_m * BLOCK_M + tl.arange(0, BLOCK_M)
    block_n = tl.program_id(0) // blocks_m
    place = tl.arange(0, PARTS * BLOCK_N)  # gates, then what they multiply
    feature = block_n * BLOCK_N + place % BLOCK_N
    weight_row = tl.minimum(feature, width - 1) + place // BLOCK_N * width
    k = tl.arange(0, BLOCK_K)
    weight_tile = weight + weight_row.to(tl.int64)[:, None] * in_features + k[None, :]
    pdl_wait(OVERLAP)
    x_tile = x + row.to(tl.int64)[None, :] * x_stride + k[:, None]
    is_row = (row < rows)[None, :]
    acc = tl.zeros([PARTS * BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, in_features, BLOCK_K):
        inside = EVEN | (start + k < in_features)
        left = masked_load(weight_tile, inside[None, :])
        right = masked_load(x_tile, is_row & inside[:, None])
        acc = tl.dot(left, right, acc, input_precision="ieee")
        weight_tile += BLOCK_K
        x_tile += BLOCK_K
    if bias is not None:
        acc += tl.load(bias + weight_row).to(tl.float32)[:, None]
    result = acc.to(out.dtype.element_ty)
    feature = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if PARTS == 2:
        gate, up = result.reshape(2, BLOCK_N, BLOCK_M).permute(1, 2, 0).split()
        activated = silu(gate.to(tl.float32)).to(gate.dtype)
        result = activated.to(tl.float32) * up.to(tl.float32)
    address = out + row.to(tl.int64)[None, :] * width + feature[:, None]
    tl.store(address, result, mask=is_row & (feature < width)[:, None])
