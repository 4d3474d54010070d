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
    The inputs that meet pieces of codes, times the norm's weights and times a share, unless these are None:
    `values`, from `column` [PIECES, 1, 1, 1] on, and `others`, which are 16 columns behind, for codes of 4
    bits. Either are sixteen, in two float32 [PIECES, 1, ROWS, 8]: as many as a thread loads at once, so that
    threads need not exchange any. -> values, others, squares before that.
    """
    values, squares = _load_sixteen(x, norm_weight, share, column, is_there)
    others = values
    if KIND >= INT4:
        others, more = _load_sixteen(x, norm_weight, share, column + 16, is_there)
        squares += more
    return values, others, squares


@triton.jit
def _load_sixteen(x, norm_weight, share, column, is_there):
    first, squares = _load_eight(x, norm_weight, share, column, is_there)
    second, more = _load_eight(x, norm_weight, share, column + 8, is_there)
    return (first, second), squares + more


@triton.jit
def _load_eight(x, norm_weight, share, column, is_there):
    column += tl.arange(0, 8)[None, None, None, :]
    values = masked_load(x + column, is_there).to(tl.float32)
    squares = values * values
    if norm_weight is not None:
        values *= masked_load(norm_weight + column, is_there).to(tl.float32)
    if share is not None:
        values *= share
    return values, squares


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
    if IS_INTERPRETED:
        values, others = _joined(values), _joined(others)
    else:
        largest = tl.maximum(tl.abs(values[0]), tl.abs(values[1]))
        if KIND >= INT4:
            largest = tl.maximum(largest, tl.maximum(tl.abs(others[0]), tl.abs(others[1])))
        largest = tl.max(tl.max(largest, axis=3), axis=0)  # [1, ROWS]
        exponent = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) - 129, -126)
        factor *= _power_of_two(exponent)
        divisor = _power_of_two(-exponent)[None, :, :, None]
        values = _pairs_of(values[0] * divisor, values[1] * divisor)
        if KIND >= INT4:
            others = _pairs_of(others[0] * divisor, others[1] * divisor)
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
    if IS_INTERPRETED:
        values, others = _joined(values) * divisor, _joined(others) * divisor
        sums = tl.sum(values, axis=3)
        if KIND == INT4:
            sums += tl.sum(others, axis=3)
    else:
        v, w = _integers_of(values[0] * divisor), _integers_of(values[1] * divisor)
        if KIND >= INT4:
            o, p = _integers_of(others[0] * divisor), _integers_of(others[1] * divisor)
        if KIND == MXFP4:  # codes of both halves of two bytes are taken at once
            values = _bytes_of((v[0], o[0], v[1], o[1]), (w[0], p[0], w[1], p[1]))
            others = _bytes_of((v[2], o[2], v[3], o[3]), (w[2], p[2], w[3], p[3]))
        else:
            values = _bytes_of(v, w)
            others = _bytes_of(o, p) if KIND == INT4 else values
        # A word of codes that are 1; of MXFP4 of those that stand for 0.
        WORD: tl.constexpr = (0x01010101, 0x11111111, 0)[KIND - INT8]
        word = tl.full([1, 1, 1], WORD, tl.int32)
        sums = _sum_integers((word, word, word, word), values, others, tl.zeros_like(word), KIND)
    return values, others, sums, _power_of_two(exponent)


@triton.jit
def _magnitude(values):
    """The bits of the largest absolute number of each sixteen, int32 [PIECES, 1, ROWS]; NaN is above all."""
    first = values[0].to(tl.int32, bitcast=True) & 0x7FFFFFFF
    second = values[1].to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(tl.maximum(first, second), axis=3)


@triton.jit
def _joined(values):
    """Two [.., .., .., 8] -> [.., .., .., 16], for the interpreter."""
    both = tl.permute(tl.join(values[0], values[1]), [0, 1, 2, 4, 3])
    return tl.reshape(both, [both.shape[0], both.shape[1], both.shape[2], 16])


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
def _pairs_of(first, second):
    """
    Two float32 [PIECES, 1, ROWS, 8] -> eight int32 [PIECES, 1, ROWS], pairs of float16 numbers: the first and
    then the second one of each four inputs.
    """
    asm: tl.constexpr = "cvt.rn.f16x2.f32 $0, $3, $2; cvt.rn.f16x2.f32 $1, $5, $4;"
    return _words_of(_fours_of(first), _fours_of(second), asm)


@triton.jit
def _integers_of(values):
    """
    float32 [PIECES, 1, ROWS, 8] up to 2 -> the fours, rounded to integers, STEPS for 1, which stand in the
    last bits: beside 2^23 such a step is the last bit of float32.
    """
    return _fours_of(values * STEPS + 1.5 * 2.0**23)


@triton.jit
def _bytes_of(first, second):
    """Twice four [PIECES, ROWS, 2] -> eight int32 [PIECES, 1, ROWS]: high bytes of fours, then low ones."""
    asm: tl.constexpr = """{ .reg .b32 first, second;
        prmt.b32 first, $2, $3, 0x5410;
        prmt.b32 second, $4, $5, 0x5410;
        prmt.b32 $0, first, second, 0x7531;
        prmt.b32 $1, first, second, 0x6420; }"""
    return _words_of(first, second, asm)


@triton.jit
def _fours_of(values):
    """[PIECES, 1, ROWS, 8] -> the first of each four numbers, the second, third and fourth ones."""
    return _split_four(tl.reshape(values, [values.shape[0], values.shape[2], 2, 4]))


@triton.jit
def _words_of(first, second, ASM: tl.constexpr):
    """What becomes of each of four fours: the first int32 [PIECES, 1, ROWS] of all, then the second."""
    a, b = _two_words_of(first, ASM)
    c, d = _two_words_of(second, ASM)
    return a + c + b + d


@triton.jit
def _two_words_of(numbers, ASM: tl.constexpr):
    first, second = tl.inline_asm_elementwise(
        ASM, "=&r,=r,f,f,f,f", numbers, dtype=(tl.int32, tl.int32), is_pure=True, pack=1
    )
    shape: tl.constexpr = [first.shape[0], 1, first.shape[1], 2]
    return tl.split(tl.reshape(first, shape)), tl.split(tl.reshape(second, shape))


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
