"""Products of a quantised weight and some to some hundred rows: codes become bfloat16 in registers.

The weight's rows are the rows of the matrix unit's tiles, so that a few rows of x waste little of it. Where
an output has too few tiles to fill the GPU, several programs share the inputs of a tile, and the last one to
arrive adds up their sums.

Measured on an H200 with the four matrices of a layer of Qwen3-8B's shape and groups of 32 inputs, in
microseconds, and by the library in bfloat16: 4 rows 80 (115), 16 rows 93 (115), 64 rows 171 (116). It takes
more instructions than the reading of 4 bits leaves time for.
"""

import torch
from torch import Tensor

from nanovllm.extensions.quantised.kernels.gpu import gpu_supports
from nanovllm.extensions.quantised.kernels.nf4 import look_up
from nanovllm.extensions.quantised.kernels.quantised_weight import (
    INT4,
    NF4,
    QuantisedWeight,
    codes_to_bf16,
    halves_to_bf16,
    input_of,
)
from nanovllm.kernels import runtime
from nanovllm.kernels.runtime import (
    cdiv,
    masked_load,
    next_power_of_2,
    num_multiprocessors,
    pdl_wait,
    tl,
    triton,
    use_triton,
)

MAX_ROWS = 128  # for more, converting the weight first is faster: 8,540 tok/s of 256 sequences, and 8,130
# Outputs and inputs of a tile, warps, pipeline stages, and programs for each multiprocessor if inputs have to
# be shared, by the most rows that it is for.
TILES = {
    16: (64, 256, 4, 3, 3),
    64: (128, 256, 8, 2, 1),
    MAX_ROWS: (128, 128, 8, 3, 1),
}


def can_use_quantised_linear(x: Tensor, weight: QuantisedWeight) -> bool:
    """Whether `quantised_linear` works for these rows [rows, features]."""
    group = weight.group
    fits = group & (group - 1) == 0
    is_possible = use_triton(x) and x.dtype == torch.bfloat16 and weight.can_be_read()
    # Earlier GPUs do not compute in bfloat16.
    return is_possible and fits and gpu_supports(x.device, 8, 0) and 0 < x.shape[0] <= MAX_ROWS


def quantised_linear(x: Tensor, weight: QuantisedWeight, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias: [rows, out] for x [rows, in]. Weights become bfloat16, sums are float32."""
    (rows, in_features), out_features = x.shape, weight.shape[0]
    tile = TILES[next(most for most in TILES if rows <= most)]
    block_n, block_k, num_warps, num_stages, programs = tile
    if not runtime.has_hopper_shared_memory(x.device):
        num_stages = 2  # more do not fit
    block_m = max(runtime.MIN_DOT_SIZE, next_power_of_2(rows))
    block_k = min(block_k, weight.group) if weight.group > 64 else block_k
    tiles, steps = cdiv(out_features, block_n), cdiv(in_features, block_k)
    splits = max(1, min(num_multiprocessors(x.device) * programs // tiles, steps // 4))
    out = torch.empty(rows, out_features, dtype=x.dtype, device=x.device)
    partial = None
    if splits > 1:
        partial = torch.empty(splits, rows, out_features, dtype=torch.float32, device=x.device)
    _quantised_linear_kernel[(tiles, splits)](
        x, weight.tensors(torch.uint8), bias, out, partial, runtime.arrival_counters(x.device),
        x.stride(0), rows, out_features,
        **weight.constants, IN_FEATURES=in_features, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        SPLITS=splits, STAGES=num_stages, num_warps=num_warps, **runtime.overlap_options(x.device),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _quantised_linear_kernel(
    x, weight, bias, out, partial, counters,
    x_stride, rows, out_features,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program computes [BLOCK_N, BLOCK_M] of out.T, from every input, or with SPLITS a part of them."""
    codes, scales, zeros, offsets = weight
    pdl_wait(OVERLAP)
    PER_BYTE: tl.constexpr = 2 if KIND >= INT4 else 1
    BYTES: tl.constexpr = BLOCK_K // PER_BYTE
    ROW_BYTES: tl.constexpr = IN_FEATURES // PER_BYTE
    STEPS: tl.constexpr = (IN_FEATURES + BLOCK_K * SPLITS - 1) // (BLOCK_K * SPLITS)
    out_feature = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_out = out_feature < out_features
    row = tl.arange(0, BLOCK_M)
    is_row = row < rows
    byte = tl.arange(0, BYTES)
    column = input_of(byte, KIND)
    its_codes = codes + out_feature.to(tl.int64)[:, None] * ROW_BYTES + byte[None, :]
    its_x = x + row.to(tl.int64)[None, :] * x_stride + column[:, None]
    # What a code stands above its number; integers of 4 bits come with 128 added.
    above: tl.constexpr = 128 if KIND == INT4 else 0
    if GROUP > 0:
        GROUPS: tl.constexpr = BLOCK_K // GROUP if BLOCK_K > GROUP else 1
        group = tl.arange(0, GROUPS)
        grid_row = (out_feature // TILE_ROWS).to(tl.int64)[:, None]
        grid_row *= (IN_FEATURES + GROUP - 1) // GROUP
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    # How often the loop runs is known, or the compiler would let the matrix unit wait for each product.
    for i in tl.range(0, STEPS, num_stages=STAGES):
        step = tl.program_id(1) * STEPS + i
        inside = step * BYTES + byte < ROW_BYTES
        tile = masked_load(its_codes + step * BYTES, is_out[:, None] & inside[None, :])
        has_x = inside[:, None] & is_row[None, :]
        low_x = masked_load(its_x + step * BLOCK_K, has_x)
        if PER_BYTE == 2:
            high_x = masked_load(its_x + step * BLOCK_K + 16, has_x)
        if KIND == NF4:
            low, high = look_up(tile, tl.bfloat16)
        elif KIND == INT4:
            low, high = halves_to_bf16(tile)
        else:
            low = codes_to_bf16(tile, KIND)
        scale, offset = 1.0, 0.0
        zero = tl.full([1, 1], above + ZERO_POINT, low.dtype)
        if GROUP > 0:
            place = step * BLOCK_K // GROUP + group
            there = is_out[:, None] & (place * GROUP < IN_FEATURES)[None, :]
            place = grid_row + place[None, :]
            scale = _load_grid(scales + place, there, 0, low.dtype, BYTES)
            if zeros is not None:
                zero = _load_grid(zeros + place, there, above, low.dtype, BYTES)
            if offsets is not None:
                offset = _load_grid(offsets + place, there, 0, low.dtype, BYTES)
        elif zeros is not None:
            zero = masked_load(zeros + out_feature // TILE_ROWS, is_out).to(tl.float32) + above
            zero = zero.to(low.dtype)[:, None]
        HAS_ZERO: tl.constexpr = KIND == INT4 or zeros is not None
        low = _to_number(low, scale, zero, offset, HAS_ZERO, GROUP > 0)
        acc = tl.dot(low, low_x.to(low.dtype), acc, input_precision="ieee")
        if PER_BYTE == 2:
            high = _to_number(high, scale, zero, offset, HAS_ZERO, GROUP > 0)
            acc = tl.dot(high, high_x.to(low.dtype), acc, input_precision="ieee")
    valid = is_out[:, None] & is_row[None, :]
    place = row.to(tl.int64)[None, :] * out_features + out_feature[:, None]
    if SPLITS > 1:
        size = rows.to(tl.int64) * out_features
        tl.store(partial + tl.program_id(1) * size + place, acc, mask=valid)
        tl.debug_barrier()
        counter = counters + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel") < SPLITS - 1:
            return
        tl.store(counter, 0)
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for split in range(SPLITS):
            acc += masked_load(partial + split * size + place, valid)
    if GROUP == 0:
        acc *= masked_load(scales + out_feature // TILE_ROWS, is_out).to(tl.float32)[:, None]
    if bias is not None:
        acc += masked_load(bias + out_feature, is_out).to(tl.float32)[:, None]
    tl.store(out + place, acc, mask=valid)


@triton.jit
def _to_number(codes, scale, zero, offset, HAS_ZERO: tl.constexpr, IS_SCALED: tl.constexpr):
    if HAS_ZERO:
        codes -= zero
    if IS_SCALED:
        codes = (codes * scale + offset).to(codes.dtype)
    return codes


@triton.jit
def _load_grid(address, mask, above: tl.constexpr, dtype: tl.constexpr, BYTES: tl.constexpr):
    """What a grid has at [rows, groups], plus `above`: [rows, BYTES], each number repeated."""
    grid = masked_load(address, mask).to(tl.float32)
    if above:
        grid += above
    grid = grid.to(dtype)
    ROWS: tl.constexpr = grid.shape[0]
    GROUPS: tl.constexpr = grid.shape[1]
    if GROUPS == 1:
        return tl.broadcast_to(grid, [ROWS, BYTES])
    repeated = tl.broadcast_to(grid[:, :, None], [ROWS, GROUPS, BYTES // GROUPS])
    return tl.reshape(repeated, [ROWS, BYTES])
