"""Products of int4 weights with inputs rounded to 8 bits, in 8-bit floating point on Hopper GPUs.

As grouped_codes.py, but codes need no conversion: an integer below 16 in the low bits of a byte is, as e4m3,
that integer times 2^-9. What it stands for is (code - zero) * scale. A scale is for a multiple of GROUP
inputs and applied to the sum of GROUP products, from which zero times the sum of as many inputs is taken off.
"""

import torch
from torch import Tensor

from nanovllm.extensions.quantised.kernels.fp8_linear import GROUP, QuantisedRows, quantise
from nanovllm.extensions.quantised.kernels.gpu import gpu_supports
from nanovllm.extensions.quantised.kernels.grouped_codes import (
    grids_at,
    in_order,
    rows_at,
    rows_in_halves,
    swizzle_e4m3,
)
from nanovllm.extensions.quantised.kernels.grouped_gemm import (
    GroupedProduct,
    Tile,
    find_tile,
    store_sums,
    with_splits,
)
from nanovllm.extensions.quantised.kernels.quantised_weight import INT4, QuantisedWeight, dequantise
from nanovllm.kernels.runtime import (
    IS_INTERPRETED,
    gpu_properties,
    masked_load,
    num_multiprocessors,
    tl,
    triton,
)

UNIT = tl.constexpr(2.0**-9)  # what an integer's bits are worth as e4m3
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


def in_fp8(weight: QuantisedWeight) -> QuantisedWeight:
    """The same numbers with codes in e4m3, which are (code - zero), and scales of GROUP inputs."""
    codes = dequantise(weight._replace(scales=torch.ones_like(weight.scales)), torch.float8_e4m3fn)
    repeats = weight.shape[1] // GROUP // weight.scales.shape[1]
    scales = weight.scales.float().repeat_interleave(repeats, 1).t().contiguous().t()
    return QuantisedWeight(codes, weight.shape, scales, (1, GROUP))


def linear_tile(rows: int, weight: QuantisedWeight, device: torch.device) -> Tile:
    """As grouped_codes.py's."""
    tile = next(tile for most, tile in INT4_TILES.items() if rows <= most)
    return with_splits(tile, rows, weight.shape, PROGRAMS * num_multiprocessors(device))


def multiply_int4(x: Tensor | QuantisedRows, weight: QuantisedWeight, product: GroupedProduct) -> None:
    """With x as `quantise` permutes it, or to be quantised."""
    x = x if isinstance(x, QuantisedRows) else quantise(x, 0, weight.codes_per_byte)
    inputs = x.codes, x.scales, x.sums, len(x.codes), weight.tensors(torch.uint8)
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
    codes, _, zeros, _ = weight
    token = assignment // SIZES.TOP_K
    STEP: tl.constexpr = SIZES.BLOCK_K
    STEPS: tl.constexpr = SIZES.IN_FEATURES // (STEP * SIZES.SPLITS)
    begin = tl.program_id(1) * STEPS
    row, is_row, read, is_read = rows_in_halves(expert, block, SIZES)
    its_codes = codes + read * (SIZES.IN_FEATURES // 2) + tl.arange(0, STEP // 2)[None, None, :]
    its_x = x + token[None, :] * SIZES.IN_FEATURES + tl.arange(0, STEP)[:, None]
    x_sums += tl.where(is_real, token, 0)
    # Sums come in the swizzled order of rows.
    line = tl.arange(0, SIZES.BLOCK_N)
    swizzled, is_swizzled = rows_at(expert, block, line // 8 % 2, line // 16 * 8 + line % 8, SIZES)
    grid_row = swizzled * (SIZES.IN_FEATURES // GROUP)

    # The first input of a step; all rows have the same, but grids are read with a tensor.
    column = tl.zeros([1], tl.int32) + begin * STEP
    next_scale, next_zero = grids_at(weight, grid_row, is_swizzled, column, GROUP, SIZES)
    acc = tl.full([SIZES.BLOCK_N, SIZES.BLOCK_M], 0.0, tl.float32)
    for i in tl.range(0, STEPS, num_stages=SIZES.STAGES):
        step = begin + i
        found = masked_load(its_codes + step * (STEP // 2), is_read)
        x_tile = masked_load(its_x + step * STEP, is_real[None, :])
        # Scales are asked for a step ahead, as in grouped_codes.py.
        scale, zero = next_scale.to(tl.float32), next_zero.to(tl.float32)
        column += STEP
        next_scale, next_zero = grids_at(weight, grid_row, is_swizzled, column, GROUP, SIZES)
        x_sum = tl.load(x_sums + step * padded_rows)
        low, high = _halves_as_e4m3(found)
        values = swizzle_e4m3(low, high, SIZES)
        taken_off = x_sum[None, :] * ((ZERO_POINT if zeros is None else zero[:, None]) * UNIT)
        acc += (tl.dot(values, x_tile) - taken_off) * scale[:, None]
    acc = in_order(acc) * (masked_load(x_scales + token, is_real)[None, :] / UNIT)
    store_sums(acc, row, is_row, tile, operands, tokens, SIZES, False)


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
