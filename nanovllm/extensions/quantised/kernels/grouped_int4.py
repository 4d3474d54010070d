"""Products of int4 weights with inputs rounded to 8 bits, in 8-bit floating point on Hopper GPUs.

As grouped_codes.py, but codes need no conversion: an integer below 16 in the low bits of a byte is, as e4m3,
that integer times 2^-9. What it stands for is (code - zero) * scale. A scale is for a multiple of GROUP
inputs and applied to the sum of GROUP products; what zeros take off is a product of its own, of the zeros'
scales and the sums of as many inputs, which is small.
"""

import torch
from torch import Tensor

from nanovllm.extensions.quantised.kernels.fp8_linear import GROUP, QuantisedRows, quantise
from nanovllm.extensions.quantised.kernels.gpu import gpu_supports
from nanovllm.extensions.quantised.kernels.grouped_codes import (
    in_order,
    rows_at,
    rows_in_halves,
    with_splits,
)
from nanovllm.extensions.quantised.kernels.grouped_gemm import (
    GroupedProduct,
    Tile,
    find_tile,
    parts_of_sums,
    store_part,
    store_tile,
    sum_of_parts,
)
from nanovllm.extensions.quantised.kernels.quantised_weight import INT4, QuantisedWeight
from nanovllm.kernels.runtime import (
    IS_INTERPRETED,
    gpu_properties,
    masked_load,
    num_multiprocessors,
    tl,
    triton,
)

UNIT = tl.constexpr(2.0**-9)  # what an integer's bits are worth as e4m3
SUMS = tl.constexpr(32)  # of inputs, that meet zeros at once
# By the most rows, or those that an expert has on average; GROUP inputs at a time.
INT4_TILES = {
    20: Tile(16, 4, BLOCK_N=64),
    48: Tile(32, 4, BLOCK_N=64),
    80: Tile(64, 4, BLOCK_N=64),
    1 << 30: Tile(128, 4, BLOCK_N=64),
}
PROGRAMS = 2  # that a multiprocessor gets, if inputs have to be shared


def can_round_inputs(weight: QuantisedWeight, dtype: torch.dtype) -> bool:
    """Whether `multiply_int4` takes this weight and inputs of this dtype."""
    device = weight.codes.device
    properties = gpu_properties(device)
    is_hopper = gpu_supports(device, 9, 0) and properties.major == 9
    is_int4 = weight.kind == INT4 and weight.tile[0] == 1 and weight.offsets is None
    has_whole_groups = weight.group % GROUP == weight.shape[1] % GROUP == 0
    return is_hopper and dtype.itemsize == 2 and is_int4 and has_whole_groups


def linear_int4(x: QuantisedRows, weight: QuantisedWeight, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias: [rows, out], for permuted rows."""
    out = torch.empty(x.rows, weight.shape[0], dtype=x.dtype, device=x.codes.device)
    multiply_int4(x, weight, GroupedProduct(bias, None, out, linear_tile(x.rows, weight, out.device)))
    return out


def linear_tile(rows: int, weight: QuantisedWeight, device: torch.device) -> Tile:
    """As grouped_codes.py's."""
    tile = next(tile for most, tile in INT4_TILES.items() if rows <= most)
    return with_splits(tile, rows, weight.shape, PROGRAMS * num_multiprocessors(device))


def multiply_int4(x: Tensor | QuantisedRows, weight: QuantisedWeight, product: GroupedProduct) -> None:
    """With x as `quantise` permutes it, or to be quantised."""
    x = x if isinstance(x, QuantisedRows) else quantise(x, 0, weight.codes_per_byte)
    inputs = x.codes, x.scales, x.sums, len(x.codes), weight.tensors(torch.uint8)[:3]
    constants = {"GROUP": weight.group or weight.shape[1], "ZERO_POINT": weight.zero_point}
    product.launch(_grouped_int4_kernel, weight, inputs, constants)


@triton.jit(do_not_specialize=["tokens"])
def _grouped_int4_kernel(
    x,
    x_scales,
    x_sums,
    padded_rows,
    weight,
    operands,
    tokens,
    GROUP: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    SIZES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program's rows are in halves, as grouped_codes.py has them."""
    tile = find_tile(operands, tokens, SIZES, OVERLAP)
    block, expert, assignment, is_real = tile
    if expert == SIZES.EXPERTS:
        return
    codes, scales, zeros = weight
    token = assignment // SIZES.TOP_K
    STEP: tl.constexpr = SIZES.BLOCK_K
    STEPS: tl.constexpr = SIZES.IN_FEATURES // (STEP * SIZES.SPLITS)
    begin = tl.program_id(1) * STEPS
    row, is_row, read, is_read = rows_in_halves(expert, block, SIZES)
    its_codes = codes + read * (SIZES.IN_FEATURES // 2) + tl.arange(0, STEP // 2)[None, None, :]
    its_x = x + token[None, :] * SIZES.IN_FEATURES + tl.arange(0, STEP)[:, None]
    # Sums come in the swizzled order of rows.
    line = tl.arange(0, SIZES.BLOCK_N)
    swizzled, is_swizzled = rows_at(expert, block, line // 8 % 2, line // 16 * 8 + line % 8, SIZES)
    grid_row = swizzled * (SIZES.IN_FEATURES // GROUP)

    acc = tl.full([SIZES.BLOCK_N, SIZES.BLOCK_M], 0.0, tl.float32)
    for start in range(0, STEPS, SUMS):
        step = start + tl.arange(0, SUMS)
        place = grid_row[:, None] + (begin + step)[None, :] * STEP // GROUP
        is_there = is_swizzled[:, None] & (step < STEPS)[None, :]
        zero = masked_load(scales + place, is_there).to(tl.float32)
        zero *= ZERO_POINT if zeros is None else masked_load(zeros + place, is_there).to(tl.float32)
        its_sums = x_sums + (begin + step)[:, None] * padded_rows + token[None, :]
        x_sum = masked_load(its_sums, (step < STEPS)[:, None] & is_real[None, :])
        # These sums are large and mostly cancel, so tf32 alone would leave errors of 1% of what is left.
        acc = tl.dot(zero * -UNIT, x_sum, acc, input_precision="tf32x3")
    for step in tl.range(begin, begin + STEPS, num_stages=SIZES.STAGES):
        found = masked_load(its_codes + step * (STEP // 2), is_read)
        x_tile = masked_load(its_x + step * STEP, is_real[None, :])
        scale = masked_load(scales + grid_row + step * STEP // GROUP, is_swizzled).to(tl.float32)
        low, high = _halves_as_e4m3(found)
        # As in grouped_codes.py, this is how the matrix unit wants rows and inputs distributed.
        values = tl.reshape(tl.join(low, high), [read.shape[0] // 2, 2, SIZES.WARPS, 8, 4, 4, 4, 2])
        values = tl.reshape(tl.permute(values, [0, 2, 1, 3, 5, 7, 4, 6]), [SIZES.BLOCK_N, STEP])
        acc += tl.dot(values, x_tile) * scale[:, None]
    acc = in_order(acc) * (masked_load(x_scales + token, is_real)[None, :] / UNIT)
    if SIZES.SPLITS > 1:
        its_sums, is_sum, size = parts_of_sums(row, is_row, tile, operands, tokens, SIZES)
        if store_part(acc, its_sums, is_sum, size, operands) < SIZES.SPLITS - 1:
            return
        acc = sum_of_parts(its_sums, is_sum, size, operands, SIZES)
    store_tile(acc, row, is_row, tile, operands, SIZES, 0, False)


@triton.jit
def _halves_as_e4m3(packed):
    """uint8 -> two tensors of its shape: the codes in the low, and in the high halves, times UNIT."""
    if IS_INTERPRETED:
        low, high = (packed & 15).to(tl.float32) * UNIT, (packed >> 4).to(tl.float32) * UNIT
        return low.to(tl.float8e4nv), high.to(tl.float8e4nv)
    return tl.inline_asm_elementwise(
        """{
        and.b32 $0, $2, 0x0f0f0f0f;
        shr.b32 $1, $2, 4;
        and.b32 $1, $1, 0x0f0f0f0f;
        }""",
        "=&r,=&r,r",
        [packed],
        dtype=(tl.float8e4nv, tl.float8e4nv),
        is_pure=True,
        pack=4,
    )
