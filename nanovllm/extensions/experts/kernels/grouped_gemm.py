"""The grouped GEMMs of experts whose weights are multiplied as they are: dense ones, and codes of 8 bits in
floating point, for which tokens are quantised as the weights are.

What they share with the kernels of codes is in `extensions/quantised/kernels/grouped_gemm.py`.
"""

from torch import Tensor

from nanovllm.extensions.quantised.kernels.fp8_linear import QuantisedRows, quantise
from nanovllm.extensions.quantised.kernels.grouped_gemm import (
    GroupedProduct,
    Tile,
    fewer_stages,
    find_tile,
    rows_in_turn,
    store_tile,
)
from nanovllm.extensions.quantised.kernels.quantised_weight import QuantisedWeight, dequantise
from nanovllm.kernels import runtime
from nanovllm.kernels.runtime import masked_load, tl, triton

# By the most assignments that an expert has on average. A prefill takes the last one, whatever its rows, so
# that a start compiles one way only.
DENSE_TILES = {
    8: Tile(16, 3),
    16: Tile(32, 3),
    1 << 30: Tile(64, 3, BLOCK_K=64),
    1 << 31: Tile(128, 4, BLOCK_N=256, BLOCK_K=64, WARPS=8),  # for prefills alone
}
FP8_TILES = {
    8: Tile(16, 4, BLOCK_N=64),
    24: Tile(32, 3),
    48: Tile(64, 4),
    1 << 30: Tile(256, 3, WARPS=8),
}
# Scales of blocks are applied to sums besides, for which larger tiles leave no registers.
FP8_BLOCK_TILES = {**FP8_TILES, 8: Tile(16, 3), 1 << 30: Tile(64, 4)}


def multiply_dense(x: Tensor, weight: Tensor | QuantisedWeight, product: GroupedProduct) -> None:
    """A weight that is not dense is converted first."""
    weight = dequantise(weight, x.dtype) if isinstance(weight, QuantisedWeight) else weight
    block_k = product.tile.BLOCK_K
    if x.element_size() == 4:
        block_k //= 2
    if not runtime.has_hopper_shared_memory(x.device):
        block_k //= 2
    product.launch(_grouped_kernel, weight, (x, weight, x.stride(0)), BLOCK_K=block_k)


@triton.jit(do_not_specialize=["tokens"])
def _grouped_kernel(x, weight, x_stride, operands, tokens, SIZES: tl.constexpr, OVERLAP: tl.constexpr):
    """The assignments are the rows: the matrix unit has as many of them as of the weight's."""
    tile = find_tile(operands, tokens, SIZES, OVERLAP)
    block, expert, assignment, is_real = tile
    if expert == SIZES.EXPERTS:
        return
    row, is_row = rows_in_turn(0, block, SIZES)
    first_row = expert.to(tl.int64) * (SIZES.PARTS * SIZES.OUT_FEATURES)
    column = tl.arange(0, SIZES.BLOCK_K)
    its_x = x + (assignment // SIZES.TOP_K)[:, None] * x_stride + column[None, :]
    its_weight = weight + first_row * SIZES.IN_FEATURES
    its_weight = its_weight + row[None, :] * SIZES.IN_FEATURES + column[:, None]
    acc = tl.full([SIZES.BLOCK_M, SIZES.BLOCK_N], 0.0, tl.float32)
    for start in range(0, SIZES.IN_FEATURES, SIZES.BLOCK_K):
        present = start + column < SIZES.IN_FEATURES
        x_tile = masked_load(its_x + start, is_real[:, None] & present[None, :])
        weight_tile = masked_load(its_weight + start, present[:, None] & is_row[None, :])
        acc = tl.dot(x_tile, weight_tile, acc, input_precision="ieee")
    store_tile(acc, first_row + row, is_row, tile, operands, SIZES, 1, True)


def multiply_fp8(x: Tensor | QuantisedRows, weight: QuantisedWeight, product: GroupedProduct) -> None:
    """x is quantised if it is not yet."""
    x = x if isinstance(x, QuantisedRows) else quantise(x, weight.group)
    inputs = x.codes, x.scales, weight.codes, weight.scales, len(x.codes)
    constants = {"GROUP": weight.group, "TILE_ROWS": weight.tile[0]}
    product.launch(_grouped_fp8_kernel, weight, inputs, constants, **fewer_stages(x.codes.device))


@triton.jit(do_not_specialize=["padded_rows", "tokens"])
def _grouped_fp8_kernel(
    x,
    x_scales,
    codes,
    scales,
    padded_rows,
    operands,
    tokens,
    GROUP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    SIZES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """
    The weight's rows are the rows: of these there are always enough, while an expert has few tokens in a
    decode step.
    """
    tile = find_tile(operands, tokens, SIZES, OVERLAP)
    block, expert, assignment, is_real = tile
    if expert == SIZES.EXPERTS:
        return
    token = assignment // SIZES.TOP_K
    row, is_row = rows_in_turn(expert.to(tl.int64) * (SIZES.PARTS * SIZES.OUT_FEATURES), block, SIZES)
    column = tl.arange(0, SIZES.BLOCK_K)
    its_codes = codes + row[:, None] * SIZES.IN_FEATURES + column[None, :]
    its_x = x + token[None, :] * SIZES.IN_FEATURES + column[:, None]
    GROUPS: tl.constexpr = SIZES.IN_FEATURES // GROUP if GROUP > 0 else 1  # of a row
    its_scales = scales + row // TILE_ROWS * GROUPS
    acc = tl.full([SIZES.BLOCK_N, SIZES.BLOCK_M], 0.0, tl.float32)
    for start in range(0, SIZES.IN_FEATURES, SIZES.BLOCK_K):
        present = start + column < SIZES.IN_FEATURES
        code_tile = masked_load(its_codes + start, is_row[:, None] & present[None, :])
        x_tile = masked_load(its_x + start, present[:, None] & is_real[None, :])
        if GROUP > 0:
            group = start // GROUP
            scale = masked_load(its_scales + group, is_row).to(tl.float32)
            x_scale = masked_load(x_scales + group.to(tl.int64) * padded_rows + token, is_real)
            acc += tl.dot(code_tile, x_tile) * scale[:, None] * x_scale[None, :]
        else:
            acc = tl.dot(code_tile, x_tile, acc)
    if GROUP == 0:
        scale = masked_load(its_scales, is_row).to(tl.float32)
        acc *= scale[:, None] * masked_load(x_scales + token, is_real)[None, :]
    store_tile(acc, row, is_row, tile, operands, SIZES, 0, True)
