"""The experts' networks for one to four tokens, from weights that are codes of 8 or 4 bits.

As in quantised_matvec.py a program keeps its input in registers and goes through many rows of a weight, whose
codes are multiplied as pairs of float16. The input of the first product is a token's, of the second what all
its experts have made of it, one behind the other: each piece of it meets its own expert's weight.
"""

import torch
from torch import Tensor

from nanovllm.extensions.experts.kernels.experts import ExpertWeights, activate
from nanovllm.extensions.experts.kernels.router import Chosen
from nanovllm.extensions.quantised.kernels.multiply_words import multiply_words, pairs_of, power_of_two
from nanovllm.extensions.quantised.kernels.quantised_matvec import can_use_quantised_matvec, matvec_sizes
from nanovllm.extensions.quantised.kernels.quantised_weight import (
    BRICK_PIECES,
    BRICK_ROWS,
    INT4,
    MXFP4,
    QuantisedWeight,
)
from nanovllm.kernels.runtime import (
    IS_INTERPRETED,
    next_power_of_2,
    overlap_options,
    pdl_wait,
    pdl_wait_then_launch,
    tl,
    triton,
)

MAX_ROWS_IN_BRICKS = 2  # for more moe_mxfp4.py is faster


def can_use_few_quantised(x: Tensor, experts: ExpertWeights) -> bool:
    """Whether `run_few_quantised` works for a few rows like x, and is the fastest way."""
    is_few = len(x) <= MAX_ROWS_IN_BRICKS
    return experts.are_all(
        lambda each: can_use_quantised_matvec(x[:1], each) and (is_few or not each.is_in_bricks)
    )


def run_few_quantised(
    x: Tensor, experts: ExpertWeights, chosen: Chosen,
    norm_weight: Tensor | None = None, eps: float = 0.0, residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `run_experts_few` of moe_matvec.py."""
    rows, hidden = x.shape
    top_k = chosen.experts.shape[1]
    gated = torch.empty(rows * top_k, experts.width, dtype=x.dtype, device=x.device)
    first = x, experts.gate_up, experts.gate_up_bias, chosen.experts, None, norm_weight, None, gated, eps
    _launch(*first, rows_of_x=top_k, parts=2, is_clamped=experts.is_clamped)
    out = torch.empty(rows, hidden, dtype=x.dtype, device=x.device)
    second = gated, experts.down, experts.down_bias, *chosen, None, residual, out, 0.0
    _launch(*second, members=top_k)
    return out


def _launch(
    x: Tensor, weight: QuantisedWeight, bias: Tensor | None, experts: Tensor, weights: Tensor | None,
    norm_weight: Tensor | None, residual: Tensor | None, out: Tensor, eps: float,
    members: int = 1, rows_of_x: int = 1, parts: int = 1, is_clamped: bool = False,
) -> None:  # fmt: skip
    """
    out[owner] = the sum over its `members` of their expert's weight @ their row of x. `rows_of_x` neighbours
    have the same row. With two `parts` the first half of an expert's rows are gates.
    """
    owners, out_features = out.shape
    in_features = weight.shape[1]
    shape = members * in_features, parts * out_features
    programs, sizes = matvec_sizes(weight, *shape, x.device, owners=owners)
    brick_rows, brick_pieces = (BRICK_ROWS, BRICK_PIECES) if weight.is_in_bricks else (1, 1)
    _few_quantised_kernel[(programs, owners)](
        x, weight.codes.view(torch.int32), weight.readable_scales, weight.zeros, bias, experts, weights,
        norm_weight, residual, out,
        eps, x.stride(0), residual.stride(0) if residual is not None else 0,
        **weight.constants, IN_FEATURES=in_features, OUT_FEATURES=out_features,
        MEMBERS=members, MEMBERS_PAD=next_power_of_2(members), ROWS_OF_X=rows_of_x,
        PARTS=parts, CLAMPED=is_clamped, BRICK_ROWS=brick_rows, BRICK_PIECES=brick_pieces,
        **sizes, **overlap_options(x.device),
    )  # fmt: skip


@triton.jit
def _few_quantised_kernel(
    x, words, scales, zeros, bias, experts, weights, norm_weight, residual, out,
    eps, x_stride, residual_stride,
    KIND: tl.constexpr, IN_FEATURES: tl.constexpr, OUT_FEATURES: tl.constexpr, GROUP: tl.constexpr,
    TILE_ROWS: tl.constexpr, ZERO_POINT: tl.constexpr,
    MEMBERS: tl.constexpr, MEMBERS_PAD: tl.constexpr, ROWS_OF_X: tl.constexpr,
    PARTS: tl.constexpr, CLAMPED: tl.constexpr, HEIGHT: tl.constexpr, PIECES: tl.constexpr,
    BRICK_ROWS: tl.constexpr, BRICK_PIECES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program takes every num_programs-th tile of HEIGHT rows of an owner. Sums are [PIECES, HEIGHT, 1]."""
    if PARTS == 2:
        pdl_wait_then_launch(OVERLAP)  # the second product asks for its weights while this one computes
    HALVES: tl.constexpr = KIND >= INT4
    INPUTS: tl.constexpr = 32 if HALVES else 16
    PER_EXPERT: tl.constexpr = IN_FEATURES // INPUTS  # pieces
    LINES: tl.constexpr = PARTS * OUT_FEATURES
    owner = tl.program_id(1)
    piece = tl.arange(0, PIECES)[:, None, None]
    is_piece = piece < MEMBERS * PER_EXPERT
    place = owner * MEMBERS + piece // PER_EXPERT
    piece = piece % PER_EXPERT
    first_row = tl.load(experts + place, mask=is_piece, other=0).to(tl.int64) * LINES
    PER_ROW: tl.constexpr = (PER_EXPERT + BRICK_PIECES - 1) // BRICK_PIECES * BRICK_PIECES
    its_pieces = piece // BRICK_PIECES * (BRICK_ROWS * BRICK_PIECES) + piece % BRICK_PIECES
    its_pieces += first_row * PER_ROW
    its_words = words + its_pieces * 4
    GROUPS: tl.constexpr = (IN_FEATURES + GROUP - 1) // GROUP if GROUP > 0 else 1
    its_scales = first_row // TILE_ROWS * GROUPS
    if GROUP > 0:
        its_scales += piece * INPUTS // GROUP
    if BRICK_ROWS > 1:  # a piece's scale stands where it does
        its_scales = its_pieces

    tile = tl.program_id(0)
    found, scale, zero = _load_rows(
        its_words, scales, zeros, its_scales, is_piece, tile,
        GROUPS, TILE_ROWS, PER_ROW, BRICK_ROWS, BRICK_PIECES, OUT_FEATURES, PARTS, HEIGHT,
    )  # fmt: skip
    if PARTS == 1:
        pdl_wait(OVERLAP)

    column = piece[:, :, :, None] * INPUTS + tl.arange(0, 16)[None, None, None, :]
    present = is_piece[:, :, :, None]
    address = x + (place // ROWS_OF_X)[:, :, :, None] * x_stride + column
    share = 1.0
    if weights is not None:
        share = tl.load(weights + place, mask=is_piece, other=0.0)[:, :, :, None]
    values = tl.load(address, mask=present, other=0.0).to(tl.float32)
    squares = values * values
    if norm_weight is not None:
        values *= tl.load(norm_weight + column, mask=present, other=0.0).to(tl.float32)
    values *= share
    largest = tl.max(tl.abs(values), axis=3)
    others, pairs, other_pairs = None, None, None
    if HALVES:
        others = tl.load(address + 16, mask=present, other=0.0).to(tl.float32)
        squares += others * others
        if norm_weight is not None:
            others *= tl.load(norm_weight + column + 16, mask=present, other=0.0).to(tl.float32)
        others *= share
        largest = tl.maximum(largest, tl.max(tl.abs(others), axis=3))
    factor = 1.0
    if norm_weight is not None:
        factor = tl.rsqrt(tl.sum(squares) / IN_FEATURES + eps)
    if not IS_INTERPRETED:
        # The largest becomes 4 to 8, so that no sum of 16 products leaves the range of float16. Codes in
        # floating point of 4 bits come 2^14 times too small; there it becomes 2^10 times as large.
        LARGEST: tl.constexpr = 139 if KIND == MXFP4 else 129
        exponent = (tl.max(largest).to(tl.int32, bitcast=True) >> 23) - LARGEST
        exponent = tl.maximum(exponent, -126)
        values *= power_of_two(-exponent)
        factor *= power_of_two(exponent)
        if KIND == MXFP4:
            factor *= 16384.0
        pairs = pairs_of(values, PIECES, 1, 2 if HALVES else 1)
        if HALVES:
            others *= power_of_two(-exponent)
            other_pairs = pairs_of(others, PIECES, 1, 2)
    sums = tl.sum(values, axis=3)  # [PIECES, 1, 1]
    if HALVES:
        sums += tl.sum(others, axis=3)

    while tile * HEIGHT < LINES:
        current, its_scale, its_zero = found, scale, zero
        next_tile = tile + tl.num_programs(0)
        found, scale, zero = _load_rows(
            its_words, scales, zeros, its_scales, is_piece, next_tile,
            GROUPS, TILE_ROWS, PER_ROW, BRICK_ROWS, BRICK_PIECES, OUT_FEATURES, PARTS, HEIGHT,
        )  # fmt: skip
        line = tile * HEIGHT + tl.arange(0, HEIGHT)
        subtracted = tl.full([1, 1, 1], ZERO_POINT, tl.int32) if zeros is None else its_zero
        parts = multiply_words(current, values, others, pairs, other_pairs, subtracted, sums, KIND)
        if not HALVES and zeros is not None:
            parts -= its_zero.to(tl.float32) * sums
        if KIND == MXFP4:
            parts *= (its_scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        else:
            parts *= its_scale.to(tl.float32)
        acc = tl.sum(tl.sum(parts, axis=0), axis=1) * factor  # [HEIGHT]
        if bias is not None:
            member = tl.arange(0, MEMBERS_PAD)[None, :]
            pair = owner * MEMBERS + member
            expert = tl.load(experts + pair, mask=member < MEMBERS, other=0)
            its_bias = bias + expert * LINES + _row_of(line, OUT_FEATURES, PARTS)[:, None]
            added = (line < LINES)[:, None] & (member < MEMBERS)
            added = tl.load(its_bias, mask=added, other=0.0).to(tl.float32)
            if weights is not None:
                added *= tl.load(weights + pair, mask=member < MEMBERS, other=0.0)
            acc += tl.sum(added, axis=1)
        if PARTS == 2:
            gate, up = tl.split(tl.reshape(acc, [HEIGHT // 2, 2]))
            acc = activate(gate, up, CLAMPED)
        out_row = tile * (HEIGHT // PARTS) + tl.arange(0, HEIGHT // PARTS)
        valid = out_row < OUT_FEATURES
        if residual is not None:
            acc += tl.load(residual + owner * residual_stride + out_row, mask=valid, other=0.0).to(tl.float32)
        tl.store(out + owner * OUT_FEATURES + out_row, acc, mask=valid)
        tile = next_tile


@triton.jit
def _row_of(line, OUT_FEATURES: tl.constexpr, PARTS: tl.constexpr):
    """Gates and ups in turn."""
    return line % PARTS * OUT_FEATURES + line // PARTS


@triton.jit
def _load_rows(
    its_words, scales, zeros, its_scales, is_piece, tile,
    GROUPS: tl.constexpr, TILE_ROWS: tl.constexpr, PER_ROW: tl.constexpr,
    BRICK_ROWS: tl.constexpr, BRICK_PIECES: tl.constexpr,
    OUT_FEATURES: tl.constexpr, PARTS: tl.constexpr, HEIGHT: tl.constexpr,
):  # fmt: skip
    """
    HEIGHT rows of each piece's expert: words [PIECES, HEIGHT, 1, 4], scales and zeros [PIECES, HEIGHT, 1].
    """
    line = tile * HEIGHT + tl.arange(0, HEIGHT)[None, :, None]
    inside = is_piece & (line < PARTS * OUT_FEATURES)
    row = _row_of(line, OUT_FEATURES, PARTS)
    word = tl.arange(0, 4)[None, None, None, :]
    place = row // BRICK_ROWS * (BRICK_ROWS * PER_ROW) + row % BRICK_ROWS * BRICK_PIECES
    address = (its_words + place * 4)[:, :, :, None] + word
    found = tl.load(address, mask=inside[:, :, :, None], other=0)
    if BRICK_ROWS == 1:
        place = row // TILE_ROWS * GROUPS
    place += its_scales
    scale = tl.load(scales + place, mask=inside, other=0)
    zero = scale
    if zeros is not None:
        zero = tl.load(zeros + place, mask=inside, other=0)
    return found, scale, zero
