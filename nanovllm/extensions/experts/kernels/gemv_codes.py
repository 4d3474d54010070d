"""The experts' networks for one to four tokens, from weights that are codes of 8 or 4 bits.

As in quantised_matvec.py a program keeps its input in registers and goes through many rows of a weight, whose
codes are multiplied as multiply_words.py says. The input of the first product is a token's, of the second
what all its experts have made of it, one behind the other: each piece of it meets its own expert's weight.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.extensions.experts.kernels.experts import ExpertWeights
from nanovllm.extensions.experts.kernels.router import Chosen
from nanovllm.extensions.quantised.kernels.grouped_gemm import activate, row_in_turn
from nanovllm.extensions.quantised.kernels.multiply_words import (
    load_inputs,
    multiply_pieces,
    prepare_inputs,
    widen,
)
from nanovllm.extensions.quantised.kernels.quantised_matvec import matvec_sizes
from nanovllm.extensions.quantised.kernels.quantised_weight import (
    BRICK_PIECES,
    BRICK_ROWS,
    INT4,
    QuantisedWeight,
    load_grids,
)
from nanovllm.kernels.runtime import (
    masked_load,
    next_power_of_2,
    overlap_options,
    pdl_wait,
    pdl_wait_then_launch,
    tl,
    triton,
)


class GemvSizes(NamedTuple):
    """Constants of a launch."""

    IN_FEATURES: int
    OUT_FEATURES: int  # of a part
    PARTS: int  # 2: the first half of an expert's rows are gates, the second half is what they multiply
    CLAMPED: bool
    TOP_K: int  # assignments that share a row of x
    MEMBERS: int  # assignments whose results are added up
    MEMBERS_PAD: int  # rounded up to a power of two
    BRICK_ROWS: int
    BRICK_PIECES: int
    HEIGHT: int  # rows of a weight that are multiplied at once
    PIECES: int  # of 16 bytes


class GemvOperands(NamedTuple):
    """What the kernel gets beside x and the weight."""

    bias: Tensor | None
    experts: Tensor
    weights: Tensor | None
    norm_weight: Tensor | None
    residual: Tensor | None
    out: Tensor


def multiply_gates_codes(
    x: Tensor, experts: ExpertWeights, chosen: Chosen, norm_weight: Tensor | None, eps: float, out: Tensor
) -> None:
    """As `multiply_gates` of gemv.py."""
    operands = GemvOperands(experts.gate_up_bias, chosen.experts, None, norm_weight, None, out)
    _launch(x, experts.gate_up, operands, eps, experts.is_clamped, top_k=chosen.experts.shape[1], parts=2)


def multiply_and_sum_codes(
    x: Tensor, experts: ExpertWeights, chosen: Chosen, residual: Tensor | None, out: Tensor
) -> None:
    """As `multiply_and_sum` of gemv.py."""
    operands = GemvOperands(experts.down_bias, *chosen, None, residual, out)
    _launch(x, experts.down, operands, members=chosen.experts.shape[1])


def _launch(
    x: Tensor,
    weight: QuantisedWeight,
    operands: GemvOperands,
    eps: float = 0.0,
    is_clamped: bool = False,
    members: int = 1,
    top_k: int = 1,
    parts: int = 1,
) -> None:
    """
    out[owner] = the sum over its `members` of their expert's weight @ their row of x; `top_k` neighbours have
    the same row. With two `parts` the first half of an expert's rows are gates.
    """
    owners, out_features = operands.out.shape
    in_features, residual = weight.shape[1], operands.residual
    shape = members * in_features, parts * out_features
    programs, at_once, options = matvec_sizes(weight, *shape, x.device, owners=owners)
    bricks = (BRICK_ROWS, BRICK_PIECES) if weight.is_in_bricks else (1, 1)
    members = members, next_power_of_2(members)
    sizes = GemvSizes(in_features, out_features, parts, is_clamped, top_k, *members, *bricks, **at_once)
    _gemv_codes_kernel[(programs, owners)](
        x,
        weight.tensors(torch.int32),
        operands,
        eps,
        x.stride(0),
        residual.stride(0) if residual is not None else 0,
        **weight.constants,
        SIZES=sizes,
        **options,
        **overlap_options(x.device),
    )


@triton.jit
def _gemv_codes_kernel(
    x,
    weight,
    operands,
    eps,
    x_stride,
    residual_stride,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    SIZES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program takes every num_programs-th tile of HEIGHT rows of an owner. Sums are [PIECES, HEIGHT, 1]."""
    bias, experts, weights, norm_weight, residual, out = operands
    PARTS: tl.constexpr = SIZES.PARTS
    HEIGHT: tl.constexpr = SIZES.HEIGHT
    PIECES: tl.constexpr = SIZES.PIECES
    MEMBERS: tl.constexpr = SIZES.MEMBERS
    if PARTS == 2:
        pdl_wait_then_launch(OVERLAP)  # the second product asks for its weights while this one computes
    INPUTS: tl.constexpr = 32 if KIND >= INT4 else 16
    PER_EXPERT: tl.constexpr = SIZES.IN_FEATURES // INPUTS  # pieces
    EXPERT_ROWS: tl.constexpr = PARTS * SIZES.OUT_FEATURES
    owner = tl.program_id(1)
    piece = tl.arange(0, PIECES)[:, None, None]
    is_piece = piece < MEMBERS * PER_EXPERT
    place = owner * MEMBERS + piece // PER_EXPERT
    piece = piece % PER_EXPERT
    first_row = masked_load(experts + place, is_piece).to(tl.int64) * EXPERT_ROWS
    WIDTH: tl.constexpr = SIZES.BRICK_PIECES
    PER_ROW: tl.constexpr = (PER_EXPERT + WIDTH - 1) // WIDTH * WIDTH
    its_pieces = piece // WIDTH * (SIZES.BRICK_ROWS * WIDTH) + piece % WIDTH
    its_pieces += first_row * PER_ROW
    its_words = weight[0] + its_pieces * 4
    GROUPS: tl.constexpr = (SIZES.IN_FEATURES + GROUP - 1) // GROUP if GROUP > 0 else 1
    its_scales = first_row // TILE_ROWS * GROUPS
    if GROUP > 0:
        its_scales += piece * INPUTS // GROUP
    if SIZES.BRICK_ROWS > 1:  # a piece's scale stands where it does
        its_scales = its_pieces

    tile = tl.program_id(0)
    found, scale, zero = _load_rows(
        its_words, weight, its_scales, is_piece, tile, GROUPS, TILE_ROWS, PER_ROW, SIZES
    )
    if PARTS == 1:
        pdl_wait(OVERLAP)

    column = piece[:, :, :, None] * INPUTS
    present = is_piece[:, :, :, None]
    its_x = x + (place // SIZES.TOP_K)[:, :, :, None] * x_stride
    share = None
    if weights is not None:
        share = masked_load(weights + place, is_piece)[:, :, :, None]
    eights, squares = load_inputs(its_x, norm_weight, share, column, present, KIND)
    factor = tl.full([1, 1], 1.0, tl.float32)
    if norm_weight is not None:
        factor *= tl.rsqrt(tl.sum(squares) / SIZES.IN_FEATURES + eps)
    inputs, factor = prepare_inputs(eights, factor, KIND)
    factor = tl.sum(factor)  # the only one

    while tile * HEIGHT < EXPERT_ROWS:
        current = found
        its_scale, its_zero = widen(scale, zero, weight[1:], KIND)
        next_tile = tile + tl.num_programs(0)
        found, scale, zero = _load_rows(
            its_words, weight, its_scales, is_piece, next_tile, GROUPS, TILE_ROWS, PER_ROW, SIZES
        )
        line = tile * HEIGHT + tl.arange(0, HEIGHT)
        parts = multiply_pieces(current, its_scale, its_zero, inputs, weight[1:], KIND, ZERO_POINT)
        acc = tl.sum(tl.sum(parts, axis=0), axis=1) * factor  # [HEIGHT]
        if bias is not None:
            member = tl.arange(0, SIZES.MEMBERS_PAD)[None, :]
            assignment = owner * MEMBERS + member
            expert = masked_load(experts + assignment, member < MEMBERS)
            its_bias = (
                bias + expert * EXPERT_ROWS + row_in_turn(line, SIZES.OUT_FEATURES, SIZES.PARTS)[:, None]
            )
            added = (line < EXPERT_ROWS)[:, None] & (member < MEMBERS)
            added = masked_load(its_bias, added).to(tl.float32)
            if weights is not None:
                added *= masked_load(weights + assignment, member < MEMBERS)
            acc += tl.sum(added, axis=1)
        if PARTS == 2:
            gate, up = tl.split(tl.reshape(acc, [HEIGHT // 2, 2]))
            acc = activate(gate, up, SIZES.CLAMPED)
        out_row = tile * (HEIGHT // PARTS) + tl.arange(0, HEIGHT // PARTS)
        valid = out_row < SIZES.OUT_FEATURES
        if residual is not None:
            acc += masked_load(residual + owner * residual_stride + out_row, valid).to(tl.float32)
        tl.store(out + owner * SIZES.OUT_FEATURES + out_row, acc, mask=valid)
        tile = next_tile


@triton.jit
def _load_rows(its_words, weight, its_scales, is_piece, tile, GROUPS, TILE_ROWS, PER_ROW, SIZES):
    """
    HEIGHT rows of each piece's expert: words [PIECES, HEIGHT, 1, 4], and scales and zeros, or offsets,
    [PIECES, HEIGHT, 1].
    """
    line = tile * SIZES.HEIGHT + tl.arange(0, SIZES.HEIGHT)[None, :, None]
    inside = is_piece & (line < SIZES.PARTS * SIZES.OUT_FEATURES)
    row = row_in_turn(line, SIZES.OUT_FEATURES, SIZES.PARTS)
    word = tl.arange(0, 4)[None, None, None, :]
    ROWS: tl.constexpr = SIZES.BRICK_ROWS
    place = row // ROWS * (ROWS * PER_ROW) + row % ROWS * SIZES.BRICK_PIECES
    found = masked_load((its_words + place * 4)[:, :, :, None] + word, inside[:, :, :, None])
    if ROWS == 1:
        place = row // TILE_ROWS * GROUPS
    place += its_scales
    return (found,) + load_grids(weight, place, inside)
