"""Products of a quantised weight and one or two rows, with what surrounds them in a decoder layer folded in.

Quantised gemv is instruction-bound, as its weight has fewer bytes, which must be converted: what counts is
the number of instructions a weight. So each program keeps its input in registers and goes through many rows
of the weight; the next rows are on their way while one is multiplied. Codes become float16, two at a time,
which is exact, and are multiplied and added so for a piece of 16 bytes. Scales and all further sums are
float32. The input is brought into the range of float16 by a power of two.
"""

import torch
from torch import Tensor

from nanovllm.extensions.quantised.kernels.quantised_weight import (
    FP8,
    INT4,
    MXFP4,
    PIECE_BYTES,
    QuantisedWeight,
    multiply_by_arithmetic,
)
from nanovllm.kernels.runtime import (
    IS_INTERPRETED,
    cdiv,
    gpu_supports,
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


def _multiply_fp8() -> list[str]:
    lines = [".reg .b16 low, high;"]
    for word in range(4):
        lines.append(f"mov.b32 {{low, high}}, ${1 + word};")
        for place, part in enumerate(("low", "high")):
            lines.append(f"cvt.rn.f16x2.e4m3x2 code, {part};")
            lines.append(f"fma.rn.f16x2 sum, code, ${5 + 2 * word + place}, sum;")
    return lines


def _multiply_int8() -> list[str]:
    """With its sign bit flipped a byte is 128 + code; beside 0x64 that is the number 1152 + code."""
    lines = [".reg .b32 biased, bias;", "mov.b32 bias, 0xe480e480;"]  # -1152
    for word in range(4):
        lines.append(f"xor.b32 biased, ${1 + word}, 0x80808080;")
        for place, selector in enumerate(("0x7170", "0x7372")):
            lines.append(f"prmt.b32 code, biased, 0x64646464, {selector};")
            lines.append("add.f16x2 code, code, bias;")
            lines.append(f"fma.rn.f16x2 sum, code, ${5 + 2 * word + place}, sum;")
    return lines


def _multiply_int4() -> list[str]:
    """
    A low half beside 0x64 is the number 1024 + code. A high half, where it stands, is 1024 + 16 * code, and a
    sixteenth of that 64 + code. The last inputs are what is added to these: -1024 - zero and -64 - zero.
    """
    lines = [".reg .b32 word, sixteenth;", "mov.b32 sixteenth, 0x2c002c00;"]
    for word in range(4):
        lines.append(f"mov.b32 word, ${1 + word};")
        for place in range(2):
            if place:
                lines.append("shr.b32 word, word, 8;")
            lines.append("lop3.b32 code, word, 0x000f000f, 0x64006400, 0xea;")
            lines.append("add.f16x2 code, code, $21;")
            lines.append(f"fma.rn.f16x2 sum, code, ${5 + 2 * word + place}, sum;")
            lines.append("lop3.b32 code, word, 0x00f000f0, 0x64006400, 0xea;")
            lines.append("fma.rn.f16x2 code, code, sixteenth, $22;")
            lines.append(f"fma.rn.f16x2 sum, code, ${13 + 2 * word + place}, sum;")
    return lines


def _multiply_mxfp4() -> list[str]:
    """The bits of a half, placed where float16 has them, are 2^-14 times its number."""
    lines = [".reg .b32 bits, sign;"]

    def place(source: str, left: int, target: str, mask: str) -> None:
        lines.append(f"{'shl' if left > 0 else 'shr'}.b32 {target}, {source}, {abs(left)};")
        lines.append(f"and.b32 {target}, {target}, {mask};")

    for word in range(4):
        for number, lowest in enumerate((0, 8, 4, 12)):  # the halves of bytes 0 and 2, 1 and 3, twice
            place(f"${1 + word}", 9 - lowest, "bits", "0x0e000e00")
            place(f"${1 + word}", 12 - lowest, "sign", "0x80008000")
            lines.append("or.b32 code, bits, sign;")
            values = 5 + 2 * word + number % 2 + 8 * (number // 2)
            lines.append(f"fma.rn.f16x2 sum, code, ${values}, sum;")
    return lines


def assembler(lines: list[str]) -> tl.constexpr:
    """`lines` multiply 16 bytes of codes ($1 to $4) with pairs of inputs ($5 and on)."""
    begin = ["{", ".reg .b32 code, sum;", ".reg .f16 first, second;", ".reg .f32 other;", "mov.b32 sum, 0;"]
    end = ["mov.b32 {first, second}, sum;", "cvt.f32.f16 $0, first;", "cvt.f32.f16 other, second;"]
    return tl.constexpr("\n".join([*begin, *lines, *end, "add.f32 $0, $0, other;", "}"]))


MULTIPLICATIONS = _multiply_fp8(), _multiply_int8(), _multiply_int4(), _multiply_mxfp4()
MULTIPLY_FP8, MULTIPLY_INT8, MULTIPLY_INT4, MULTIPLY_MXFP4 = map(assembler, MULTIPLICATIONS)
REGISTERS_8, REGISTERS_4 = tl.constexpr("=f" + ",r" * 12), tl.constexpr("=f" + ",r" * 22)


@triton.jit
def pairs_of(values, PIECES: tl.constexpr, ROWS: tl.constexpr, DISTANCE: tl.constexpr):
    """
    float32 [PIECES, 1, ROWS, 16] -> eight int32 [PIECES, 1, ROWS], pairs of float16 numbers that stand so far
    apart.
    """
    if DISTANCE == 1:
        first, second = tl.split(tl.reshape(values, [PIECES, 1, ROWS, 8, 2]))
    else:
        values = tl.reshape(values, [PIECES, 1, ROWS, 4, 2, 2])
        first, second = tl.split(tl.permute(values, [0, 1, 2, 3, 5, 4]))
    asm: tl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"
    pairs = tl.inline_asm_elementwise(asm, "=r,f,f", [first, second], dtype=tl.int32, is_pure=True, pack=1)
    even, odd = tl.split(tl.reshape(pairs, [PIECES, 1, ROWS, 2, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    a, e = tl.split(a)
    b, f = tl.split(b)
    c, g = tl.split(c)
    d, h = tl.split(d)
    return a, b, c, d, e, f, g, h


@triton.jit
def power_of_two(exponent):
    """2 ** exponent, float32, for int32 from -126 to 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def multiply_words(words, values, others, pairs, other_pairs, zero, sums, KIND: tl.constexpr):
    """
    Sums over the codes in words [PIECES, HEIGHT, 1, 4], less a zero of codes of 4 bits, times what they meet:
    float32 [PIECES, 1, ROWS, 16], of which `sums` are the sums. `values` and their `pairs` meet codes of 8
    bits or the low halves of bytes, the others high halves. -> [PIECES, HEIGHT, ROWS].
    """
    if IS_INTERPRETED:
        parts = multiply_by_arithmetic(words, values, KIND, 0)
        if KIND >= INT4:
            parts += multiply_by_arithmetic(words, others, KIND, 4)
        if KIND == INT4:
            parts -= zero.to(tl.float32) * sums
    else:
        even, odd = tl.split(tl.reshape(words, [words.shape[0], words.shape[1], 1, 2, 2]))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        inputs = (first, second, third, fourth) + pairs
        if KIND >= INT4:
            at_low = (0xE400 + zero.to(tl.int32)) * 0x10001
            at_high = (0xD400 + 16 * zero.to(tl.int32)) * 0x10001
            inputs = inputs + other_pairs + (at_low, at_high)
        if KIND == MXFP4:
            asm: tl.constexpr = MULTIPLY_MXFP4
        elif KIND == INT4:
            asm: tl.constexpr = MULTIPLY_INT4
        else:
            asm: tl.constexpr = MULTIPLY_FP8 if KIND == FP8 else MULTIPLY_INT8
        registers: tl.constexpr = REGISTERS_4 if KIND >= INT4 else REGISTERS_8
        parts = tl.inline_asm_elementwise(asm, registers, inputs, dtype=tl.float32, is_pure=True, pack=1)
    return parts


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
