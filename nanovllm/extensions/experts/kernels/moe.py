"""The products of the experts' SwiGLU networks in a mixture of experts, for any number of tokens.

A token and one of its experts are a *pair*, numbered token * top_k + place. Pairs are sorted by expert, so
that each expert's weights are read for tiles of pairs. Which tile belongs to which expert stands in a table
on the device: the number of programs depends on sizes alone, as a CUDA graph needs it, and programs too many
end at once.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.extensions.experts.kernels.experts import (
    ExpertWeights,
    GroupedProduct,
    Groups,
    activate,
    activate_torch,
    find_tile,
)
from nanovllm.extensions.experts.kernels.moe_fp8 import (
    FP8_BLOCK_TILES,
    FP8_TILES,
    can_use_fp8_experts,
    multiply_fp8,
)
from nanovllm.extensions.experts.kernels.moe_mxfp4 import MXFP4_TILES, can_use_mxfp4, multiply_mxfp4
from nanovllm.extensions.experts.kernels.moe_quantised import (
    QUANTISED_TILES,
    arranged_width,
    can_use_quantised,
    multiply_quantised,
)
from nanovllm.extensions.experts.kernels.router import Chosen
from nanovllm.extensions.quantised.kernels.fp8_linear import QuantisedRows
from nanovllm.kernels import runtime
from nanovllm.kernels.runtime import cdiv, next_power_of_2, pdl_wait, tl, triton, use_triton

PAIRS_PER_PROGRAM = 256
# Pairs, rows of the weight and inputs a tile, warps, pipeline stages, by the most pairs that an expert has on
# average in a decode step that they are for.
DECODE_TILES = {8: (16, 128, 128, 4, 3), 16: (32, 128, 128, 4, 3), 1 << 30: (64, 128, 64, 4, 3)}
PREFILL_TILE = (128, 256, 64, 8, 4)  # one for all prefills, so that a start compiles one way only


def run_experts(
    x: Tensor,
    experts: ExpertWeights,
    chosen: Chosen,
    is_prefill: bool = True,
    rows_of_x: QuantisedRows | None = None,
) -> Tensor:
    """
    What each of the chosen experts makes of a row of x [tokens, hidden], multiplied by its weight: [tokens,
    top_k, hidden]. `rows_of_x` is x quantised already, which `can_use_fp8_experts` must allow.
    """
    if not use_triton(x):
        return run_experts_torch(x, experts, chosen)
    rows, hidden = x.shape
    num_experts, num_pairs, top_k = experts.num_experts, chosen.experts.numel(), chosen.experts.shape[1]
    multiply, tiles, width = _multiply_grouped, DECODE_TILES, experts.width
    if can_use_fp8_experts(x, experts):
        multiply, tiles = multiply_fp8, FP8_BLOCK_TILES if experts.gate_up.group else FP8_TILES
    elif can_use_mxfp4(x, experts):
        multiply, tiles = multiply_mxfp4, MXFP4_TILES
    elif can_use_quantised(x, experts):
        multiply, tiles = multiply_quantised, QUANTISED_TILES
        width = arranged_width(width)
    else:
        experts = experts.dequantised(x.dtype)
    tile = next(tile for most, tile in tiles.items() if num_pairs <= most * num_experts)
    if is_prefill:
        tile = PREFILL_TILE if tiles is DECODE_TILES else [*tiles.values()][-1]
    groups = group_by_expert(chosen.experts, num_experts, tile[0])
    gated = torch.empty(num_pairs, width, dtype=x.dtype, device=x.device)
    parts = torch.empty(rows, top_k, hidden, dtype=x.dtype, device=x.device)
    if rows:
        product = GroupedProduct(experts.gate_up_bias, groups, gated, tile, top_k, None, experts.is_clamped)
        multiply(rows_of_x or x, experts.gate_up, product)
        out = parts.view(num_pairs, hidden)
        multiply(gated, experts.down, GroupedProduct(experts.down_bias, groups, out, tile, 0, chosen.weights))
    return parts


def run_experts_torch(x: Tensor, weights: ExpertWeights, chosen: Chosen) -> Tensor:
    top_k, num_experts = chosen.experts.shape[1], weights.num_experts
    experts, shares = chosen.experts.flatten(), chosen.weights.flatten().to(x.dtype)
    parts = x.new_empty(len(experts), x.shape[1])
    counts = torch.bincount(experts, minlength=num_experts).tolist()
    biases = [
        [None] * num_experts if bias is None else bias.view(num_experts, -1)
        for bias in (weights.gate_up_bias, weights.down_bias)
    ]
    for expert, pairs in enumerate(experts.argsort(stable=True).split(counts)):
        if len(pairs):
            gate_up, down = (weights.matrix_torch(each, expert, x.dtype) for each in weights[:2])
            y = F.linear(x[pairs // top_k], gate_up, biases[0][expert])
            y = F.linear(activate_torch(y, weights.is_clamped), down, biases[1][expert])
            parts[pairs] = y * shares[pairs, None]
    return parts.view(-1, top_k, x.shape[1])


def group_by_expert(experts: Tensor, num_experts: int, block: int) -> Groups:
    """Sort the pairs of experts int32 [tokens, top_k], for tiles of `block` pairs."""
    num_pairs, device = experts.numel(), experts.device
    pairs = torch.empty(num_experts, len(experts), dtype=torch.int32, device=device)
    table = torch.empty(2, num_experts, dtype=torch.int32, device=device)
    if num_pairs:
        _group_kernel[(cdiv(num_pairs, PAIRS_PER_PROGRAM),)](
            experts, runtime.arrival_counters(device), pairs, table, num_pairs, len(experts),
            EXPERTS=num_experts, EXPERTS_PAD=next_power_of_2(num_experts),
            TILE=block, BLOCK=PAIRS_PER_PROGRAM, num_warps=4, **runtime.overlap_options(device),
        )  # fmt: skip
    return Groups(pairs, table, max_tiles(num_pairs, num_experts, block))


def max_tiles(num_pairs: int, num_experts: int, block: int) -> int:
    """The most tiles of `block` pairs that there can be: each expert may have one that is not full."""
    return (num_pairs + min(num_experts, num_pairs) * (block - 1)) // block


@triton.jit(do_not_specialize=["num_pairs", "rows"])
def _group_kernel(
    experts, counters, pairs, table, num_pairs, rows,
    EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Counts with a counter for each expert; the last program writes the table and clears the counters."""
    pdl_wait(OVERLAP)
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_real = pair < num_pairs
    expert = tl.load(experts + pair, mask=is_real, other=0)
    # Relaxed, so that all are under way at once: the counter of programs brings order.
    place = tl.atomic_add(counters + expert, 1, mask=is_real, sem="relaxed")
    tl.store(pairs + expert.to(tl.int64) * rows + place, pair, mask=is_real)
    tl.debug_barrier()  # all threads have counted before the last counter says so
    num_before = tl.atomic_add(counters + EXPERTS, 1)
    if num_before == tl.num_programs(0) - 1:
        each = tl.arange(0, EXPERTS_PAD)
        is_expert = each < EXPERTS
        counts = tl.load(counters + each, mask=is_expert, other=0, cache_modifier=".cg")
        tl.store(counters + each, 0, mask=is_expert)
        tl.store(counters + EXPERTS, 0)
        tl.store(table + each, counts, mask=is_expert)
        tl.store(table + EXPERTS + each, tl.cumsum(tl.cdiv(counts, TILE), 0), mask=is_expert)


def _multiply_grouped(x: Tensor, weight: Tensor, product: GroupedProduct) -> None:
    _, lines, block_k, num_warps, num_stages = product.tile
    if x.element_size() == 4:
        block_k //= 2
    if not runtime.has_hopper_shared_memory(x.device):
        block_k //= 2
    product.launch(
        _grouped_kernel, lines, x, weight, numbers=[x.stride(0)],
        IN_FEATURES=weight.shape[1], OUT_FEATURES=product.out.shape[1],
        BLOCK_N=lines // product.parts, BLOCK_K=block_k, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _grouped_kernel(
    x, weight, bias, pairs, table, weights, out, x_stride, rows,
    EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, PAIRS_PER_ROW: tl.constexpr, PARTS: tl.constexpr,
    CLAMPED: tl.constexpr, IN_FEATURES: tl.constexpr, OUT_FEATURES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program computes BLOCK_N outputs of a tile of pairs."""
    BLOCKS: tl.constexpr = (OUT_FEATURES + BLOCK_N - 1) // BLOCK_N
    block_n, expert, pair, is_real = find_tile(
        pairs, table, rows, BLOCKS, EXPERTS, EXPERTS_PAD, BLOCK_M, OVERLAP
    )
    if expert == EXPERTS:
        return
    # Gates and ups in turn, so that the two of a pair stand side by side in the result.
    line = tl.arange(0, BLOCK_N * PARTS)
    weight_row = block_n * BLOCK_N + line // PARTS
    is_line = weight_row < OUT_FEATURES
    weight_row += (line % PARTS) * OUT_FEATURES
    column = tl.arange(0, BLOCK_K)
    x_address = x + (pair // PAIRS_PER_ROW)[:, None] * x_stride + column[None, :]
    its_lines = expert.to(tl.int64) * (PARTS * OUT_FEATURES)
    weight += its_lines * IN_FEATURES
    weight_address = weight + weight_row[None, :] * IN_FEATURES + column[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N * PARTS], tl.float32)
    for start in range(0, IN_FEATURES, BLOCK_K):
        present = start + column < IN_FEATURES
        x_tile = tl.load(x_address + start, mask=is_real[:, None] & present[None, :], other=0.0)
        weight_tile = tl.load(weight_address + start, mask=present[:, None] & is_line[None, :], other=0.0)
        acc = tl.dot(x_tile, weight_tile, acc, input_precision="ieee")
    if bias is not None:
        acc += tl.load(bias + its_lines + weight_row, mask=is_line, other=0.0).to(tl.float32)[None, :]
    if PARTS == 2:
        gate, up = tl.split(tl.reshape(acc, [BLOCK_M, BLOCK_N, 2]))
        acc = activate(gate, up, CLAMPED)
    if weights is not None:
        acc *= tl.load(weights + pair, mask=is_real, other=0.0)[:, None]
    column_out = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = is_real[:, None] & (column_out < OUT_FEATURES)[None, :]
    tl.store(out + pair[:, None] * OUT_FEATURES + column_out[None, :], acc, mask=valid)
