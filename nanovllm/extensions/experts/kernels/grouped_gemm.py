"""The grouped GEMM of a mixture of experts: one launch multiplies every expert's weight by its rows.

A token and one of its experts are an *assignment*, numbered token * top_k + place. Assignments are sorted by
expert, so that each expert's weight is read for tiles of them. Which tile belongs to which expert stands in a
table on the device: the number of programs depends on sizes alone, as a CUDA graph needs it, and programs too
many end at once. Here is what all these kernels share, and the two for weights that are multiplied as they
are: dense ones, and codes of 8 bits in floating point, for which tokens are quantised as the weights are.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.extensions.experts.kernels.experts import activate
from nanovllm.extensions.experts.kernels.router import SortedAssignments
from nanovllm.extensions.quantised.kernels.fp8_linear import QuantisedRows, quantise
from nanovllm.extensions.quantised.kernels.quantised_weight import QuantisedWeight, dequantise
from nanovllm.kernels import runtime
from nanovllm.kernels.runtime import cdiv, masked_load, next_power_of_2, pdl_wait, tl, triton

BYTES = tl.constexpr(64)  # of a row of codes that four threads side by side read


class Tile(NamedTuple):
    """What a program multiplies at a time, and how."""

    BLOCK_M: int  # assignments
    STAGES: int  # of the pipeline
    BLOCK_N: int = 128  # rows of an expert's weight
    BLOCK_K: int = 128  # inputs
    WARPS: int = 4
    MAX_REGISTERS: int | None = None  # of a thread, so that a multiprocessor runs several programs


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


class Sizes(NamedTuple):
    """Constants of a launch: a `Tile` and what follows from the product."""

    BLOCK_M: int
    STAGES: int
    BLOCK_N: int
    BLOCK_K: int
    WARPS: int
    MAX_REGISTERS: int | None
    EXPERTS: int
    EXPERTS_PAD: int  # rounded up to a power of two
    TOP_K: int  # assignments that share a row of x
    PARTS: int  # 2: the first half of an expert's rows are gates, the second half is what they multiply
    CLAMPED: bool
    IN_FEATURES: int
    OUT_FEATURES: int  # rows of a part
    OUT_WIDTH: int  # of `out`, which may have more
    NEXT_PER_BYTE: int  # codes in a byte of the next weight, for which gated results are permuted; or 0
    BLOCKS: int  # of an expert's rows


class Operands(NamedTuple):
    """What all kernels get beside x and the weight."""

    bias: Tensor | None
    assignments: Tensor  # int32 [experts, tokens]: an expert has a token once at most
    table: Tensor  # int32 [2, experts]: how many assignments each expert has, and where its tiles end
    weights: Tensor | None
    out: Tensor


class GroupedProduct(NamedTuple):
    """
    out[assignment] = weight of its expert @ x[assignment] + bias, multiplied by weights[assignment]. With
    top_k x has a row for each token instead, and the first half of an expert's rows are gates, the second
    half is what they multiply. `tile` is one of the kernel's that computes it. `next_per_byte`: see `Sizes`.
    """

    bias: Tensor | None
    sorted: SortedAssignments
    out: Tensor
    tile: Tile
    top_k: int = 0
    weights: Tensor | None = None
    is_clamped: bool = False
    next_per_byte: int = 0

    def launch(
        self,
        kernel: Any,
        weight: Tensor | QuantisedWeight,
        inputs: Any,
        constants: dict[str, int] | None = None,
        **changes: int,
    ) -> None:
        """The kernel gets these inputs and constants besides; `changes` are of the tile."""
        assignments, table, max_tiles = self.sorted
        num_experts, num_tokens = assignments.shape
        tile, parts, width = self.tile._replace(**changes), 2 if self.top_k else 1, self.out.shape[1]
        sizes = Sizes(
            *tile,
            num_experts,
            next_power_of_2(num_experts),
            self.top_k or 1,
            parts,
            self.is_clamped,
            weight.shape[1],
            OUT_FEATURES=weight.shape[0] // (num_experts * parts),
            OUT_WIDTH=width,
            NEXT_PER_BYTE=self.next_per_byte,
            BLOCKS=cdiv(parts * width, tile.BLOCK_N),
        )
        kernel[(max_tiles * sizes.BLOCKS,)](
            *inputs,
            Operands(self.bias, assignments, table, self.weights, self.out),
            num_tokens,
            **constants or {},
            SIZES=sizes,
            num_warps=tile.WARPS,
            num_stages=tile.STAGES,
            maxnreg=tile.MAX_REGISTERS,
            **runtime.overlap_options(table.device),
        )


# What the kernels share


@triton.jit
def find_tile(operands, tokens, SIZES, OVERLAP):
    """
    What a program multiplies, once its inputs are there: which of the BLOCKS of an expert's rows; the expert,
    or EXPERTS if there is no such tile; the assignments int64 [BLOCK_M], and which of them are real. Programs
    side by side share the assignments.
    """
    pdl_wait(OVERLAP)
    tile = tl.program_id(0) // SIZES.BLOCKS
    each = tl.arange(0, SIZES.EXPERTS_PAD)
    ends = operands.table + SIZES.EXPERTS + each
    ends = tl.load(ends, mask=each < SIZES.EXPERTS, other=2147483647)
    is_before = ends <= tile
    expert = tl.sum(is_before.to(tl.int32), axis=0)
    begin = tl.max(tl.where(is_before, ends, 0), axis=0)
    member = (tile - begin) * SIZES.BLOCK_M + tl.arange(0, SIZES.BLOCK_M)
    is_real = member < masked_load(operands.table + expert, expert < SIZES.EXPERTS)
    assignment = masked_load(operands.assignments + expert.to(tl.int64) * tokens + member, is_real)
    return tl.program_id(0) % SIZES.BLOCKS, expert, assignment.to(tl.int64), is_real


@triton.jit
def rows_in_turn(first, block, SIZES):
    """
    The rows of a block, counted from `first`, and whether they exist: gates and ups in turn, so that the two
    of a pair stand side by side in the result.
    """
    line = tl.arange(0, SIZES.BLOCK_N)
    place = block * (SIZES.BLOCK_N // SIZES.PARTS) + line // SIZES.PARTS
    return first + line % SIZES.PARTS * SIZES.OUT_FEATURES + place, place < SIZES.OUT_FEATURES


@triton.jit
def store_tile(acc, row, is_row, tile, operands, SIZES, AXIS, IN_TURN):
    """
    From sums, the weight's rows along this axis and assignments along the other one, to what is stored: with
    biases, gates applied to what they multiply if there are two PARTS (which stand in turn, or else one half
    before the other), and multiplied by the assignments' weights.
    """
    block, _, assignment, is_real = tile
    OTHER: tl.constexpr = 1 - AXIS
    COLUMNS: tl.constexpr = SIZES.BLOCK_N // SIZES.PARTS
    if operands.bias is not None:
        acc += tl.expand_dims(masked_load(operands.bias + row, is_row).to(tl.float32), OTHER)
    if SIZES.PARTS == 2:
        if AXIS == 1:
            acc = tl.reshape(acc, [SIZES.BLOCK_M, COLUMNS, 2])
        elif IN_TURN:
            acc = tl.permute(tl.reshape(acc, [COLUMNS, 2, SIZES.BLOCK_M]), [0, 2, 1])
        else:
            acc = tl.permute(tl.reshape(acc, [2, COLUMNS, SIZES.BLOCK_M]), [1, 2, 0])
        gate, up = tl.split(acc)
        acc = activate(gate, up, SIZES.CLAMPED)
    if operands.weights is not None:
        acc *= tl.expand_dims(masked_load(operands.weights + assignment, is_real), AXIS)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    valid = tl.expand_dims(is_real, AXIS) & tl.expand_dims(column < SIZES.OUT_WIDTH, OTHER)
    if SIZES.NEXT_PER_BYTE > 0:
        column = permuted(column, SIZES.NEXT_PER_BYTE)
    out = operands.out + tl.expand_dims(assignment, AXIS) * SIZES.OUT_WIDTH + tl.expand_dims(column, OTHER)
    tl.store(out, acc, mask=valid)


@triton.jit
def permuted(column, CODES_PER_BYTE: tl.constexpr):
    """
    Where an input stands when K is permuted. In a block, those whose codes are low halves of bytes come
    before those of high halves; of each, two at a time are taken from the four pieces in turn.
    """
    BLOCK: tl.constexpr = BYTES * CODES_PER_BYTE
    within = column % BLOCK
    piece, within = within // (16 * CODES_PER_BYTE), within % (16 * CODES_PER_BYTE)
    half, within = within // 16, within % 16
    return column // BLOCK * BLOCK + half * BYTES + within // 2 * 8 + piece * 2 + within % 2


# Weights that are multiplied as they are


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


def fewer_stages(device: torch.device) -> dict[str, int]:
    """What GPUs with little shared memory change of a tile."""
    return {} if runtime.has_hopper_shared_memory(device) else {"STAGES": 2}


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
