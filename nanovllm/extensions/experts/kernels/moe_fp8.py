"""The grouped products of experts in 8-bit floating point: tokens are quantised as the weights are.

The matrix unit takes codes of 8 bits as they are, so nothing is converted. The weight's rows are its rows: of
these there are always enough, while an expert has few tokens in a decode step.
"""

import torch
from torch import Tensor

from nanovllm.extensions.experts.kernels.experts import ExpertWeights, GroupedProduct, activate, find_tile
from nanovllm.extensions.quantised.kernels.fp8_linear import GROUP, QuantisedRows, quantise
from nanovllm.extensions.quantised.kernels.gpu import gpu_supports
from nanovllm.extensions.quantised.kernels.quantised_weight import QuantisedWeight
from nanovllm.kernels import runtime
from nanovllm.kernels.runtime import tl, triton, use_triton

# Pairs and rows of the weight a tile, warps, pipeline stages, by the most pairs that an expert has on
# average. Scales of blocks are applied to sums besides, for which larger tiles leave no registers.
FP8_TILES = {8: (16, 64, 4, 4), 24: (32, 128, 4, 3), 48: (64, 128, 4, 4), 1 << 30: (256, 128, 8, 3)}
FP8_BLOCK_TILES = {**FP8_TILES, 8: (16, 128, 4, 3), 1 << 30: (64, 128, 4, 4)}
BLOCK_K = 128  # inputs of a tile


def can_use_fp8_experts(x: Tensor, experts: ExpertWeights) -> bool:
    """Whether rows like x [rows, features] can be quantised and multiplied by these experts."""
    is_possible = use_triton(x) and gpu_supports(x.device, 8, 9)
    return is_possible and x.dtype == torch.bfloat16 and experts.are_all(_is_multiplied)


def _is_multiplied(weight: QuantisedWeight) -> bool:
    in_blocks = weight.tile == (GROUP, GROUP) and weight.shape[1] % GROUP == 0
    return weight.is_fp8 and weight.shape[1] % 16 == 0 and (weight.group == 0 or in_blocks)


def multiply_fp8(x: Tensor | QuantisedRows, weight: QuantisedWeight, product: GroupedProduct) -> None:
    """x is quantised if it is not yet."""
    x = x if isinstance(x, QuantisedRows) else quantise(x, weight.group)
    _, lines, num_warps, num_stages = product.tile
    if not runtime.has_hopper_shared_memory(x.codes.device):
        num_stages = 2
    product.launch(
        _grouped_fp8_kernel, lines, x.codes, x.scales, weight.codes, weight.scales,
        numbers=[len(x.codes)], GROUP=weight.group, TILE_ROWS=weight.tile[0],
        IN_FEATURES=weight.shape[1], OUT_FEATURES=product.out.shape[1],
        LINES=lines, BLOCK_K=BLOCK_K, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["padded_rows", "rows"])
def _grouped_fp8_kernel(
    x, x_scales, codes, scales, bias, pairs, table, weights, out, padded_rows, rows,
    GROUP: tl.constexpr, TILE_ROWS: tl.constexpr,
    EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr, PARTS: tl.constexpr, CLAMPED: tl.constexpr,
    IN_FEATURES: tl.constexpr, OUT_FEATURES: tl.constexpr,
    BLOCK_M: tl.constexpr, LINES: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program multiplies LINES rows of an expert's weight, gates and ups in turn, with a tile of pairs."""
    BLOCKS: tl.constexpr = (PARTS * OUT_FEATURES + LINES - 1) // LINES
    block, expert, pair, is_real = find_tile(
        pairs, table, rows, BLOCKS, EXPERTS, EXPERTS_PAD, BLOCK_M, OVERLAP
    )
    if expert == EXPERTS:
        return
    token = pair // PAIRS_PER_ROW
    line = tl.arange(0, LINES)
    place = block * (LINES // PARTS) + line // PARTS
    is_line = place < OUT_FEATURES
    weight_row = expert.to(tl.int64) * (PARTS * OUT_FEATURES) + (line % PARTS) * OUT_FEATURES + place
    column = tl.arange(0, BLOCK_K)
    code_address = codes + weight_row[:, None] * IN_FEATURES + column[None, :]
    x_address = x + token[None, :] * IN_FEATURES + column[:, None]
    GROUPS: tl.constexpr = IN_FEATURES // GROUP if GROUP > 0 else 1  # of a row
    scale_address = scales + weight_row // TILE_ROWS * GROUPS
    acc = tl.zeros([LINES, BLOCK_M], tl.float32)
    for start in range(0, IN_FEATURES, BLOCK_K):
        present = start + column < IN_FEATURES
        code_tile = tl.load(code_address + start, mask=is_line[:, None] & present[None, :], other=0.0)
        x_tile = tl.load(x_address + start, mask=present[:, None] & is_real[None, :], other=0.0)
        if GROUP > 0:
            group = start // GROUP
            scale = tl.load(scale_address + group, mask=is_line, other=0.0).to(tl.float32)
            x_scale = tl.load(x_scales + group.to(tl.int64) * padded_rows + token, mask=is_real, other=0.0)
            acc += tl.dot(code_tile, x_tile) * scale[:, None] * x_scale[None, :]
        else:
            acc = tl.dot(code_tile, x_tile, acc)
    if GROUP == 0:
        scale = tl.load(scale_address, mask=is_line, other=0.0).to(tl.float32)
        acc *= scale[:, None] * tl.load(x_scales + token, mask=is_real, other=0.0)[None, :]
    if bias is not None:
        acc += tl.load(bias + weight_row, mask=is_line, other=0.0).to(tl.float32)[:, None]
    if PARTS == 2:
        gate, up = tl.split(tl.permute(tl.reshape(acc, [LINES // 2, 2, BLOCK_M]), [0, 2, 1]))
        acc = activate(gate, up, CLAMPED)
    if weights is not None:
        acc *= tl.load(weights + pair, mask=is_real, other=0.0)[None, :]
    out_row = block * (LINES // PARTS) + tl.arange(0, LINES // PARTS)
    valid = is_real[None, :] & (out_row < OUT_FEATURES)[:, None]
    tl.store(out + pair[None, :] * OUT_FEATURES + out_row[:, None], acc, mask=valid)
