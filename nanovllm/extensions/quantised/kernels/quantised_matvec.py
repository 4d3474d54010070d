"""Products of a quantised weight and one or two rows, with what surrounds them in a decoder layer folded in.

Quantised gemv is instruction-bound, as its weight has fewer bytes, which must be converted: what counts is
the number of instructions a weight. So each program keeps its input in registers and goes through many rows
of the weight; the next rows are on their way while one is multiplied. Pieces of 16 bytes are multiplied in
float16, see multiply_words.py: the input is brought into its range by a power of two. Scales and all further
sums are float32.
"""

import torch
from torch import Tensor

from nanovllm.extensions.quantised.kernels.gpu import gpu_supports
from nanovllm.extensions.quantised.kernels.multiply_words import multiply_words, pairs_of, power_of_two
from nanovllm.extensions.quantised.kernels.quantised_weight import INT4, PIECE_BYTES, QuantisedWeight
from nanovllm.kernels.runtime import (
    IS_INTERPRETED,
    cdiv,
    is_on_gpu,
    next_power_of_2,
    num_multiprocessors,
    overlap_options,
    pdl_wait,
    tl,
    triton,
    use_triton,
)

MAX_ROWS = 2
INPUTS_PER_THREAD = 64  # of a row, kept in registers
MAX_WARPS = 16
WARPS_PER_MULTIPROCESSOR = 16
HEIGHT = 4  # rows of a weight of 4 bits that a program multiplies at once, for one row of x


def can_use_quantised_matvec(x: Tensor, weight: QuantisedWeight) -> bool:
    """Whether `quantised_matvec` works for these rows [rows, features], and is the fastest way."""
    if not (is_on_gpu(x) and use_triton(x) and x.element_size() == 2 and weight.can_be_read()):
        return False
    # Earlier GPUs cannot convert pairs of codes in 8-bit floating point, or of float32, to float16.
    can_convert = gpu_supports(x.device, 8, 9) if weight.is_fp8 else gpu_supports(x.device, 8, 0)
    return can_convert and 0 < x.shape[0] <= MAX_ROWS


def quantised_matvec(
    x: Tensor, weight: QuantisedWeight, bias: Tensor | None = None,
    norm_weight: Tensor | None = None, eps: float = 0.0,
    residual: Tensor | None = None, silu_and_mul: bool = False,
) -> Tensor:  # fmt: skip
    """
    activation(rms_norm(x) @ weight.T + bias) + residual, as a gemv of dense weights, with an activation or a
    residual, not both.
    """
    assert residual is None or not silu_and_mul
    rows, in_features = x.shape
    out_features = weight.shape[0]
    parts, rows_pad = 1 + silu_and_mul, next_power_of_2(rows)
    programs, sizes = matvec_sizes(weight, in_features, out_features, x.device, rows_pad, least_height=parts)
    out = torch.empty(rows, out_features // parts, dtype=x.dtype, device=x.device)
    _quantised_matvec_kernel[(programs,)](
        x, weight.codes.view(torch.int32), weight.scales, weight.zeros, weight.offsets,
        bias, norm_weight, residual, out,
        eps, x.stride(0), residual.stride(0) if residual is not None else 0, out_features,
        **weight.constants, IN_FEATURES=in_features, ROWS=rows, ROWS_PAD=rows_pad,
        GATED=silu_and_mul, **sizes, **overlap_options(x.device),
    )  # fmt: skip
    return out


def matvec_sizes(
    weight: QuantisedWeight, width: int, out_features: int, device: torch.device,
    rows: int = 1, owners: int = 1, least_height: int = 1,
) -> tuple[int, dict[str, int]]:  # fmt: skip
    """
    How many programs multiply rows of x of this width, for each of so many owners of a result, and how much
    each of them multiplies at once.
    """
    inputs = PIECE_BYTES * (2 if weight.is_int4 else 1)  # of a piece
    pieces = next_power_of_2(width // inputs)
    num_warps = max(1, min(pieces * inputs * rows // (32 * INPUTS_PER_THREAD), MAX_WARPS))
    height = max(HEIGHT // (rows if weight.is_int4 else 2 * rows), least_height)
    tiles = cdiv(out_features, height)
    most = max(1, num_multiprocessors(device) * WARPS_PER_MULTIPROCESSOR // (num_warps * owners))
    programs = cdiv(tiles, cdiv(tiles, most))  # each has about as many tiles
    return programs, {"HEIGHT": height, "PIECES": pieces, "num_warps": num_warps}


@triton.jit
def _load_tile(
    words, scales, zeros, offsets, tile, out_features, KIND: tl.constexpr, IN_FEATURES: tl.constexpr,
    GROUP: tl.constexpr, TILE_ROWS: tl.constexpr, ZERO_POINT: tl.constexpr,
    HEIGHT: tl.constexpr, PIECES: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """
    HEIGHT rows of the weight (gates and ups in turn if GATED): words [PIECES, HEIGHT, 1, 4], and scales and
    zeros, or offsets, [PIECES or 1, HEIGHT, 1].
    """
    INPUTS: tl.constexpr = 32 if KIND == INT4 else 16
    line = tile * HEIGHT + tl.arange(0, HEIGHT)
    row = line
    if GATED:
        row = (line % 2) * (out_features // 2) + line // 2
    piece = tl.arange(0, PIECES)[:, None, None]
    inside = (line < out_features)[None, :, None] & (piece < IN_FEATURES // INPUTS)
    address = words + row[None, :, None].to(tl.int64) * (IN_FEATURES // INPUTS * 4) + piece * 4
    found = tl.load(
        address[:, :, :, None] + tl.arange(0, 4)[None, None, None, :], mask=inside[:, :, :, None], other=0
    )
    if GROUP == 0:
        place = (row // TILE_ROWS)[None, :, None].to(tl.int64)
        inside = (line < out_features)[None, :, None]
    else:
        place = (row // TILE_ROWS)[None, :, None].to(tl.int64) * tl.cdiv(IN_FEATURES, GROUP)
        place += piece * INPUTS // GROUP
    scale = tl.load(scales + place, mask=inside, other=0.0)
    zero = scale
    if zeros is not None:
        zero = tl.load(zeros + place, mask=inside, other=0).to(scale.dtype)
    if offsets is not None:
        zero = tl.load(offsets + place, mask=inside, other=0.0)
    return found, scale, zero


@triton.jit
def _quantised_matvec_kernel(
    x, words, scales, zeros, offsets, bias, norm_weight, residual, out,
    eps, x_stride, residual_stride, out_features,
    KIND: tl.constexpr, IN_FEATURES: tl.constexpr, GROUP: tl.constexpr, TILE_ROWS: tl.constexpr,
    ZERO_POINT: tl.constexpr, ROWS: tl.constexpr, ROWS_PAD: tl.constexpr, HEIGHT: tl.constexpr,
    PIECES: tl.constexpr, GATED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program takes every num_programs-th tile of HEIGHT rows. Sums are [PIECES, HEIGHT, ROWS_PAD]."""
    INPUTS: tl.constexpr = 32 if KIND == INT4 else 16
    tile = tl.program_id(0)
    num_programs = tl.num_programs(0)
    found, scale, zero = _load_tile(
        words, scales, zeros, offsets, tile, out_features,
        KIND, IN_FEATURES, GROUP, TILE_ROWS, ZERO_POINT, HEIGHT, PIECES, GATED,
    )  # fmt: skip
    pdl_wait(OVERLAP)

    member = tl.arange(0, ROWS_PAD)
    piece = tl.arange(0, PIECES)[:, None, None, None]
    column = piece * INPUTS + tl.arange(0, 16)[None, None, None, :]  # of the first half, if codes are halves
    has_input = piece < IN_FEATURES // INPUTS
    present = has_input & (member < ROWS)[None, None, :, None]
    address = x + (member * x_stride)[None, None, :, None] + column
    values = tl.load(address, mask=present, other=0.0).to(tl.float32)
    squares = values * values
    if norm_weight is not None:
        values *= tl.load(norm_weight + column, mask=has_input, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(values), axis=3)
    others, pairs, other_pairs = None, None, None
    if KIND == INT4:
        others = tl.load(address + 16, mask=present, other=0.0).to(tl.float32)
        squares += others * others
        if norm_weight is not None:
            others *= tl.load(norm_weight + column + 16, mask=has_input, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(others), axis=3))
    factor = tl.full([1, ROWS_PAD], 1.0, tl.float32)
    if norm_weight is not None:
        factor = tl.rsqrt(tl.sum(tl.sum(squares, axis=3), axis=0) / IN_FEATURES + eps)
    if not IS_INTERPRETED:
        # The largest becomes 4 to 8: no sum of 16 products with codes up to 448 leaves the range of float16.
        exponent = (tl.max(largest, axis=0).to(tl.int32, bitcast=True) >> 23) - 129  # [1, ROWS_PAD]
        exponent = tl.maximum(exponent, -126)
        values *= power_of_two(-exponent)[None, :, :, None]
        factor *= power_of_two(exponent)
        pairs = pairs_of(values, PIECES, ROWS_PAD, 2 if KIND == INT4 else 1)
        if KIND == INT4:
            others *= power_of_two(-exponent)[None, :, :, None]
            other_pairs = pairs_of(others, PIECES, ROWS_PAD, 2)
    sums = tl.sum(values, axis=3)  # [PIECES, 1, ROWS_PAD]
    if KIND == INT4:
        sums += tl.sum(others, axis=3)

    width = out_features
    if GATED:
        width = out_features // 2
    while tile * HEIGHT < out_features:
        current, its_scale, its_zero = found, scale, zero
        next_tile = tile + num_programs
        found, scale, zero = _load_tile(
            words, scales, zeros, offsets, next_tile, out_features,
            KIND, IN_FEATURES, GROUP, TILE_ROWS, ZERO_POINT, HEIGHT, PIECES, GATED,
        )  # fmt: skip
        # What the result is combined with is asked for before the sums.
        line = tile * HEIGHT + tl.arange(0, HEIGHT)
        if bias is not None:
            row = line
            if GATED:
                row = (line % 2) * (out_features // 2) + line // 2
            added = tl.load(bias + row, mask=line < out_features, other=0.0).to(tl.float32)
        if residual is not None:
            place = (member * residual_stride)[None, :] + line[:, None]
            valid = (line < width)[:, None] & (member < ROWS)[None, :]
            its_residual = tl.load(residual + place, mask=valid, other=0.0).to(tl.float32)

        subtracted = tl.full([1, 1, 1], ZERO_POINT, tl.int32) if zeros is None else its_zero
        parts = multiply_words(current, values, others, pairs, other_pairs, subtracted, sums, KIND)
        if KIND != INT4 and zeros is not None:
            parts -= its_zero.to(tl.float32) * sums
        parts *= its_scale.to(tl.float32)
        if offsets is not None:
            parts += its_zero.to(tl.float32) * sums
        acc = tl.sum(parts, axis=0) * factor  # [HEIGHT, ROWS_PAD]
        if bias is not None:
            acc += added[:, None]
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(acc, [HEIGHT // 2, 2, ROWS_PAD]), [0, 2, 1]))
            acc = gate / (1.0 + tl.exp(-gate)) * up
            line = tile * (HEIGHT // 2) + tl.arange(0, HEIGHT // 2)
        if residual is not None:
            acc += its_residual
        valid = (line < width)[:, None] & (member < ROWS)[None, :]
        tl.store(out + member[None, :] * width + line[:, None], acc, mask=valid)
        tile = next_tile
