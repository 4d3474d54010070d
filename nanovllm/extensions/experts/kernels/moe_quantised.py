"""The grouped products of experts whose weights are codes of 8 or 4 bits: what moe.py does for plain ones.

Weights are the left side of the product, where the matrix unit takes them from registers. A thread reads 16
bytes of a row at once and needs other inputs than its neighbours for each instruction of the matrix unit.
Since the order of the inputs does not matter if it is the same on both sides, a tile's inputs are numbered so
that a thread has read what it needs (`_deal_out`), and x is *arranged*: its columns are put in this order
beforehand, or every program would gather them two at a time.
"""

import torch
from torch import Tensor

from nanovllm.extensions.experts.kernels.experts import ExpertWeights, GroupedProduct, find_tile, finish_tile
from nanovllm.extensions.quantised.kernels.gpu import gpu_supports
from nanovllm.extensions.quantised.kernels.quantised_weight import (
    INT4,
    MXFP4,
    QuantisedWeight,
    codes_to_bf16,
    e2m1_to_bf16,
    halves_to_bf16,
    power_of_two_bf16,
)
from nanovllm.kernels import runtime
from nanovllm.kernels.runtime import cdiv, is_on_gpu, next_power_of_2, pdl_wait, tl, triton, use_triton

# Pairs and rows of the weight a tile, warps, pipeline stages, by the most pairs that an expert has on
# average.
QUANTISED_TILES = {4: (16, 128, 4, 4), 20: (32, 128, 4, 3), 48: (64, 128, 4, 3), 1 << 30: (128, 128, 8, 3)}
BYTES = 64  # of a row that four threads side by side read; the inputs of their codes are a block
STEP = 2 * BYTES  # inputs that are multiplied at once: a block of codes of 4 bits, or two of 8 bits


def can_use_quantised(x: Tensor, experts: ExpertWeights) -> bool:
    """Whether `multiply_quantised` works for these rows and both matrices of the experts."""
    # Those in bricks are moe_mxfp4.py's.
    if not experts.are_all(lambda each: each.can_be_read() and not each.is_in_bricks):
        return False
    if experts.gate_up.is_int4 != experts.down.is_int4:  # the first product's results go into the second
        return False
    if not is_on_gpu(x):
        return use_triton(x)
    return x.element_size() == 2 and gpu_supports(x.device, 8, 0)


def arranged_width(features: int) -> int:
    """How many columns inputs have when they are arranged."""
    return cdiv(features, STEP) * STEP


def arrange(x: Tensor, weight: QuantisedWeight) -> Tensor:
    """The columns of x [rows, in_features] in the order that `multiply_quantised` wants, and then zeros."""
    rows, in_features = x.shape
    width = arranged_width(in_features)
    arranged = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    _arrange_kernel[(rows,)](
        x, arranged, x.stride(0),
        IN_FEATURES=in_features, WIDTH=width, WIDTH_PAD=next_power_of_2(width),
        PER_BYTE=2 if weight.is_int4 else 1, BYTES=BYTES, num_warps=4, **runtime.overlap_options(x.device),
    )  # fmt: skip
    return arranged


def multiply_quantised(x: Tensor, weight: QuantisedWeight, product: GroupedProduct) -> None:
    """
    Codes become bfloat16, in which they are multiplied. With top_k the result is arranged for the next
    product, without it x must be.
    """
    x = arrange(x, weight) if product.top_k else x
    _, lines, num_warps, num_stages = product.tile
    if not runtime.has_hopper_shared_memory(x.device):
        num_stages = 2
    width = weight.shape[0] // (len(product.groups.pairs) * product.parts)
    product.launch(
        _grouped_quantised_kernel, lines,
        x, weight.codes.view(torch.uint8), weight.readable_scales, weight.zeros,
        numbers=[x.stride(0)],
        **weight.constants,
        IN_FEATURES=weight.shape[1], OUT_FEATURES=width, OUT_WIDTH=product.out.shape[1],
        LINES=lines, BYTES=BYTES, STEP=STEP, WARPS=num_warps, STAGES=num_stages, num_warps=num_warps,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _grouped_quantised_kernel(
    x, codes, scales, zeros, bias, pairs, table, weights, out, x_stride, rows,
    KIND: tl.constexpr, GROUP: tl.constexpr, TILE_ROWS: tl.constexpr, ZERO_POINT: tl.constexpr,
    EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr, PARTS: tl.constexpr, CLAMPED: tl.constexpr,
    IN_FEATURES: tl.constexpr, OUT_FEATURES: tl.constexpr, OUT_WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, LINES: tl.constexpr, BYTES: tl.constexpr, STEP: tl.constexpr,
    WARPS: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """
    A program multiplies LINES rows of an expert's weight with a tile of pairs: one half of them are gates,
    the other half what they multiply, or all are neighbours. A thread has as many of either half.
    """
    BLOCKS: tl.constexpr = (PARTS * OUT_WIDTH + LINES - 1) // LINES
    block, expert, pair, is_real = find_tile(
        pairs, table, rows, BLOCKS, EXPERTS, EXPERTS_PAD, BLOCK_M, OVERLAP
    )
    if expert == EXPERTS:
        return
    PER_BYTE: tl.constexpr = 2 if KIND >= INT4 else 1  # codes
    CHUNKS: tl.constexpr = STEP // (BYTES * PER_BYTE)
    ROW_BYTES: tl.constexpr = IN_FEATURES // PER_BYTE
    PIECE: tl.constexpr = 16 * PER_BYTE  # inputs of the codes that a thread reads at once
    HALF: tl.constexpr = LINES // 2
    UPPER: tl.constexpr = LINES // (8 * WARPS)  # rows that a thread has
    GROUPS: tl.constexpr = (IN_FEATURES + GROUP - 1) // GROUP if GROUP > 0 else 1  # of a row
    # One scale for all inputs of a step is applied to its sums.
    SCALES_SUMS: tl.constexpr = GROUP > 0 and GROUP % STEP == 0 and zeros is None and PER_BYTE == 1
    SCALES_CODES: tl.constexpr = GROUP > 0 and not SCALES_SUMS

    # The rows in the order of the sums: all of the first half, then all of the second.
    line = tl.arange(0, LINES)
    row, is_row = rows_of(expert, block, line // HALF, line % HALF, HALF, PARTS, OUT_FEATURES)
    # And as they are read: [chunks, rows that a thread has, rows, bytes of a row].
    upper = tl.arange(0, UPPER)[None, :, None, None]
    place = upper // 2 * (8 * WARPS) + tl.arange(0, 8 * WARPS)[None, None, :, None]
    read, is_read = rows_of(expert, block, upper % 2, place, HALF, PARTS, OUT_FEATURES)
    chunk = tl.arange(0, CHUNKS)[:, None, None, None]
    byte = chunk * BYTES + tl.arange(0, BYTES)[None, None, None, :]
    its_codes = codes + read * ROW_BYTES + byte
    piece = (chunk * 4 + tl.arange(0, 4)[None, None, None, :]) * PIECE
    grid_row = read // TILE_ROWS * GROUPS
    k = tl.arange(0, CHUNKS * BYTES)
    its_x = x + (pair // PAIRS_PER_ROW)[None, :] * x_stride + k[:, None]
    # What a code stands above its number; integers of 4 bits come with 128 added.
    above: tl.constexpr = 128 if KIND == INT4 else 0
    row_zero = tl.full([1, 1, 1, 1], above + ZERO_POINT, tl.float32)
    if zeros is not None and GROUP == 0:
        row_zero = tl.load(zeros + grid_row, mask=is_read, other=0).to(tl.float32) + above
    # Scales of codes are asked for a step ahead.
    if SCALES_SUMS:
        sums_scales = row // TILE_ROWS * GROUPS
        next_scale = tl.load(scales + sums_scales, mask=is_row, other=0.0)
    if SCALES_CODES:
        has_scale = is_read & (piece < IN_FEATURES)
        next_scale = tl.load(scales + grid_row + piece // GROUP, mask=has_scale, other=0)
        if zeros is not None:
            next_zero = tl.load(zeros + grid_row + piece // GROUP, mask=has_scale, other=0)

    acc = tl.zeros([LINES, BLOCK_M], tl.float32)
    for start in tl.range(0, IN_FEATURES, STEP, num_stages=STAGES):
        is_there = is_read
        if IN_FEATURES % STEP:
            is_there = is_read & (start // PER_BYTE + byte < ROW_BYTES)
        found = tl.load(its_codes + start // PER_BYTE, mask=is_there, other=0)
        low_x = tl.load(its_x + start, mask=is_real[None, :], other=0.0)
        if PER_BYTE == 2:
            high_x = tl.load(its_x + start + BYTES, mask=is_real[None, :], other=0.0)
            if KIND == INT4:
                low, high = halves_to_bf16(found)
            else:
                low, high = e2m1_to_bf16(found)
        else:
            low = codes_to_bf16(found, KIND)
        scale, zero = row_zero, row_zero
        if SCALES_CODES:
            scale = power_of_two_bf16(next_scale) if KIND == MXFP4 else next_scale.to(low.dtype)
            scale = _expand(scale, CHUNKS, UPPER, 8 * WARPS, BYTES)
            if zeros is not None:
                zero = (next_zero.to(tl.float32) + above).to(low.dtype)
                zero = _expand(zero, CHUNKS, UPPER, 8 * WARPS, BYTES)
            has_scale = is_read & (start + STEP + piece < IN_FEATURES)
            grid = grid_row + (start + STEP + piece) // GROUP
            next_scale = tl.load(scales + grid, mask=has_scale, other=0)
            if zeros is not None:
                next_zero = tl.load(zeros + grid, mask=has_scale, other=0)
        low = _to_number(low, scale, zero, KIND == INT4 or zeros is not None, SCALES_CODES)
        low = _deal_out(low, LINES, CHUNKS, WARPS, BYTES)
        if SCALES_SUMS:
            sums = tl.dot(low, low_x.to(low.dtype), input_precision="ieee")
            acc += in_order(sums, LINES, BLOCK_M) * next_scale[:, None]
            following = sums_scales + (start + STEP) // GROUP
            has_scale = is_row & (following < sums_scales + GROUPS)
            next_scale = tl.load(scales + following, mask=has_scale, other=0.0)
        else:
            acc = tl.dot(low, low_x.to(low.dtype), acc, input_precision="ieee")
        if PER_BYTE == 2:
            high = _to_number(high, scale, zero, KIND == INT4, SCALES_CODES)
            high = _deal_out(high, LINES, CHUNKS, WARPS, BYTES)
            acc = tl.dot(high, high_x.to(low.dtype), acc, input_precision="ieee")
    if not SCALES_SUMS:
        acc = in_order(acc, LINES, BLOCK_M)
    if GROUP == 0:
        acc *= tl.load(scales + row // TILE_ROWS, mask=is_row, other=0.0).to(tl.float32)[:, None]
    acc = finish_tile(acc, bias, row, is_row, weights, pair, is_real, PARTS, CLAMPED)
    out_row = block * (LINES // PARTS) + tl.arange(0, LINES // PARTS)
    valid = is_real[None, :] & (out_row < OUT_WIDTH)[:, None]
    if PARTS == 2:
        out_row = _arranged_place(out_row, PER_BYTE, BYTES)
    tl.store(out + pair[None, :] * OUT_WIDTH + out_row[:, None], acc, mask=valid)


@triton.jit
def _arrange_kernel(
    x, out, x_stride, IN_FEATURES: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr,
    PER_BYTE: tl.constexpr, BYTES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    pdl_wait(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH_PAD)
    value = tl.load(x + row * x_stride + column, mask=column < IN_FEATURES, other=0.0)
    tl.store(out + row * WIDTH + _arranged_place(column, PER_BYTE, BYTES), value, mask=column < WIDTH)


@triton.jit
def _arranged_place(column, PER_BYTE: tl.constexpr, BYTES: tl.constexpr):
    """
    Where an input stands when it is arranged. In a block, those whose codes are low halves of bytes come
    before those of high halves; of each, two at a time are taken from the four pieces in turn.
    """
    BLOCK: tl.constexpr = BYTES * PER_BYTE
    within = column % BLOCK
    piece, within = within // (16 * PER_BYTE), within % (16 * PER_BYTE)
    half, within = within // 16, within % 16
    return column // BLOCK * BLOCK + half * BYTES + within // 2 * 8 + piece * 2 + within % 2


@triton.jit
def rows_of(expert, block, half, place, HALF: tl.constexpr, PARTS: tl.constexpr, OUT_FEATURES: tl.constexpr):
    """The weight's rows that stand at a place in one half of a program's rows, and whether they exist."""
    if PARTS == 2:
        row = block * HALF + place
        is_row = row < OUT_FEATURES
        row += half * OUT_FEATURES
    else:
        row = (block * 2 + half) * HALF + place
        is_row = row < OUT_FEATURES
    return expert.to(tl.int64) * (PARTS * OUT_FEATURES) + row, is_row


@triton.jit
def _expand(grid, CHUNKS: tl.constexpr, UPPER: tl.constexpr, ROWS: tl.constexpr, BYTES: tl.constexpr):
    """[CHUNKS, UPPER, ROWS, 4] -> [CHUNKS, UPPER, ROWS, BYTES], each number repeated."""
    wide = tl.broadcast_to(grid[:, :, :, :, None], [CHUNKS, UPPER, ROWS, 4, BYTES // 4])
    return tl.reshape(wide, [CHUNKS, UPPER, ROWS, BYTES])


@triton.jit
def _to_number(codes, scale, zero, HAS_ZERO: tl.constexpr, IS_SCALED: tl.constexpr):
    if HAS_ZERO:
        codes -= zero.to(codes.dtype)
    if IS_SCALED:
        codes = (codes * scale).to(codes.dtype)
    return codes


@triton.jit
def _deal_out(codes, LINES: tl.constexpr, CHUNKS: tl.constexpr, WARPS: tl.constexpr, BYTES: tl.constexpr):
    """
    From codes as they are read to [LINES, CHUNKS * BYTES], without moving any between threads: this is how
    the matrix unit wants rows and inputs dealt out to warps, lanes and registers.
    """
    codes = tl.reshape(codes, [CHUNKS, LINES // (16 * WARPS), 2, WARPS, 8, 4, 8, 2])
    return tl.reshape(tl.permute(codes, [1, 3, 2, 4, 0, 6, 5, 7]), [LINES, CHUNKS * BYTES])


@triton.jit
def in_order(sums, LINES: tl.constexpr, BLOCK_M: tl.constexpr):
    """From `_deal_out`'s order of the rows to all of the first half, then all of the second."""
    sums = tl.permute(tl.reshape(sums, [LINES // 16, 2, 8, BLOCK_M]), [1, 0, 2, 3])
    return tl.reshape(sums, [LINES, BLOCK_M])
