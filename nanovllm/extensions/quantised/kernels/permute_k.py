"""The order in which products of codes want their inputs.

A thread reads 16 bytes of a row of codes at once, and the matrix unit takes two neighbouring inputs from each
of four threads in turn. So K is permuted: of every four pieces of 16 bytes two inputs at a time, and first
all those whose codes are low halves of bytes.
"""

import torch
from torch import Tensor

from nanovllm.kernels.runtime import cdiv, masked_load, overlap_options, pdl_wait, tl, triton

BYTES = tl.constexpr(64)  # of a row of codes that four threads side by side read
PADDING = 256  # permuted inputs are filled up to a multiple of this, the largest BLOCK_K
SIZE = 1024  # columns that a program permutes


def permuted_width(features: int) -> int:
    """How many columns inputs have when they are permuted."""
    return cdiv(features, PADDING) * PADDING


def permute_k(x: Tensor, per_byte: int) -> Tensor:
    """The columns of x [rows, in_features] in the order that `multiply_codes` wants, and then zeros."""
    rows, in_features = x.shape
    width = permuted_width(in_features)
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    _permute_kernel[(rows, cdiv(width, SIZE))](
        x,
        out,
        x.stride(0),
        IN_FEATURES=in_features,
        WIDTH=width,
        SIZE=SIZE,
        CODES_PER_BYTE=per_byte,
        num_warps=4,
        **overlap_options(x.device),
    )
    return out


@triton.jit
def _permute_kernel(
    x,
    out,
    x_stride,
    IN_FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    CODES_PER_BYTE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    pdl_wait(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    column = column_at(place, CODES_PER_BYTE)
    value = masked_load(x + row * x_stride + column, column < IN_FEATURES)
    tl.store(out + row * WIDTH + place, value, mask=place < WIDTH)


@triton.jit
def column_at(place, CODES_PER_BYTE):
    """
    The input that stands at a place when K is permuted. Who permutes a whole row gathers its inputs by this:
    a warp then reads whole sectors of memory, where storing by `permuted` writes parts of many.
    """
    BLOCK: tl.constexpr = BYTES * CODES_PER_BYTE
    half, within = place % BLOCK // BYTES, place % BYTES
    column = within % 8 // 2 * (16 * CODES_PER_BYTE) + half * 16 + within // 8 * 2 + within % 2
    return tl.max_contiguous(tl.multiple_of(place // BLOCK * BLOCK + column, 2), 2)


@triton.jit
def column_at_fp8(place):
    """
    The same for codes of 4 bits that are multiplied in 8: the matrix unit takes four neighbouring inputs from
    each thread, and of four bytes first the low halves, then the high ones.
    """
    within = place % 128
    column = within % 16 // 4 * 32 + within % 32 // 16 * 16 + within // 32 * 4 + within % 4
    return tl.max_contiguous(tl.multiple_of(place // 128 * 128 + column, 4), 4)


@triton.jit
def permuted(column, CODES_PER_BYTE):
    """
    Where an input stands when K is permuted. In a block, those whose codes are low halves of bytes come
    before those of high halves; of each, two at a time are taken from the four pieces in turn.
    """
    BLOCK: tl.constexpr = BYTES * CODES_PER_BYTE
    within = column % BLOCK
    piece, within = within // (16 * CODES_PER_BYTE), within % (16 * CODES_PER_BYTE)
    half, within = within // 16, within % 16
    return column // BLOCK * BLOCK + half * BYTES + within // 2 * 8 + piece * 2 + within % 2
