"""Products of a quantised weight and one or two rows, with what surrounds them in a decoder layer folded in.

A quantised weight has fewer bytes, which must be converted. So what counts beside them is the number of
instructions a weight, and how long programs take until their first product: each keeps its input in registers
and goes through many rows of the weight; while one multiplies, the next rows of others are on their way.
Pieces of 16 bytes are multiplied as integers or in float16, see multiply_words.py. Scales and all further
sums are float32.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nanovllm.extensions.quantised.kernels.gpu import gpu_supports
from nanovllm.extensions.quantised.kernels.grouped_gemm import row_in_turn
from nanovllm.extensions.quantised.kernels.multiply_words import (
    load_inputs,
    multiply_pieces,
    prepare_inputs,
    widen,
)
from nanovllm.extensions.quantised.kernels.quantised_weight import (
    INT4,
    PIECE_BYTES,
    QuantisedWeight,
    load_grids,
)
from nanovllm.kernels import activation
from nanovllm.kernels.activation import silu
from nanovllm.kernels.runtime import (
    cdiv,
    masked_load,
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
REGISTERS = 1 << 16  # of a multiprocessor
HEIGHT = 2  # rows of a weight that a program multiplies at once, for one row of x


def can_use_quantised_matvec(x: Tensor, weight: QuantisedWeight) -> bool:
    """Whether `quantised_matvec` works for these rows [rows, features], and is the fastest way."""
    fits = use_triton(x) and x.element_size() == 2 and weight.can_be_read() and 0 < x.shape[0] <= MAX_ROWS
    # Earlier GPUs cannot convert pairs of codes in 8-bit floating point, or of float32, to float16.
    return fits and gpu_supports(x.device, 8, 9 if weight.is_fp8 else 0)


def quantised_matvec(
    x: Tensor,
    weight: QuantisedWeight,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    silu_and_mul: bool = False,
) -> Tensor:
    """
    activation(rms_norm(x) @ weight.T + bias) + residual, as a gemv of dense weights, with an activation or a
    residual, not both.
    """
    assert residual is None or not silu_and_mul
    (rows, in_features), out_features = x.shape, weight.shape[0]
    parts = 1 + silu_and_mul
    shape = in_features, out_features
    programs, sizes, options = matvec_sizes(weight, *shape, x.device, rows, least_height=parts)
    out = torch.empty(rows, out_features // parts, dtype=x.dtype, device=x.device)
    _quantised_matvec_kernel[(programs,)](
        x, weight.tensors(torch.int32), bias, norm_weight, residual, out,
        eps, x.stride(0), residual.stride(0) if residual is not None else 0, out_features,
        **weight.constants, IN_FEATURES=in_features, ROWS=rows, PARTS=parts, **sizes,
        **options, **overlap_options(x.device),
    )  # fmt: skip
    return out


def matvec_of_parts(
    x: Tensor,
    weights: Sequence[QuantisedWeight],
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    silu_and_mul: bool = False,
    **norm: Any,
) -> Tensor:
    """As `quantised_matvec`, with a weight that is several, one below the other, in formats of their own."""
    heights = [weight.shape[0] for weight in weights]
    biases, residuals = (
        [None] * len(heights) if each is None else each.split(heights, -1) for each in (bias, residual)
    )
    outputs = [
        quantised_matvec(x, weight, its_bias, residual=its_residual, **norm)
        for weight, its_bias, its_residual in zip(weights, biases, residuals, strict=True)
    ]
    y = torch.cat(outputs, dim=-1)
    return activation.silu_and_mul(y) if silu_and_mul else y


def matvec_sizes(
    weight: QuantisedWeight,
    width: int,
    out_features: int,
    device: torch.device,
    rows: int = 1,
    owners: int = 1,
    least_height: int = 1,
) -> tuple[int, dict[str, int], dict[str, int | None]]:
    """
    How many programs multiply rows of x of this width, for each of so many owners of a result; how much each
    of them multiplies at once; and options of the launch.
    """
    its_inputs, height, registers = INPUTS_PER_THREAD, HEIGHT, None  # of a thread, of a program, of a thread
    if weight.is_mxfp4:
        # With more registers, as the compiler would like to have, not all warps find room.
        height, registers = 2 * height, REGISTERS // (32 * WARPS_PER_MULTIPROCESSOR)
    elif weight.codes_per_byte == 2:
        its_inputs, height = its_inputs // 2, 4 * height
    inputs = PIECE_BYTES * weight.codes_per_byte  # of a piece
    pieces = next_power_of_2(width // inputs)
    num_warps = max(1, min(pieces * inputs * rows // (32 * its_inputs), MAX_WARPS))
    height = max(height // rows, least_height)
    tiles = cdiv(out_features, height)
    most = max(1, num_multiprocessors(device) * WARPS_PER_MULTIPROCESSOR // (num_warps * owners))
    programs = cdiv(tiles, cdiv(tiles, most))  # each has about as many tiles
    return programs, {"HEIGHT": height, "PIECES": pieces}, {"num_warps": num_warps, "maxnreg": registers}


@triton.jit
def _quantised_matvec_kernel(
    x, weight, bias, norm_weight, residual, out,
    eps, x_stride, residual_stride, out_features,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    HEIGHT: tl.constexpr,
    PIECES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """
    A program takes every num_programs-th tile of HEIGHT rows of the weight. With two PARTS these are gates
    and ups in turn. Sums are [PIECES, HEIGHT, ROWS].
    """
    INPUTS: tl.constexpr = 32 if KIND >= INT4 else 16
    tile = tl.program_id(0)
    width = out_features // PARTS
    words, scale, zero = _load_tile(
        weight, tile, out_features, KIND, GROUP, TILE_ROWS, IN_FEATURES, PARTS, HEIGHT, PIECES
    )
    pdl_wait(OVERLAP)

    row = tl.arange(0, ROWS)
    piece = tl.arange(0, PIECES)[:, None, None, None]
    is_there = piece < IN_FEATURES // INPUTS
    x += (row * x_stride)[None, None, :, None]
    eights, squares = load_inputs(x, norm_weight, None, piece * INPUTS, is_there, KIND)
    factor = tl.full([1, ROWS], 1.0, tl.float32)
    if norm_weight is not None:
        factor = tl.rsqrt(tl.sum(tl.sum(squares, axis=3), axis=0) / IN_FEATURES + eps)
    inputs, factor = prepare_inputs(eights, factor, KIND)

    while tile * HEIGHT < out_features:
        its_words = words
        its_scale, its_zero = widen(scale, zero, weight[1:], KIND)
        next_tile = tile + tl.num_programs(0)
        words, scale, zero = _load_tile(
            weight, next_tile, out_features, KIND, GROUP, TILE_ROWS, IN_FEATURES, PARTS, HEIGHT, PIECES
        )
        # What the result is combined with is asked for before the sums.
        place = tile * HEIGHT + tl.arange(0, HEIGHT)
        column = tile * (HEIGHT // PARTS) + tl.arange(0, HEIGHT // PARTS)  # of the result
        valid = (column < width)[:, None]
        if bias is not None:
            added = masked_load(bias + row_in_turn(place, width, PARTS), place < out_features).to(tl.float32)
        if residual is not None:
            address = residual + ((row * residual_stride)[None, :] + column[:, None])
            its_residual = masked_load(address, valid).to(tl.float32)
        parts = multiply_pieces(its_words, its_scale, its_zero, inputs, weight[1:], KIND, ZERO_POINT)
        acc = tl.sum(parts, axis=0) * factor  # [HEIGHT, ROWS]
        if bias is not None:
            acc += added[:, None]
        if PARTS == 2:
            gate, up = tl.split(tl.permute(tl.reshape(acc, [HEIGHT // 2, 2, ROWS]), [0, 2, 1]))
            acc = silu(gate) * up
        if residual is not None:
            acc += its_residual
        tl.store(out + row[None, :] * width + column[:, None], acc, mask=valid)
        tile = next_tile


@triton.jit
def _load_tile(
    weight, tile, out_features,
    KIND,
    GROUP,
    TILE_ROWS,
    IN_FEATURES,
    PARTS,
    HEIGHT,
    PIECES,
):  # fmt: skip
    """
    HEIGHT rows of the weight: words [PIECES, HEIGHT, 1, 4], and scales and zeros, or offsets,
    [PIECES or 1, HEIGHT, 1].
    """
    INPUTS: tl.constexpr = 32 if KIND >= INT4 else 16
    place = tile * HEIGHT + tl.arange(0, HEIGHT)
    out_feature = row_in_turn(place, out_features // PARTS, PARTS)[None, :, None]
    piece = tl.arange(0, PIECES)[:, None, None]
    is_real = (place < out_features)[None, :, None]
    is_there = is_real & (piece < IN_FEATURES // INPUTS)
    address = weight[0] + out_feature.to(tl.int64) * (IN_FEATURES // INPUTS * 4) + piece * 4
    address = address[:, :, :, None] + tl.arange(0, 4)[None, None, None, :]
    found = masked_load(address, is_there[:, :, :, None])
    place = (out_feature // TILE_ROWS).to(tl.int64)
    if GROUP > 0:
        place = place * tl.cdiv(IN_FEATURES, GROUP) + piece * INPUTS // GROUP
        is_real = is_there
    return (found,) + load_grids(weight, place, is_real)
