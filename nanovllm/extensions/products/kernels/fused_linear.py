"""Matrix products of a decode step for a few to some hundred rows, with their neighbours folded in.

At these sizes a product takes a few microseconds, most of them spent on starting, waiting for the first bytes
and ending, so separate kernels for RMSNorm, residual addition and SwiGLU cost as much as the arithmetic. Here
they are parts of the products. RMSNorm needs whole rows, but no program of a product has one, so it is split:
the product before it multiplies by the norm's weight and leaves sums of squares, and the product after it
divides its result by their root.

Measured on an H200 with Qwen3-0.6B's shape and 256 sequences (bench.py): 27,930 tok/s, and 26,432 with the
products by the library and the norms, activations and additions by kernels of their own.
"""

import torch
from torch import Tensor

from nanovllm.kernels import runtime
from nanovllm.kernels.activation import silu
from nanovllm.kernels.runtime import (
    cdiv,
    empty_padded,
    masked_load,
    next_power_of_2,
    prefetch_each,
    tl,
    triton,
)

if runtime.HAVE_TRITON:
    from triton.tools.tensor_descriptor import TensorDescriptor

MAX_FUSED_ROWS = 256
MAX_FEATURES = 1024
# Rows, outputs and inputs of a tile, warps, pipeline stages; each for at most 64, 128 and 256 rows. What
# counts is how many bytes are on their way: a program's stages fill a multiprocessor's shared memory, and the
# tiles are such that there is about one program for each multiprocessor.
TILES = {
    "gated": ((64, 32, 128, 4, 6), (128, 32, 128, 4, 4), (128, 64, 64, 8, 6)),
    "wide": ((64, 32, 256, 4, 4), (128, 32, 128, 4, 5), (128, 64, 128, 4, 4)),
    "narrow": ((64, 16, 256, 4, 5), (64, 32, 256, 4, 4), (64, 64, 128, 4, 5)),
}
WIDE = 2048


def can_fuse(hidden_size: int, weight: Tensor) -> bool:
    """Whether a product beside a residual of this width is faster so, of a weight that `gemv` multiplies.

    Not in float16, whose range a row of x * weight may leave before it is normalised. The copy engine must be
    able to read the rows of the weight, and of what is multiplied by it. GPUs with so much shared memory have
    one, and overlap kernels.
    """
    return (
        weight.dtype == torch.bfloat16
        and hidden_size <= MAX_FEATURES
        and weight.shape[1] % 8 == 0
        and runtime.has_hopper_shared_memory(weight.device)
    )


def fused_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    squares: Tensor | None = None,
    eps: float = 0.0,
    silu_and_mul: bool = False,
    residual: Tensor | None = None,
    next_norm_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """activation(x @ weight.T + bias) + residual: [rows, out] for x [rows, in], weight [out, in].

    Returns (result, scaled, squares). An RMSNorm is split over two products: the one before it is given a
    residual [rows, out] and the norm's weight, and returns scaled = result * next_norm_weight and float32
    squares [rows, parts], whose sums are those of the squares of the result's rows. The one after it takes
    this scaled as its x, and divides by the root mean square that follows from these squares. Without a
    residual there are no scaled and squares; without squares x is multiplied as it is. With silu_and_mul the
    first half of the weight's rows are gates, the second half is what they multiply, and the result is
    [rows, out / 2]. Sums are float32 and rounded once, at the end. The last dimension of x is contiguous, all
    others' are.
    """
    rows, in_features = x.shape
    parts = 1 + silu_and_mul
    width = weight.shape[0] // parts
    block_m, block_n, block_k, num_warps, num_stages = _tile(rows, width, silu_and_mul)
    blocks_m = cdiv(rows, block_m)
    blocks_n = cdiv(width, block_n)
    out, scaled, new_squares = new_results(x, width, blocks_n, residual is not None)
    # Spare programs only wait. They keep the next kernel's programs, which arrive early, evenly spread.
    programs = max(blocks_m * blocks_n, runtime.num_multiprocessors(x.device))
    num_squares = 0 if squares is None else squares.shape[1]
    # A tile may read all rows that x's storage holds. What comes of the rows too many is never stored.
    elements = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    if rows:  # a descriptor cannot be of nothing
        x_rows = max(rows, elements // x.stride(0))
        _fused_linear_kernel[(programs,)](
            TensorDescriptor(x, [x_rows, in_features], list(x.stride()), [block_m, block_k]),
            TensorDescriptor.from_tensor(weight.view(parts, width, in_features), [parts, block_n, block_k]),
            weight, bias, squares, residual, next_norm_weight, scaled, new_squares, out,
            eps, rows, in_features, width,
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, PARTS=parts,
            NUM_SQUARES=num_squares, SQUARES_PAD=next_power_of_2(num_squares),
            num_warps=num_warps, num_stages=num_stages, **runtime.overlap_options(x.device),
        )  # fmt: skip
    return out, scaled, new_squares


def new_results(
    x: Tensor, width: int, parts: int, is_added: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Memory for what `fused_linear` returns: the result, and where it is added to a residual the others."""
    out = empty_padded(len(x), width, x)
    if not is_added:
        return out, None, None
    return out, empty_padded(len(x), width, x), x.new_empty(len(x), parts, dtype=torch.float32)


def _tile(rows: int, width: int, silu_and_mul: bool) -> tuple[int, int, int, int, int]:
    kind = "wide" if width > WIDE else "narrow"
    if silu_and_mul:
        kind = "gated"
    return TILES[kind][(rows > 64) + (rows > 128)]


@triton.jit(do_not_specialize=["rows"])
def _fused_linear_kernel(
    x, weight, weight_start, bias, squares, residual, next_norm_weight, scaled, new_squares, out,
    eps, rows, in_features, width,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
    NUM_SQUARES: tl.constexpr, SQUARES_PAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """
    A program computes BLOCK_M x BLOCK_N outputs; weight is [PARTS, width, in_features], gates then ups.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    blocks_m = tl.cdiv(rows, BLOCK_M)
    block_m = tl.program_id(0) % blocks_m
    block_n = tl.program_id(0) // blocks_m
    row = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    out_feature = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    real_row = row < rows
    real_feature = out_feature < width
    valid = real_row[:, None] & real_feature[None, :]
    if OVERLAP:
        # The programs that share these rows of the weight each ask for a piece of them, for the L2 cache.
        wanted = tl.minimum(width - block_n * BLOCK_N, BLOCK_N) * in_features * 2
        piece = tl.cdiv(wanted, blocks_m * 16) * 16
        begin = block_m * piece
        size = tl.minimum(piece, wanted - begin)
        address = (weight_start + block_n.to(tl.int64) * BLOCK_N * in_features).to(tl.int64) + begin
        thread_size = tl.cdiv(size, 128 * 16) * 16
        thread_begin = tl.arange(0, 128) * thread_size
        for part in tl.static_range(PARTS):
            start = address + part * width.to(tl.int64) * in_features * 2
            prefetch_each(start + thread_begin, tl.minimum(thread_size, size - thread_begin))
        tl.extra.cuda.gdc_wait()
    if block_n * BLOCK_N >= width:
        return

    # What the result is combined with is asked for first: behind the loop each of these loads costs 1 us.
    place = row[:, None] * width + out_feature[None, :]
    if NUM_SQUARES > 0:
        its_squares = load_squares(squares, row, real_row, NUM_SQUARES, SQUARES_PAD)
    if bias is not None:
        column = tl.arange(0, PARTS * BLOCK_N)
        biased = block_n * BLOCK_N + column % BLOCK_N
        added = masked_load(bias + column // BLOCK_N * width + biased, biased < width)
    if residual is not None:
        its_residual = masked_load(residual + place, valid)
        gain = masked_load(next_norm_weight + out_feature, real_feature)

    acc = tl.zeros([BLOCK_M, PARTS * BLOCK_N], tl.float32)
    for start in range(0, in_features, BLOCK_K):
        x_tile = x.load([block_m * BLOCK_M, start])
        weight_tile = weight.load([0, block_n * BLOCK_N, start]).reshape(PARTS * BLOCK_N, BLOCK_K)
        acc = tl.dot(x_tile, weight_tile.T, acc, input_precision="ieee")

    if NUM_SQUARES > 0:
        acc *= tl.rsqrt(tl.sum(its_squares, axis=1) / in_features + eps)[:, None]
    if bias is not None:
        acc += added.to(tl.float32)[None, :]
    if PARTS == 2:
        gate, up = acc.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1).split()
        acc = silu(gate) * up
    if residual is not None:
        acc += its_residual.to(tl.float32)
        square = row * tl.cdiv(width, BLOCK_N) + block_n
        store_with_squares(acc, gain, out, scaled, new_squares, place, valid, square, real_row)
    else:
        tl.store(out + place, acc, mask=valid)


@triton.jit
def load_squares(squares, row, is_row, NUM_SQUARES: tl.constexpr, SQUARES_PAD: tl.constexpr):
    part = tl.arange(0, SQUARES_PAD)
    is_part = is_row[:, None] & (part < NUM_SQUARES)[None, :]
    return masked_load(squares + row[:, None] * NUM_SQUARES + part[None, :], is_part)


@triton.jit
def store_with_squares(acc, gain, out, scaled, squares, place, valid, square, is_row):
    """The sums, and for the next norm: the sums times `gain`, and of each row the sum of their squares."""
    result = acc.to(out.dtype.element_ty)
    tl.store(out + place, result, mask=valid)
    wide = result.to(tl.float32)
    tl.store(scaled + place, wide * gain.to(tl.float32)[None, :], mask=valid)
    tl.store(squares + square, tl.sum(wide * wide, axis=1), mask=is_row)
