"""Products of weights in codes of 8 or 4 bits, which become 16 on their way: grouped GEMM, and GEMM.

Weights are the left side of the product, where the matrix unit takes them from registers. A thread reads 16
bytes of a row at once and needs other inputs than its neighbours for each instruction of the matrix unit.
Since the order of the inputs does not matter if it is the same on both sides, K is permuted so that a thread
has read what it needs (`swizzle`), and the columns of x are put in this order beforehand (`permute_k`), or
every program would gather them two at a time. A layer without experts is multiplied as one expert; where it
has too few tiles to fill the GPU, several programs share the inputs of a tile, and the last one to arrive
adds up their sums.
"""

import torch
from torch import Tensor

from nanovllm.extensions.quantised.kernels.gpu import gpu_supports
from nanovllm.extensions.quantised.kernels.grouped_gemm import (
    GroupedProduct,
    Tile,
    fewer_stages,
    find_tile,
    store_sums,
    with_splits,
)
from nanovllm.extensions.quantised.kernels.nf4 import look_up
from nanovllm.extensions.quantised.kernels.permute_k import BYTES, permute_k
from nanovllm.extensions.quantised.kernels.quantised_weight import (
    FP4,
    INT4,
    MXFP4,
    NF4,
    QuantisedWeight,
    load_grids,
    scale_pair,
)
from nanovllm.extensions.quantised.kernels.to_numbers import (
    codes_to_numbers,
    e2m1_to_numbers,
    halves_to_numbers,
    power_of_two,
)
from nanovllm.kernels.runtime import (
    IS_INTERPRETED,
    cdiv,
    has_hopper_shared_memory,
    masked_load,
    num_multiprocessors,
    tl,
    triton,
    use_triton,
)

# Of experts, by the most assignments that one has on average.
CODE_TILES = {4: Tile(16, 4), 20: Tile(32, 3), 48: Tile(64, 3), 1 << 30: Tile(128, 3, WARPS=8)}
MAX_ROWS = 256  # of layers; for more, converting the weight first is faster
# By the most rows; and how many programs a multiprocessor gets, if inputs have to be shared: at most what it
# has registers and shared memory for. With few rows the steps are long, to hide how long memory takes.
LINEAR_TILES = {
    16: (Tile(16, 3, BLOCK_N=64, BLOCK_K=256, MAX_REGISTERS=168), 3),
    32: (Tile(32, 3, BLOCK_N=64, BLOCK_K=256, MAX_REGISTERS=168), 3),
    64: (Tile(64, 3, BLOCK_N=64, BLOCK_K=256), 2),
    MAX_ROWS: (Tile(128, 3, BLOCK_N=64), 2),
}
# For more rows than 128 and codes of 4 bits: they are converted once, and half as much is read from the L2
# cache. One program fills a multiprocessor, which must have many steps, since the first wait for memory.
WIDE_TILE = Tile(256, 3, WARPS=8)
MIN_WIDE_STEPS = 10  # of a multiprocessor


def multiply_codes(x: Tensor, weight: QuantisedWeight, product: GroupedProduct) -> None:
    """With top_k x is permuted for the product, without it x must be already."""
    x = permute_k(x, weight.codes_per_byte) if product.top_k else x
    inputs = x, weight.tensors(torch.uint8), x.stride(0)
    changes = fewer_stages(x.device)
    product.launch(_grouped_codes_kernel, weight, inputs, weight.constants, **changes)


def can_use_linear_codes(x: Tensor, weight: QuantisedWeight) -> bool:
    """Whether `linear_codes` works for these rows [rows, features], and is the fastest way."""
    is_possible = use_triton(x) and x.dtype in (torch.bfloat16, torch.float16) and weight.can_be_read()
    # Earlier GPUs do not compute in bfloat16.
    return is_possible and gpu_supports(x.device, 8, 0) and 0 < len(x) <= MAX_ROWS


def linear_codes(x: Tensor, weight: QuantisedWeight, bias: Tensor | None = None) -> Tensor:
    """
    x @ weight.T + bias: [rows, out], for x [rows, in] with permuted columns. Weights get x's dtype, sums are
    float32.
    """
    out = torch.empty(len(x), weight.shape[0], dtype=x.dtype, device=x.device)
    multiply_codes(x, weight, GroupedProduct(bias, None, out, linear_tile(len(x), weight, x.device)))
    return out


def linear_tile(rows: int, weight: QuantisedWeight, device: torch.device) -> Tile:
    """What a program of `linear_codes` multiplies, and how many share the inputs of a tile."""
    (out_features, in_features), processors = weight.shape, num_multiprocessors(device)
    tile, programs = next(found for most, found in LINEAR_TILES.items() if rows <= most)
    wide_steps = cdiv(out_features, WIDE_TILE.BLOCK_N) * cdiv(in_features, WIDE_TILE.BLOCK_K)
    is_large = wide_steps >= MIN_WIDE_STEPS * processors
    if rows > 128 and weight.codes_per_byte == 2 and is_large and has_hopper_shared_memory(device):
        tile, programs = WIDE_TILE, 1
    tile = tile._replace(BLOCK_K=min(tile.BLOCK_K, 2 * BYTES.value * weight.codes_per_byte))
    return with_splits(tile, rows, weight.shape, processors * programs)


@triton.jit(do_not_specialize=["tokens"])
def _grouped_codes_kernel(
    x,
    weight,
    x_stride,
    operands,
    tokens,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    SIZES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """
    One half of a program's rows are gates, the other half what they multiply, or all are neighbours. A thread
    has as many of either half.
    """
    tile = find_tile(operands, tokens, SIZES, OVERLAP)
    block, expert, assignment, is_real = tile
    if expert == SIZES.EXPERTS:
        return
    codes, scales, zeros, offsets = weight
    PER_BYTE: tl.constexpr = 2 if KIND >= INT4 else 1  # codes
    STEP: tl.constexpr = SIZES.BLOCK_K  # inputs that are multiplied at once
    CHUNKS: tl.constexpr = STEP // (BYTES * PER_BYTE)
    ROW_BYTES: tl.constexpr = SIZES.IN_FEATURES // PER_BYTE
    PIECE: tl.constexpr = 16 * PER_BYTE  # inputs of the codes that a thread reads at once
    STEPS: tl.constexpr = (SIZES.IN_FEATURES + STEP * SIZES.SPLITS - 1) // (STEP * SIZES.SPLITS)
    begin = tl.program_id(1) * (STEPS * STEP)
    GROUPS: tl.constexpr = (SIZES.IN_FEATURES + GROUP - 1) // GROUP if GROUP > 0 else 1  # of a row
    IS_SHIFTED: tl.constexpr = zeros is not None or offsets is not None
    # One scale for all inputs of a step is applied to its sums.
    SCALES_SUMS: tl.constexpr = GROUP > 0 and GROUP % STEP == 0 and PER_BYTE == 1 and not IS_SHIFTED
    SCALES_CODES: tl.constexpr = GROUP > 0 and not SCALES_SUMS

    row, is_row, read, is_read = rows_in_halves(expert, block, SIZES)
    # As they are read: [chunks, rows that a thread has, rows, bytes of a row].
    read, is_read = read[None, :, :, :], is_read[None, :, :, :]
    chunk = tl.arange(0, CHUNKS)[:, None, None, None]
    byte = chunk * BYTES + tl.arange(0, BYTES)[None, None, None, :]
    its_codes = codes + read * ROW_BYTES + byte
    piece = (chunk * 4 + tl.arange(0, 4)[None, None, None, :]) * PIECE
    grid_row = read // TILE_ROWS * GROUPS
    k = tl.arange(0, CHUNKS * BYTES)
    k = tl.max_contiguous(tl.multiple_of(k // BYTES * (BYTES * PER_BYTE) + k % BYTES, BYTES), BYTES)
    its_x = x + (assignment // SIZES.TOP_K)[None, :] * x_stride + k[:, None]
    IS_F16: tl.constexpr = x.dtype.element_ty == tl.float16
    DTYPE: tl.constexpr = tl.float16 if IS_F16 else tl.bfloat16
    # What a code stands above its number; integers of 4 bits come with this added.
    above: tl.constexpr = (1024 if IS_F16 else 128) if KIND == INT4 else 0
    row_zero = tl.full([1, 1, 1, 1], above + ZERO_POINT, tl.float32)
    if zeros is not None and GROUP == 0:
        row_zero = masked_load(zeros + grid_row, is_read).to(tl.float32) + above
    # Scales are asked for a step ahead; farther ahead Triton would not pipeline the loop.
    if SCALES_SUMS:
        sums_scales = row // TILE_ROWS * GROUPS
        next_scale = masked_load(scales + sums_scales + begin // GROUP, is_row)
    if SCALES_CODES:
        next_scale, next_shift = grids_at(weight, grid_row, is_read, begin + piece, GROUP, SIZES)

    acc = tl.full([SIZES.BLOCK_N, SIZES.BLOCK_M], 0.0, tl.float32)
    # How often the loop runs is known, or the compiler would let the matrix unit wait for each product.
    for step in tl.range(0, STEPS, num_stages=SIZES.STAGES):
        start = begin + step * STEP
        is_there = is_read
        if SIZES.IN_FEATURES % STEP:
            is_there = is_read & (start // PER_BYTE + byte < ROW_BYTES)
        found = masked_load(its_codes + start // PER_BYTE, is_there)
        low_x = masked_load(its_x + start, is_real[None, :])
        if PER_BYTE == 2:
            high_x = masked_load(its_x + start + BYTES, is_real[None, :])
            if KIND == INT4:
                low, high = halves_to_numbers(found, DTYPE)
            elif KIND >= NF4:
                low, high = look_up(found, DTYPE, KIND - NF4)
            else:
                low, high = e2m1_to_numbers(found, DTYPE)
        else:
            low = codes_to_numbers(found, KIND, DTYPE)
        scale, high_scale, zero = row_zero, row_zero, row_zero
        offset = tl.full([1, 1, 1, 1], -0.0, low.dtype)
        if SCALES_CODES:
            if KIND == FP4:
                scale, high_scale = scale_pair(next_scale)
            else:
                scale = power_of_two(next_scale, DTYPE) if KIND == MXFP4 else next_scale
                high_scale = scale
            scale, high_scale = _expand(scale.to(low.dtype)), _expand(high_scale.to(low.dtype))
            if zeros is not None:
                zero = _expand((next_shift.to(tl.float32) + above).to(low.dtype))
            elif offsets is not None:
                offset = _expand(next_shift.to(low.dtype))
            column = start + STEP + piece
            next_scale, next_shift = grids_at(weight, grid_row, is_read, column, GROUP, SIZES)
        low = _to_number(low, scale, zero, offset, KIND == INT4 or zeros is not None, SCALES_CODES)
        low = _swizzle(low, SIZES)
        if SCALES_SUMS:
            sums = tl.dot(low, low_x.to(low.dtype), input_precision="ieee")
            acc += in_order(sums) * next_scale[:, None]
            following = sums_scales + (start + STEP) // GROUP
            next_scale = masked_load(scales + following, is_row & (following < sums_scales + GROUPS))
        else:
            acc = tl.dot(low, low_x.to(low.dtype), acc, input_precision="ieee")
        if PER_BYTE == 2:
            high = _to_number(high, high_scale, zero, offset, KIND == INT4, SCALES_CODES)
            acc = tl.dot(_swizzle(high, SIZES), high_x.to(low.dtype), acc, input_precision="ieee")
    if not SCALES_SUMS:
        acc = in_order(acc)
    if GROUP == 0:
        acc *= masked_load(scales + row // TILE_ROWS, is_row).to(tl.float32)[:, None]
    store_sums(acc, row, is_row, tile, operands, tokens, SIZES, False)


@triton.jit
def rows_in_halves(expert, block, SIZES):
    """
    A program's rows and whether they exist: in the order of the sums, all of the first half, then all of the
    second; and as they are read, [rows that a thread has, rows, 1].
    """
    HALF: tl.constexpr = SIZES.BLOCK_N // 2
    ROWS: tl.constexpr = 8 * SIZES.WARPS
    line = tl.arange(0, SIZES.BLOCK_N)
    row, is_row = rows_at(expert, block, line // HALF, line % HALF, SIZES)
    upper = tl.arange(0, SIZES.BLOCK_N // ROWS)[:, None, None]
    place = upper // 2 * ROWS + tl.arange(0, ROWS)[None, :, None]
    read, is_read = rows_at(expert, block, upper % 2, place, SIZES)
    return row, is_row, read, is_read


@triton.jit
def rows_at(expert, block, half, place, SIZES):
    """The weight's rows that stand at a place in one half of a program's rows, and whether they exist."""
    HALF: tl.constexpr = SIZES.BLOCK_N // 2
    if SIZES.PARTS == 2:
        row = block * HALF + place
        is_row = row < SIZES.OUT_FEATURES
        row += half * SIZES.OUT_FEATURES
    else:
        row = (block * 2 + half) * HALF + place
        is_row = row < SIZES.OUT_FEATURES
    return expert.to(tl.int64) * (SIZES.PARTS * SIZES.OUT_FEATURES) + row, is_row


@triton.jit
def grids_at(weight, row, is_row, column, GROUP, SIZES):
    """The scales of these inputs, and their zeros or offsets."""
    return load_grids(weight, row + column // GROUP, is_row & (column < SIZES.IN_FEATURES))


@triton.jit
def _expand(grid):
    """[chunks, rows that a thread has, rows, 4] -> [.., BYTES], each number repeated."""
    wide = tl.broadcast_to(
        grid[:, :, :, :, None], [grid.shape[0], grid.shape[1], grid.shape[2], 4, BYTES // 4]
    )
    return tl.reshape(wide, [grid.shape[0], grid.shape[1], grid.shape[2], BYTES])


@triton.jit
def _to_number(codes, scale, zero, offset, HAS_ZERO, IS_SCALED):
    if HAS_ZERO:
        codes = _multiply_add(zero.to(codes.dtype), tl.full([1, 1, 1, 1], -1.0, codes.dtype), codes)
    if IS_SCALED:
        codes = _multiply_add(codes, scale, offset)
    return codes


@triton.jit
def _multiply_add(x, factor, added):
    """x * factor + added in their dtype, two an instruction, which the compiler alone does not promise."""
    if IS_INTERPRETED:
        return x * factor + added
    else:
        F16: tl.constexpr = x.dtype == tl.float16
        asm: tl.constexpr = "fma.rn.f16x2 $0, $1, $2, $3;" if F16 else "fma.rn.bf16x2 $0, $1, $2, $3;"
        operands = [x, factor, added]
        return tl.inline_asm_elementwise(asm, "=r,r,r,r", operands, x.dtype, is_pure=True, pack=2)


@triton.jit
def _swizzle(codes, SIZES):
    """
    From codes as they are read to [BLOCK_N, inputs], without moving any between threads: this is how the
    matrix unit wants rows and inputs distributed over warps, lanes and registers.
    """
    CHUNKS: tl.constexpr = codes.shape[0]
    codes = tl.reshape(codes, [CHUNKS, codes.shape[1] // 2, 2, SIZES.WARPS, 8, 4, 8, 2])
    return tl.reshape(tl.permute(codes, [1, 3, 2, 4, 0, 6, 5, 7]), [SIZES.BLOCK_N, CHUNKS * BYTES])


@triton.jit
def swizzle_e4m3(first, second, SIZES):
    """
    The same for numbers in e4m3, made of codes as they are read, [rows that a thread has, rows, bytes]: each
    four bytes have become four numbers of either.
    """
    values = tl.reshape(tl.join(first, second), [first.shape[0] // 2, 2, SIZES.WARPS, 8, 4, 4, 4, 2])
    return tl.reshape(tl.permute(values, [0, 2, 1, 3, 5, 7, 4, 6]), [SIZES.BLOCK_N, 2 * first.shape[2]])


@triton.jit
def in_order(sums):
    """From the swizzled order of the rows to all of the first half, then all of the second."""
    blocks = tl.reshape(sums, [sums.shape[0] // 16, 2, 8, sums.shape[1]])
    return tl.reshape(tl.permute(blocks, [1, 0, 2, 3]), sums.shape)
