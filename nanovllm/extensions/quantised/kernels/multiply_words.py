"""Sums of products of 16 bytes of a quantised weight and the inputs that they meet, in few instructions.

Codes that are integers, as twice the numbers of MXFP4 are, are multiplied as such, four at a time, by inputs
that have become integers of 15 bits for that, and their sums are exact. Other codes become float16, two at a
time, which is exact, and are multiplied and added so. Triton has none of these operations, so a GPU computes
them in assembly language; the interpreter does the same in float32.
"""

from string import Template

import torch

from nanovllm.extensions.quantised.kernels.nf4 import E2M1, FIND_BYTE, FP4_NUMBERS, NUMBERS, bytes_of
from nanovllm.extensions.quantised.kernels.quantised_weight import (
    FP4,
    INT4,
    INT8,
    MXFP4,
    code_to_float,
    scale_pair,
)
from nanovllm.kernels.runtime import IS_INTERPRETED, masked_load, tl, triton


def _assembly(begin: str, word: str, sums: str = "sum") -> str:
    """
    `begin`, and then `word` for each of four words of codes. $w is the word. The pairs of inputs that its
    codes of 8 bits meet, or those in the low halves of its bytes, are $a and $b; $c and $d are those of the
    high halves. The results are these sums, of pairs.
    """
    names = sums.split(", ")
    lines = [f"{{ .reg .b32 code, {sums}; .reg .f16 first, second; .reg .f32 rest;", begin]
    lines += [f"mov.b32 {name}, 0;" for name in names]
    first = len(names)  # operand: the results come before the four words
    for i in range(first, first + 4):
        pairs = {"a": f"${4 + i}", "b": f"${8 + i}", "c": f"${12 + i}", "d": f"${16 + i}"}
        lines.append(Template(word).substitute(pairs, w=f"${i}"))
    for i, name in enumerate(names):
        lines.append(f"mov.b32 {{first, second}}, {name}; cvt.f32.f16 ${i}, first;")
        lines.append(f"cvt.f32.f16 rest, second; add.f32 ${i}, ${i}, rest;")
    return "\n".join([*lines, "}"])


def _dot_products(kind: str, *steps: tuple[str, int]) -> str:
    """
    For each of four words $w and each step: takes four `codes`, of this kind, out of the word, and adds their
    products with inputs, whose high bytes stand in the operands from the step's second on, and their low
    bytes behind them.
    """
    lines = []
    for i in range(4):
        for codes, first in steps:
            lines.append(Template(codes).substitute(w=f"${1 + i}"))
            lines.append(f"dp4a.{kind}.s32 high, codes, ${first + i}, high;")
            lines.append(f"dp4a.{kind}.u32 low, codes, ${first + 4 + i}, low;")
    return "\n".join(lines)


MULTIPLY_FP8 = _assembly(
    ".reg .b16 low, high;",
    """mov.b32 {low, high}, $w;
    cvt.rn.f16x2.e4m3x2 code, low;
    fma.rn.f16x2 sum, code, $a, sum;
    cvt.rn.f16x2.e4m3x2 code, high;
    fma.rn.f16x2 sum, code, $b, sum;""",
)
# What the last operand holds is added to the sum; of INT4, a sixteenth of it: high halves are multiplied
# where they stand.
BEGIN_INTEGERS = "{ .reg .b32 codes, high, low, place, opposite, other; mov.b32 high, 0; mov.b32 low, "
END_INTEGERS = "shl.b32 high, high, 8; add.s32 $0, high, low; }"
MULTIPLY_INT8 = f"""{BEGIN_INTEGERS}$13;
    {_dot_products("s32", ("mov.b32 codes, $w;", 5))}
    {END_INTEGERS}"""
MULTIPLY_INT4 = f"""{BEGIN_INTEGERS}$21;
    {_dot_products("u32", ("and.b32 codes, $w, 0xf0f0f0f0;", 13))}
    shr.s32 high, high, 4;
    shr.s32 low, low, 4;
    {_dot_products("u32", ("and.b32 codes, $w, 0x0f0f0f0f;", 5))}
    {END_INTEGERS}"""
# Twice the numbers, and 12 more: integers from 0 to 24.
TABLE = [int(2 * number) + 12 for number in E2M1]
WORDS = [int.from_bytes(bytes(TABLE[i : i + 4]), "little") for i in range(0, 16, 4)]
FIND_CODES = FIND_BYTE.format("codes", *WORDS)
MULTIPLY_MXFP4 = f"""{BEGIN_INTEGERS}$21;
    {
    _dot_products(
        "u32",
        (f"mov.b32 place, $w; xor.b32 opposite, place, 0x88888888;{FIND_CODES}", 5),
        (f"shr.b32 place, place, 16; shr.b32 opposite, opposite, 16;{FIND_CODES}", 13),
    )
}
    {END_INTEGERS}"""


def _look_up_and_multiply(numbers: list[float], high: str) -> str:
    """A word of places in a table; the products of high halves are added to the sum of that name."""
    table_bytes = bytes_of(numbers, torch.float16)
    return f"""mov.b32 place, $w;
    xor.b32 opposite, place, 0x88888888;{table_bytes}
    prmt.b32 code, low, high, 0x6240;
    fma.rn.f16x2 sum, code, $a, sum;
    prmt.b32 code, low, high, 0x7351;
    fma.rn.f16x2 {high}, code, $c, {high};
    shr.b32 place, place, 16;
    shr.b32 opposite, opposite, 16;{table_bytes}
    prmt.b32 code, low, high, 0x6240;
    fma.rn.f16x2 sum, code, $b, sum;
    prmt.b32 code, low, high, 0x7351;
    fma.rn.f16x2 {high}, code, $d, {high};"""


TABLE_REGISTERS = ".reg .b32 place, opposite, low, high, other;"
MULTIPLY_NF4 = _assembly(TABLE_REGISTERS, _look_up_and_multiply(NUMBERS, "sum"))
MULTIPLY_FP4 = _assembly(TABLE_REGISTERS, _look_up_and_multiply(FP4_NUMBERS, "more"), "sum, more")
# By kind.
MULTIPLY = tl.constexpr(
    (MULTIPLY_FP8, MULTIPLY_INT8, MULTIPLY_INT4, MULTIPLY_MXFP4, MULTIPLY_NF4, MULTIPLY_FP4)
)
REGISTERS_8, REGISTERS_4 = tl.constexpr("=f" + ",r" * 12), tl.constexpr("=f" + ",r" * 20)
REGISTERS_FP4 = tl.constexpr("=&f,=&f" + ",r" * 20)
REGISTERS_INT8, REGISTERS_INT4 = tl.constexpr("=r" + ",r" * 13), tl.constexpr("=r" + ",r" * 21)
STEPS = tl.constexpr(2.0**13)  # of integers that inputs from -2 to 2 become


@triton.jit
def load_inputs(x, norm_weight, share, column, is_there, KIND):
    """
    The inputs that meet pieces of codes, float32 [PIECES, 1, ROWS, 16], times the norm's weights and times a
    share, unless these are None: `values`, from `column` [PIECES, 1, 1, 1] on, and `others`, which are 16
    columns behind, for codes of 4 bits. -> values, others, squares before that.
    """
    values, squares = _load_half(x, norm_weight, share, column, is_there)
    others = values
    if KIND >= INT4:
        others, more = _load_half(x, norm_weight, share, column + 16, is_there)
        squares += more
    return values, others, squares


@triton.jit
def _load_half(x, norm_weight, share, column, is_there):
    values = _load_sixteen(x + column, is_there)
    squares = values * values
    if norm_weight is not None:
        values *= _load_sixteen(norm_weight + column, is_there)
    if share is not None:
        values *= share
    return values, squares


@triton.jit
def _load_sixteen(address, is_there):
    """
    float32 [.., .., .., 16] from each address [.., .., .., 1] on. Loaded by eight, as many as a thread loads
    at once, they are all in one thread, which need not exchange any.
    """
    place = tl.arange(0, 2)[:, None] * 8 + tl.arange(0, 8)[None, :]
    found = masked_load(address[:, :, :, :, None] + place, is_there[:, :, :, :, None])
    return tl.reshape(found.to(tl.float32), [found.shape[0], found.shape[1], found.shape[2], 16])


@triton.jit
def prepare_inputs(values, others, factor, KIND):
    """
    -> what `multiply_pieces` wants of the inputs: `values` and `others`; what the codes' zero is multiplied
    by; and the unit of each piece. And the factor of its results, times what all inputs are divided by.
    """
    if KIND >= INT8 and KIND <= MXFP4:
        inputs = _integers(values, others, KIND)
        if not IS_INTERPRETED:
            factor /= 2 * STEPS if KIND == MXFP4 else STEPS
    else:
        inputs, factor = _halves(values, others, factor, KIND)
    return inputs, factor


@triton.jit
def _halves(values, others, factor, KIND):
    """
    In float16, divided by a power of two for each row, so that the largest becomes 4 to 8, and no sum of 16
    products with codes up to 448 leaves its range. The interpreter multiplies in float32, where any will do.
    """
    if not IS_INTERPRETED:
        largest = tl.max(tl.max(tl.maximum(tl.abs(values), tl.abs(others)), axis=3), axis=0)  # [1, ROWS]
        exponent = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) - 129, -126)
        factor *= _power_of_two(exponent)
        divisor = _power_of_two(-exponent)[None, :, :, None]
        values = _pairs_of(values * divisor)
        if KIND >= INT4:
            others = _pairs_of(others * divisor)
    return (values, others, 0.0, 1.0), factor


@triton.jit
def _integers(values, others, KIND):
    """
    As integers of 14 bits and a sign, as the largest of a piece has them: each piece has its unit [PIECES, 1,
    ROWS], which is infinite if one of the inputs is not finite. The interpreter, which multiplies in float32,
    does not round them.
    """
    largest = _magnitude(values)
    if KIND >= INT4:
        largest = tl.maximum(largest, _magnitude(others))
    exponent = tl.maximum((largest >> 23) - 127, -126)
    divisor = _power_of_two(-exponent)[:, :, :, None]
    values *= divisor
    others *= divisor
    if IS_INTERPRETED:
        sums = tl.sum(values, axis=3)
        if KIND == INT4:
            sums += tl.sum(others, axis=3)
    else:
        first = _integers_of(values)
        second = _integers_of(others)
        if KIND == MXFP4:  # codes of both halves of two bytes are taken at once
            a, b, c, d = first
            e, f, g, h = second
            first = a, e, b, f
            second = c, g, d, h
        values = _bytes_of(first)
        others = _bytes_of(second) if KIND >= INT4 else values
        # A word of codes that are 1; of MXFP4 of those that stand for 0.
        WORD: tl.constexpr = (0x01010101, 0x11111111, 0)[KIND - INT8]
        word = tl.full([1, 1, 1], WORD, tl.int32)
        sums = _sum_integers((word, word, word, word), values, others, tl.zeros_like(word), KIND)
    return values, others, sums, _power_of_two(exponent)


@triton.jit
def _magnitude(values):
    """The bits of the largest absolute number along the last axis."""
    return tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=3)


@triton.jit
def _sum_integers(words, values, others, start, KIND):
    """Sums of products, int32, and `start`, of which INT4 takes a sixteenth."""
    operands = words + values
    if KIND >= INT4:
        operands = operands + others
    asm: tl.constexpr = MULTIPLY[KIND]
    registers: tl.constexpr = REGISTERS_INT4 if KIND >= INT4 else REGISTERS_INT8
    return tl.inline_asm_elementwise(
        asm, registers, operands + (start,), dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _power_of_two(exponent):
    """2 ** exponent, float32, for int32 from -126 to 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _pairs_of(values):
    """
    float32 [PIECES, 1, ROWS, 16] -> eight int32 [PIECES, 1, ROWS], pairs of float16 numbers: the first and
    then the second one of each four inputs.
    """
    asm: tl.constexpr = "cvt.rn.f16x2.f32 $0, $3, $2; cvt.rn.f16x2.f32 $1, $5, $4;"
    return _words_of(_fours_of(values), asm)


@triton.jit
def _integers_of(values):
    """
    float32 [PIECES, 1, ROWS, 16] up to 2 -> the fours, rounded to integers, STEPS for 1, which stand in the
    last bits: beside 2^23 such a step is the last bit of float32.
    """
    return _fours_of(values * STEPS + 1.5 * 2.0**23)


@triton.jit
def _bytes_of(integers):
    """Four [PIECES, ROWS, 4] -> eight int32 [PIECES, 1, ROWS]: high bytes of each four, and then low ones."""
    asm: tl.constexpr = """{ .reg .b32 first, second;
        prmt.b32 first, $2, $3, 0x5410;
        prmt.b32 second, $4, $5, 0x5410;
        prmt.b32 $0, first, second, 0x7531;
        prmt.b32 $1, first, second, 0x6420; }"""
    return _words_of(integers, asm)


@triton.jit
def _fours_of(values):
    """[PIECES, 1, ROWS, 16] -> the first of each four numbers, the second, third and fourth ones."""
    return _split_four(tl.reshape(values, [values.shape[0], values.shape[2], 4, 4]))


@triton.jit
def _words_of(numbers, ASM: tl.constexpr):
    """What becomes of each four float32: the first int32 [PIECES, 1, ROWS] of all fours, then the second."""
    first, second = tl.inline_asm_elementwise(
        ASM, "=&r,=r,f,f,f,f", numbers, dtype=(tl.int32, tl.int32), is_pure=True, pack=1
    )
    shape: tl.constexpr = [first.shape[0], 1, first.shape[1], 4]
    return _split_four(tl.reshape(first, shape)) + _split_four(tl.reshape(second, shape))


@triton.jit
def _split_four(values):
    """[.., .., .., 4] -> four tensors [.., .., ..]."""
    values = tl.reshape(values, [values.shape[0], values.shape[1], values.shape[2], 2, 2])
    even, odd = tl.split(values)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def widen(scale, zero, grids, KIND):
    """
    What has been loaded of scales, and of zeros or offsets, as `multiply_pieces` takes it. Call it before the
    next loads: a conversion behind them of what a loop carries makes the compiler wait for all of these.
    """
    if KIND == FP4:
        low, high = scale_pair(scale)
        return low.to(tl.float32), high.to(tl.float32)
    if KIND != MXFP4:
        scale = scale.to(tl.float32)
    if grids[1] is None:
        zero = zero.to(tl.float32)
    return scale, zero


@triton.jit
def multiply_pieces(words, scale, zero, inputs, grids, KIND, ZERO_POINT):
    """
    Sums of products of a weight and the `prepare_inputs` that it meets, [PIECES, HEIGHT, ROWS]: of the codes
    in words [PIECES, HEIGHT, 1, 4], with the scale of each piece, and its zero or else its offset, as
    `widen` gives them; `grids` (scales, zeros, offsets) say which there are. Inputs meet codes of 8 bits or
    the low halves of bytes, `others` meet high halves, whose scale FP4 has in place of an offset.
    """
    values, others, sums, unit = inputs
    IS_INTEGER: tl.constexpr = KIND >= INT8 and KIND <= MXFP4
    # The zero that codes stand above their number, of MXFP4 already in `sums`.
    zero_point: tl.constexpr = 1 if KIND == MXFP4 else ZERO_POINT
    subtracted = tl.full([1, 1, 1], zero_point, tl.int32) if grids[1] is None else zero.to(tl.int32)
    if IS_INTERPRETED:
        parts = _multiply_by_arithmetic(words, values, KIND, 0)
        if KIND >= INT4:
            more = _multiply_by_arithmetic(words, others, KIND, 4)
            if KIND != FP4:
                parts += more
        if IS_INTEGER and KIND != MXFP4:
            parts -= subtracted.to(tl.float32) * sums
    elif IS_INTEGER:
        start = sums * (-16 if KIND == INT4 else -1) * subtracted
        parts = _sum_integers(_split_four(words), values, others, start, KIND).to(tl.float32)
    else:
        operands = _split_four(words) + values
        if KIND >= INT4:
            operands = operands + others
        asm: tl.constexpr = MULTIPLY[KIND]
        if KIND == FP4:
            parts, more = tl.inline_asm_elementwise(
                asm, REGISTERS_FP4, operands, dtype=(tl.float32, tl.float32), is_pure=True, pack=1
            )
        else:
            registers: tl.constexpr = REGISTERS_4 if KIND >= INT4 else REGISTERS_8
            parts = tl.inline_asm_elementwise(
                asm, registers, operands, dtype=tl.float32, is_pure=True, pack=1
            )
    if KIND == FP4:
        return parts * scale + more * zero
    if KIND == MXFP4:
        scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    parts = parts * unit * scale
    if grids[2] is not None:
        parts += zero * (sums * unit)
    return parts


@triton.jit
def _multiply_by_arithmetic(words, values, KIND, shift):
    """For Triton's interpreter: sums of products of `values` and the codes at this place of each byte."""
    codes = code_to_float(words[:, :, :, :, None] >> 8 * tl.arange(0, 4), shift, KIND)
    return tl.sum(tl.reshape(codes, [words.shape[0], words.shape[1], 1, 16]) * values, axis=3)
