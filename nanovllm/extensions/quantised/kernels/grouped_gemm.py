"""What grouped GEMMs share: one launch multiplies the weights of all experts, each by its rows.

A token and one of its experts are an *assignment*, numbered token * top_k + place. Assignments are sorted by
expert, so that each expert's weight is read for tiles of them. Which tile belongs to which expert stands in a
table on the device: the number of programs depends on sizes alone, as a CUDA graph needs it, and programs too
many end at once. A layer without experts is one expert that all tokens are assigned to, and needs no table.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.extensions.quantised.kernels.permute_k import permuted
from nanovllm.extensions.quantised.kernels.quantised_weight import QuantisedWeight
from nanovllm.kernels import runtime
from nanovllm.kernels.activation import silu
from nanovllm.kernels.runtime import cdiv, masked_load, next_power_of_2, pdl_wait, tl, triton

# gpt-oss's activation is (up + 1) * gate * sigmoid(ALPHA * gate), with both kept within LIMIT.
ALPHA, LIMIT = 1.702, 7.0
MIN_INPUTS = 512  # of a program, where several share them
ALPHA_OF_KERNELS, LIMIT_OF_KERNELS = tl.constexpr(ALPHA), tl.constexpr(LIMIT)


class Tile(NamedTuple):
    """What a program multiplies at a time, and how."""

    BLOCK_M: int  # assignments
    STAGES: int  # of the pipeline
    BLOCK_N: int = 128  # rows of an expert's weight
    BLOCK_K: int = 128  # inputs
    WARPS: int = 4
    MAX_REGISTERS: int | None = None  # of a thread, so that a multiprocessor runs several programs
    SPLITS: int = 1  # programs that share the inputs of a tile


class Sizes(NamedTuple):
    """Constants of a launch: a `Tile` and what follows from the product."""

    BLOCK_M: int
    STAGES: int
    BLOCK_N: int
    BLOCK_K: int
    WARPS: int
    MAX_REGISTERS: int | None
    SPLITS: int
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
    assignments: Tensor | None  # int32 [experts, tokens]: an expert has a token once at most
    table: Tensor | None  # int32 [2, experts]: how many assignments each expert has, and where its tiles end
    weights: Tensor | None
    out: Tensor
    partial: Tensor | None  # float32 [splits, tokens, out features]
    counters: Tensor | None  # int32, of arrivals at each tile


class GroupedProduct(NamedTuple):
    """
    out[assignment] = weight of its expert @ x[assignment] + bias, multiplied by weights[assignment]. With
    top_k x has a row for each token instead, and the first half of an expert's rows are gates, the second
    half is what they multiply. `tile` is one of the kernel's that computes it. `next_per_byte`: see `Sizes`.
    Without experts there is nothing `sorted`: assignments are the rows of x.
    """

    bias: Tensor | None
    sorted: tuple[Tensor, Tensor, int] | None  # `assignments` and `table` of `Operands`, the most tiles
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
        tile, parts, width = self.tile._replace(**changes), 2 if self.top_k else 1, self.out.shape[1]
        if self.sorted is None:
            assignments = table = None
            num_experts, num_tokens = 1, len(self.out)
            max_tiles = cdiv(num_tokens, tile.BLOCK_M)
        else:
            assignments, table, max_tiles = self.sorted
            num_experts, num_tokens = assignments.shape
        partial, counters, device = None, None, self.out.device
        if tile.SPLITS > 1:
            partial = torch.empty(tile.SPLITS, *self.out.shape, dtype=torch.float32, device=device)
            counters = runtime.arrival_counters(device)
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
        kernel[(max_tiles * sizes.BLOCKS, tile.SPLITS)](
            *inputs,
            Operands(self.bias, assignments, table, self.weights, self.out, partial, counters),
            num_tokens,
            **constants or {},
            SIZES=sizes,
            num_warps=tile.WARPS,
            num_stages=tile.STAGES,
            maxnreg=tile.MAX_REGISTERS,
            **runtime.overlap_options(device),
        )


def with_splits(tile: Tile, rows: int, shape: tuple[int, int], programs: int) -> Tile:
    """The tile whose inputs as many programs share as it takes to start so many in all."""
    out_features, in_features = shape
    tiles = cdiv(rows, tile.BLOCK_M) * cdiv(out_features, tile.BLOCK_N)
    steps = cdiv(in_features, tile.BLOCK_K)
    most = min(programs // tiles, in_features // MIN_INPUTS)
    return tile._replace(SPLITS=next(count for count in range(max(1, most), 0, -1) if steps % count == 0))


def fewer_stages(device: torch.device) -> dict[str, int]:
    """What GPUs with little shared memory change of a tile."""
    return {} if runtime.has_hopper_shared_memory(device) else {"STAGES": 2}


# What the kernels share


@triton.jit
def find_tile(operands, tokens, SIZES, OVERLAP):
    """
    What a program multiplies, once its inputs are there: which of the BLOCKS of an expert's rows; the expert,
    or EXPERTS if there is no such tile; the assignments int64 [BLOCK_M], and which of them are real. Programs
    side by side share the assignments.
    """
    pdl_wait(OVERLAP)
    block, tile = tl.program_id(0) % SIZES.BLOCKS, tl.program_id(0) // SIZES.BLOCKS
    member = tl.arange(0, SIZES.BLOCK_M)
    if operands.table is None:
        expert, assignment = tl.full([], 0, tl.int32), tile * SIZES.BLOCK_M + member
        is_real = assignment < tokens
    else:
        each = tl.arange(0, SIZES.EXPERTS_PAD)
        ends = operands.table + SIZES.EXPERTS + each
        ends = tl.load(ends, mask=each < SIZES.EXPERTS, other=2147483647)
        is_before = ends <= tile
        expert = tl.sum(is_before.to(tl.int32), axis=0)
        begin = tl.max(tl.where(is_before, ends, 0), axis=0)
        member += (tile - begin) * SIZES.BLOCK_M
        is_real = member < masked_load(operands.table + expert, expert < SIZES.EXPERTS)
        assignment = masked_load(operands.assignments + expert.to(tl.int64) * tokens + member, is_real)
    return block, expert, assignment.to(tl.int64), is_real


@triton.jit
def row_in_turn(line, width, PARTS):
    """The row that stands at a line when gates and ups, so many of either, are taken in turn."""
    return line % PARTS * width + line // PARTS


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
def store_sums(acc, row, is_row, tile, operands, tokens, SIZES, IN_TURN):
    """
    `store_tile` for sums [BLOCK_N, BLOCK_M]. Where several programs share a tile's inputs each stores its
    own, and the last one adds them up.
    """
    if SIZES.SPLITS > 1:
        _, _, assignment, is_real = tile
        its_sums = operands.partial + assignment[None, :] * SIZES.OUT_WIDTH + row[:, None]
        is_sum = is_row[:, None] & is_real[None, :]
        size = tokens.to(tl.int64) * SIZES.OUT_WIDTH  # of a program's
        tl.store(its_sums + tl.program_id(1) * size, acc, mask=is_sum)
        tl.debug_barrier()
        arrivals = operands.counters + tl.program_id(0)
        if tl.atomic_add(arrivals, 1, sem="acq_rel") < SIZES.SPLITS - 1:
            return
        tl.store(arrivals, 0)
        acc = tl.zeros(its_sums.shape, tl.float32)
        for split in range(SIZES.SPLITS):
            acc += masked_load(its_sums + split * size, is_sum)
    store_tile(acc, row, is_row, tile, operands, SIZES, 0, IN_TURN)


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
def activate(gate, up, CLAMPED):
    if CLAMPED:
        gate = tl.minimum(gate, LIMIT_OF_KERNELS)
        up = tl.minimum(tl.maximum(up, -LIMIT_OF_KERNELS), LIMIT_OF_KERNELS)
        return (up + 1.0) * gate / (1.0 + tl.exp(gate * -ALPHA_OF_KERNELS))
    return silu(gate) * up
