"""The grouped products of experts in MXFP4 on Hopper GPUs: as moe_quantised.py, but in 8-bit floating point.

A code times its scale, relative to the largest scale of the row, fits into e4m3, if the scale is at most 11
powers of two smaller. One instruction looks four of these numbers up in a table in two registers; making
bfloat16 of as many takes ten. Inputs are sums of two numbers in e4m3, which have as many bits as bfloat16.
Products of 8 bits are added up with fewer bits than float32 has, which costs a little precision.
"""

import torch
from torch import Tensor

from nanovllm.extensions.experts.kernels.experts import ExpertWeights, GroupedProduct, find_tile, finish_tile
from nanovllm.extensions.experts.kernels.moe_quantised import in_order, rows_of
from nanovllm.extensions.quantised.kernels.fp8_linear import LARGEST_CODE, SMALLEST_SCALE
from nanovllm.extensions.quantised.kernels.quantised_weight import (
    BRICK_ROWS,
    MXFP4,
    QuantisedWeight,
    code_to_float,
)
from nanovllm.kernels import runtime
from nanovllm.kernels.runtime import IS_INTERPRETED, cdiv, next_power_of_2, pdl_wait, tl, triton

# Pairs of a tile, pipeline stages, and registers of a thread at most, so that a multiprocessor runs several
# programs; by the most pairs that an expert has on average.
MXFP4_TILES = {13: (16, 4, 128), 29: (32, 3, 128), 80: (64, 3, 168), 1 << 30: (128, 3, 255)}
LINES, WARPS = 128, 4  # rows of the weight a tile, and who multiplies them
STEP = 128  # inputs that are multiplied at once: the width of a brick


def can_use_mxfp4(x: Tensor, experts: ExpertWeights) -> bool:
    """Whether `multiply_mxfp4` works for these rows and both matrices of the experts."""
    is_possible = experts.are_all(lambda each: each.is_in_bricks)
    return is_possible and runtime.use_triton(x) and (x.element_size() == 2 or not runtime.is_on_gpu(x))


def multiply_mxfp4(x: Tensor, weight: QuantisedWeight, product: GroupedProduct) -> None:
    """With a weight in bricks."""
    block_m, num_stages, max_registers = product.tile
    product.launch(
        _grouped_mxfp4_kernel, LINES, *split(x), weight.codes, weight.readable_scales, weight.largest,
        STEPS=weight.codes.shape[1], BRICK_ROWS=BRICK_ROWS, OUT_FEATURES=product.out.shape[1],
        LINES=LINES, WARPS=WARPS, STAGES=num_stages, WIDE=block_m == 16,
        num_warps=WARPS, maxnreg=max_registers,
    )  # fmt: skip


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """
    Rows x [rows, in], divided by scales, float32 [rows], as sums of two numbers in e4m3, [rows, 2 * width]:
    of each STEP of inputs all first ones and then all second ones, in the order that a product wants.
    """
    rows, in_features = x.shape
    width = cdiv(in_features, STEP) * STEP
    parts = torch.empty(rows, 2 * width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    _split_kernel[(rows,)](
        x, parts, scales, x.stride(0), IN_FEATURES=in_features, WIDTH=width,
        WIDTH_PAD=next_power_of_2(width), num_warps=4, **runtime.overlap_options(x.device),
    )  # fmt: skip
    return parts, scales


@triton.jit
def _split_kernel(
    x, parts, scales, x_stride, IN_FEATURES: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    pdl_wait(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH_PAD)
    value = tl.load(x + row * x_stride + column, mask=column < IN_FEATURES, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value)) / LARGEST_CODE, SMALLEST_SCALE)
    tl.store(scales + row, scale)
    value /= scale
    first = value.to(tl.float8e4nv)
    # The matrix unit takes 16 neighbours from four threads. A thread's four are the codes of two bytes that
    # it has read, low halves before high ones.
    piece, half, byte = column % 128 // 32, column % 32 // 16, column % 16
    place = column // 128 * 256 + byte // 2 * 16 + piece * 4 + byte % 2 * 2 + half
    parts += row * (2 * WIDTH) + place
    tl.store(parts, first, mask=column < WIDTH)
    tl.store(parts + 128, (value - first.to(tl.float32)).to(tl.float8e4nv), mask=column < WIDTH)


@triton.jit(do_not_specialize=["rows"])
def _grouped_mxfp4_kernel(
    x, x_scales, codes, scales, largest, bias, pairs, table, weights, out, rows,
    EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr, PARTS: tl.constexpr, CLAMPED: tl.constexpr,
    STEPS: tl.constexpr, BRICK_ROWS: tl.constexpr, OUT_FEATURES: tl.constexpr, BLOCK_M: tl.constexpr,
    LINES: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr, WIDE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """
    A program multiplies LINES rows of an expert's weight, in halves as moe_quantised.py does, with a tile of
    pairs.
    """
    BLOCKS: tl.constexpr = (PARTS * OUT_FEATURES + LINES - 1) // LINES
    block, expert, pair, is_real = find_tile(
        pairs, table, rows, BLOCKS, EXPERTS, EXPERTS_PAD, BLOCK_M, OVERLAP
    )
    if expert == EXPERTS:
        return
    token = pair // PAIRS_PER_ROW
    HALF: tl.constexpr = LINES // 2
    UPPER: tl.constexpr = LINES // (8 * WARPS)  # rows that a thread has

    # The rows in the order of the sums, and as they are read: [rows that a thread has, rows, bytes of a row].
    line = tl.arange(0, LINES)
    row, is_row = rows_of(expert, block, line // HALF, line % HALF, HALF, PARTS, OUT_FEATURES)
    upper = tl.arange(0, UPPER)[:, None, None]
    place = upper // 2 * (8 * WARPS) + tl.arange(0, 8 * WARPS)[None, :, None]
    read, is_read = rows_of(expert, block, upper % 2, place, HALF, PARTS, OUT_FEATURES)
    read = tl.where(is_read, read, 0)
    its_largest = tl.load(largest + read).to(tl.int32)
    brick_row = read // BRICK_ROWS * (STEPS * BRICK_ROWS) + read % BRICK_ROWS
    # Of a row a brick has 64 bytes of codes and 4 scales; x has 128 first and 128 second numbers a step.
    its_codes = codes + brick_row * 64 + tl.arange(0, 64)[None, None, :]
    its_scales = scales + brick_row * 4 + tl.arange(0, 4)[None, None, :]
    its_x, is_x = token * (STEPS * 256), is_real
    # Where registers suffice, both numbers of an input are multiplied at once, as columns side by side.
    if WIDE:
        its_x = tl.reshape(tl.join(token, token), [2 * BLOCK_M]) * (STEPS * 256)
        its_x += tl.arange(0, 2 * BLOCK_M) % 2 * 128
        is_x = tl.reshape(tl.join(is_real, is_real), [2 * BLOCK_M])
    its_x = x + its_x[None, :] + tl.arange(0, 128)[:, None]

    acc = tl.zeros([LINES, is_x.shape[0]], tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        found = tl.load(its_codes + step * (BRICK_ROWS * 64))
        scale = tl.load(its_scales + step * (BRICK_ROWS * 4))
        x_tile = tl.load(its_x + step * 256, mask=is_x[None, :], other=0.0)
        exponent = scale.to(tl.int32) - its_largest
        exponent = tl.broadcast_to(exponent[:, :, :, None], [UPPER, 8 * WARPS, 4, 16])
        first, second = _e2m1_to_e4m3(found, tl.reshape(exponent, found.shape))
        # As in moe_quantised.py, this is how the matrix unit wants rows and inputs dealt out.
        values = tl.reshape(tl.join(first, second), [UPPER // 2, 2, WARPS, 8, 4, 4, 4, 2])
        values = tl.reshape(tl.permute(values, [0, 2, 1, 3, 5, 7, 4, 6]), [LINES, 128])
        acc = tl.dot(values, x_tile, acc)
        if not WIDE:
            acc = tl.dot(values, tl.load(its_x + step * 256 + 128, mask=is_x[None, :], other=0.0), acc)
    if WIDE:
        first_sum, second_sum = tl.split(tl.reshape(acc, [LINES, BLOCK_M, 2]))
        acc = first_sum + second_sum
    acc = in_order(acc, LINES, BLOCK_M)
    # The byte of a scale is its exponent and 127, and codes came times 2^6.
    acc *= tl.exp2(tl.load(largest + row, mask=is_row, other=0).to(tl.float32) - (127 + 6))[:, None]
    acc *= tl.load(x_scales + token, mask=is_real, other=0.0)[None, :]
    acc = finish_tile(acc, bias, row, is_row, weights, pair, is_real, PARTS, CLAMPED)
    out_row = block * (LINES // PARTS) + tl.arange(0, LINES // PARTS)
    valid = is_real[None, :] & (out_row < OUT_FEATURES)[:, None]
    tl.store(out + pair[None, :] * OUT_FEATURES + out_row[:, None], acc, mask=valid)


@triton.jit
def _e2m1_to_e4m3(packed, exponent):
    """
    Numbers of uint8 [..., bytes] times 2^(6 + exponent), or 0 where that is below 2^-5, in e4m3. A row's
    largest scale has exponent 0: 6 * 2^6 is below e4m3's 448. Of four bytes the first result has the numbers
    of two, low halves before high ones, the second the others'.
    """
    if IS_INTERPRETED:
        words = packed.to(tl.int32)
        numbers = tl.join(code_to_float(words, 0, MXFP4), code_to_float(words, 4, MXFP4))
        numbers *= tl.where(exponent < -11, 0.0, tl.exp2(6.0 + exponent))[:, :, :, None]
        numbers = tl.reshape(numbers, [packed.shape[0], packed.shape[1], packed.shape[2] // 4, 2, 4])
        first, second = tl.split(tl.permute(numbers, [0, 1, 2, 4, 3]))
        return (
            tl.reshape(first, packed.shape).to(tl.float8e4nv),
            tl.reshape(second, packed.shape).to(tl.float8e4nv),
        )
    # The numbers of codes 0 to 3 and 4 to 7 as bytes. A step of the exponent is 8 in each.
    small = tl.where(exponent < -11, 0, 0x6C686000 + exponent * 0x08080800)
    large = tl.where(exponent < -11, 0, 0x7C787470 + exponent * 0x08080808)
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 index, sign, left;
        shl.b32 left, $2, 4;
        and.b32 index, $2, 0x77777777;
        prmt.b32 $0, $3, $7, index;
        prmt.b32 sign, left, $2, 0x5140;
        lop3.b32 $0, $0, sign, 0x80808080, 0xf8;
        shr.b32 index, index, 16;
        prmt.b32 $1, $3, $7, index;
        prmt.b32 sign, left, $2, 0x7362;
        lop3.b32 $1, $1, sign, 0x80808080, 0xf8;
        }""",
        "=&r,=&r,r,r,r,r,r,r,r,r,r", [packed, small, large],
        dtype=(tl.float8e4nv, tl.float8e4nv), is_pure=True, pack=4,
    )  # fmt: skip
