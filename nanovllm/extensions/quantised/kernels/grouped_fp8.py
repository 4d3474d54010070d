"""Grouped GEMM of weights in 8-bit floating point, for rows that are quantised as the weight is.

Layers without experts are multiplied so up to MAX_LINEAR_ROWS rows. torch's library is as fast alone, but it
starts when its rows are quantised and keeps what follows from starting, which costs 3 us a product.
"""

import torch
from torch import Tensor

from nanovllm.extensions.quantised.kernels.fp8_linear import QuantisedRows, quantise
from nanovllm.extensions.quantised.kernels.grouped_gemm import (
    GroupedProduct,
    Tile,
    fewer_stages,
    find_tile,
    rows_in_turn,
    store_sums,
    with_splits,
)
from nanovllm.extensions.quantised.kernels.quantised_weight import QuantisedWeight
from nanovllm.kernels.runtime import has_hopper_shared_memory, masked_load, num_multiprocessors, tl, triton

# By the most assignments that an expert has on average. A prefill takes the last one, whatever its rows, so
# that a start compiles one way only.
FP8_TILES = {
    8: Tile(16, 4, BLOCK_N=64),
    24: Tile(32, 3, BLOCK_N=64),
    48: Tile(64, 4),
    1 << 30: Tile(128, 3),
}
# Scales of blocks are applied to sums besides, for which larger tiles leave no registers.
FP8_BLOCK_TILES = {**FP8_TILES, 8: Tile(16, 3), 24: Tile(32, 3), 1 << 30: Tile(64, 4)}
# Of layers without experts, by the most rows. With a scale for each block, BLOCK_K is a block's inputs.
LINEAR_TILES = {
    16: Tile(16, 6, BLOCK_N=64, BLOCK_K=256),
    32: Tile(32, 5, BLOCK_N=64, BLOCK_K=256),
    64: Tile(64, 4, BLOCK_N=64, BLOCK_K=256),
}
MAX_LINEAR_ROWS = 64
# Programs that a multiprocessor gets, if inputs have to be shared. With scales of blocks each step waits for
# its sums, so there are more.
PROGRAMS, BLOCK_PROGRAMS = 1, 3
# Inputs whose weights a program loads before it waits for the kernel that quantises its rows, up to so many
# rows. With scales of blocks their sums would have to be scaled one by one.
EARLY_INPUTS, MAX_EARLY_ROWS = 1024, 32


def linear_fp8(
    x: QuantisedRows, weight: QuantisedWeight, bias: Tensor | None = None, gated: bool = False
) -> Tensor:
    """
    x @ weight.T + bias: [rows, out]. If `gated`, the first half of the outputs are gates, the second half is
    what they multiply, and the result is silu(gate) * up: [rows, out / 2].
    """
    out_features = weight.shape[0] // (1 + gated)
    out = x.codes.new_empty(x.rows, out_features, dtype=x.dtype)
    tile = linear_tile(x.rows, weight, out.device)
    if gated:  # by the program that has summed up a gate and what it multiplies
        tile = tile._replace(SPLITS=1)
    multiply_fp8(x, weight, GroupedProduct(bias, None, out, tile, top_k=int(gated)))
    return out


def linear_tile(rows: int, weight: QuantisedWeight, device: torch.device) -> Tile:
    """What a program of `linear_fp8` multiplies, and how many share the inputs of a tile."""
    tile = next(tile for most, tile in LINEAR_TILES.items() if rows <= most)
    programs = PROGRAMS
    if weight.group:
        tile, programs = tile._replace(BLOCK_K=weight.group), BLOCK_PROGRAMS
    return with_splits(tile, rows, weight.shape, programs * num_multiprocessors(device))


def multiply_fp8(x: Tensor | QuantisedRows, weight: QuantisedWeight, product: GroupedProduct) -> None:
    """x is quantised if it is not yet."""
    x = x if isinstance(x, QuantisedRows) else quantise(x, weight.group)
    inputs = x.codes, x.scales, weight.codes, weight.scales, len(x.codes)
    early = EARLY_INPUTS if can_load_early(weight, product) else 0
    constants = {"GROUP": weight.group, "TILE_ROWS": weight.tile[0], "EARLY": early}
    product.launch(_grouped_fp8_kernel, weight, inputs, constants, **fewer_stages(x.codes.device))


def can_load_early(weight: QuantisedWeight, product: GroupedProduct) -> bool:
    """Not of experts, which the kernels before choose, and not where there is little shared memory."""
    tile = product.tile
    is_long = weight.shape[1] // tile.SPLITS >= EARLY_INPUTS
    is_known = product.sorted is None and has_hopper_shared_memory(product.out.device)
    return is_long and is_known and not weight.group and tile.BLOCK_M <= MAX_EARLY_ROWS


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
    EARLY: tl.constexpr,
    SIZES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """
    The weight's rows are the rows: of these there are always enough, while an expert has few tokens in a
    decode step. The codes of the first EARLY inputs are loaded first and multiplied last.
    """
    OWN_FEATURES: tl.constexpr = SIZES.IN_FEATURES // SIZES.SPLITS  # of this program
    first = tl.program_id(1) * OWN_FEATURES
    if EARLY > 0:
        early = first + tl.arange(0, EARLY)
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()  # which wait for all of this, and load their weights, too
        row, is_row = rows_in_turn(tl.zeros([], tl.int64), tl.program_id(0) % SIZES.BLOCKS, SIZES)
        early_codes = masked_load(codes + row[:, None] * SIZES.IN_FEATURES + early[None, :], is_row[:, None])
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
    if EARLY > 0:
        early_x = masked_load(x + token[None, :] * SIZES.IN_FEATURES + early[:, None], is_real[None, :])
    for start in range(first + EARLY, first + OWN_FEATURES, SIZES.BLOCK_K):
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
    if EARLY > 0:
        acc = tl.dot(early_codes, early_x, acc)
    if GROUP == 0:
        scale = masked_load(its_scales, is_row).to(tl.float32)
        acc *= scale[:, None] * masked_load(x_scales + token, is_real)[None, :]
    store_sums(acc, row, is_row, tile, operands, tokens, SIZES, True)
