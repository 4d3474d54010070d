"""The grouped GEMM of experts in MXFP4 on Hopper GPUs: as grouped_codes.py, but in 8-bit floating point.

A code times its scale, relative to the largest scale of the row, fits into e4m3, if the scale is at most 11
powers of two smaller. One instruction looks four of these numbers up in a table in two registers; making
bfloat16 of as many takes ten. Inputs are sums of two numbers in e4m3, which have as many bits as bfloat16, or
one number, if the weight rounds its inputs: then there is half as much to multiply. Products of 8 bits are
added up with fewer bits than float32 has, which costs a little precision.
"""

import torch
from torch import Tensor

from nanovllm.extensions.quantised.kernels.fp8_linear import LARGEST_CODE, SMALLEST_SCALE
from nanovllm.extensions.quantised.kernels.grouped_codes import in_order, rows_in_halves, swizzle_e4m3
from nanovllm.extensions.quantised.kernels.grouped_gemm import GroupedProduct, Tile, find_tile, store_tile
from nanovllm.extensions.quantised.kernels.quantised_weight import (
    BRICK_ROWS,
    MXFP4,
    QuantisedWeight,
    code_to_float,
)
from nanovllm.kernels.runtime import (
    IS_INTERPRETED,
    cdiv,
    masked_load,
    next_power_of_2,
    overlap_options,
    pdl_wait,
    tl,
    triton,
)

STEP = 128  # inputs that are multiplied at once: the width of a brick, and BLOCK_K of all tiles
MXFP4_TILES = {
    13: Tile(16, 4, MAX_REGISTERS=128),
    29: Tile(32, 3, MAX_REGISTERS=128),
    80: Tile(64, 3, MAX_REGISTERS=168),
    1 << 30: Tile(128, 3, MAX_REGISTERS=255),
}


def multiply_mxfp4(x: Tensor, weight: QuantisedWeight, product: GroupedProduct) -> None:
    """With a weight in bricks."""
    numbers = 1 if weight.rounds_inputs else 2
    inputs = *split(x, numbers), weight.codes, weight.readable_scales, weight.largest
    constants = {"NUMBERS": numbers, "BRICK_ROWS": BRICK_ROWS}
    product.launch(_grouped_mxfp4_kernel, weight, inputs, constants)


def split(x: Tensor, numbers: int) -> tuple[Tensor, Tensor]:
    """
    Rows x [rows, in], divided by scales, float32 [rows], as sums of one or two numbers in e4m3, [rows,
    numbers * width]: of each STEP of inputs all first ones and then all second ones, in the order that a
    product wants.
    """
    rows, in_features = x.shape
    width = cdiv(in_features, STEP) * STEP
    parts = torch.empty(rows, numbers * width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    _split_kernel[(rows,)](
        x,
        parts,
        scales,
        x.stride(0),
        NUMBERS=numbers,
        IN_FEATURES=in_features,
        WIDTH=width,
        WIDTH_PAD=next_power_of_2(width),
        num_warps=4,
        **overlap_options(x.device),
    )
    return parts, scales


@triton.jit
def _split_kernel(
    x,
    parts,
    scales,
    x_stride,
    NUMBERS: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    pdl_wait(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH_PAD)
    value = masked_load(x + row * x_stride + column, column < IN_FEATURES).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value)) / LARGEST_CODE, SMALLEST_SCALE)
    tl.store(scales + row, scale)
    value /= scale
    first = value.to(tl.float8e4nv)
    # The matrix unit takes 16 neighbours from four threads. A thread's four are the codes of two bytes that
    # it has read, low halves before high ones.
    piece, half, byte = column % 128 // 32, column % 32 // 16, column % 16
    place = column // 128 * (128 * NUMBERS) + byte // 2 * 16 + piece * 4 + byte % 2 * 2 + half
    parts += row * (NUMBERS * WIDTH) + place
    tl.store(parts, first, mask=column < WIDTH)
    if NUMBERS == 2:
        tl.store(parts + 128, (value - first.to(tl.float32)).to(tl.float8e4nv), mask=column < WIDTH)


@triton.jit(do_not_specialize=["tokens"])
def _grouped_mxfp4_kernel(
    x,
    x_scales,
    codes,
    scales,
    largest,
    operands,
    tokens,
    NUMBERS: tl.constexpr,
    BRICK_ROWS: tl.constexpr,
    SIZES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program's rows are in halves, as grouped_codes.py has them."""
    tile = find_tile(operands, tokens, SIZES, OVERLAP)
    block, expert, assignment, is_real = tile
    if expert == SIZES.EXPERTS:
        return
    token = assignment // SIZES.TOP_K
    STEPS: tl.constexpr = (SIZES.IN_FEATURES + SIZES.BLOCK_K - 1) // SIZES.BLOCK_K
    row, is_row, read, is_read = rows_in_halves(expert, block, SIZES)
    read = tl.where(is_read, read, 0)  # [rows that a thread has, rows, bytes of a row]
    its_largest = tl.load(largest + read).to(tl.int32)
    brick_row = read // BRICK_ROWS * (STEPS * BRICK_ROWS) + read % BRICK_ROWS
    # Of a row a brick has 64 bytes of codes and 4 scales; x has 128 first and perhaps as many second numbers.
    X_STEP: tl.constexpr = 128 * NUMBERS
    its_codes = codes + brick_row * 64 + tl.arange(0, 64)[None, None, :]
    its_scales = scales + brick_row * 4 + tl.arange(0, 4)[None, None, :]
    its_x, is_x = token * (STEPS * X_STEP), is_real
    # Where registers suffice, both numbers of an input are multiplied at once, as columns side by side.
    WIDE: tl.constexpr = NUMBERS == 2 and SIZES.BLOCK_M == 16
    if WIDE:
        its_x = tl.reshape(tl.join(token, token), [2 * SIZES.BLOCK_M]) * (STEPS * X_STEP)
        its_x += tl.arange(0, 2 * SIZES.BLOCK_M) % 2 * 128
        is_x = tl.reshape(tl.join(is_real, is_real), [2 * SIZES.BLOCK_M])
    its_x = x + its_x[None, :] + tl.arange(0, 128)[:, None]

    acc = tl.full([SIZES.BLOCK_N, is_x.shape[0]], 0.0, tl.float32)
    for step in tl.range(0, STEPS, num_stages=SIZES.STAGES):
        found = tl.load(its_codes + step * (BRICK_ROWS * 64))
        scale = tl.load(its_scales + step * (BRICK_ROWS * 4))
        x_tile = masked_load(its_x + step * X_STEP, is_x[None, :])
        exponent = scale.to(tl.int32) - its_largest
        exponent = tl.broadcast_to(exponent[:, :, :, None], [read.shape[0], read.shape[1], 4, 16])
        first, second = _e2m1_to_e4m3(found, tl.reshape(exponent, found.shape))
        values = swizzle_e4m3(first, second, SIZES)
        acc = tl.dot(values, x_tile, acc)
        if NUMBERS == 2 and not WIDE:
            acc = tl.dot(values, masked_load(its_x + step * X_STEP + 128, is_x[None, :]), acc)
    if WIDE:
        first_sum, second_sum = tl.split(tl.reshape(acc, [SIZES.BLOCK_N, SIZES.BLOCK_M, 2]))
        acc = first_sum + second_sum
    acc = in_order(acc)
    # The byte of a scale is its exponent and 127, and codes came times 2^6.
    acc *= tl.exp2(masked_load(largest + row, is_row).to(tl.float32) - (127 + 6))[:, None]
    acc *= masked_load(x_scales + token, is_real)[None, :]
    store_tile(acc, row, is_row, tile, operands, SIZES, 0, False)


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
        "=&r,=&r,r,r,r,r,r,r,r,r,r",
        [packed, small, large],
        dtype=(tl.float8e4nv, tl.float8e4nv),
        is_pure=True,
        pack=4,
    )
