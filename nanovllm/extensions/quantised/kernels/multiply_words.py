"""Sums of products of 16 bytes of a quantised weight and the inputs that they meet, in few instructions.

Codes that are integers are multiplied as such, four at a time, by inputs that have become integers of 15 bits
for that, and their sums are exact. Other codes become float16, two at a time, which is exact, and are
multiplied and added so. Triton has none of these operations, so a GPU computes them in assembly language; the
interpreter does the same in float32.
"""

from string import Template

import torch

from nanovllm.extensions.quantised.kernels.nf4 import FP4_NUMBERS, NUMBERS, bytes_of
from nanovllm.extensions.quantised.kernels.quantised_weight import (
    FP4,
    INT4,
    MXFP4,
    code_to_float,
    scale_pair,
)
from nanovllm.kernels.runtime import IS_INTERPRETED, masked_load, tl, triton

BEGIN = """{ .reg .b32 code, sum, more, sign, place, opposite, low, high, other;
    .reg .b16 first, second; .reg .f32 rest;
    mov.b32 sum, 0; mov.b32 more, 0;"""


def _for_each_word(instructions: str, first: int = 1) -> str:
    """
    These for each of four words of codes, the operands from `first` on. $w is the word. Its codes of 8 bits,
    or those in the low halves of its bytes, meet the inputs in $a and $b, and those in the high halves $c and
    $d: pairs in float16, or high and low bytes of four integers.
    """
    text = ""
    for i in range(4):
        # Behind the codes stand words of each eight inputs: two of the first kind, two of the second.
        a = first + 4 + 4 * (i // 2) + i % 2
        places = {"w": first + i, "a": a, "b": a + 2, "c": a + 8, "d": a + 10}
        text += Template(instructions).substitute({name: f"${place}" for name, place in places.items()})
    return text


def _end(*sums: str) -> str:
    """The results are these sums, of pairs."""
    return "".join(
        f"""mov.b32 {{first, second}}, {name};
        cvt.f32.f16 ${i}, first; cvt.f32.f16 rest, second; add.f32 ${i}, ${i}, rest;"""
        for i, name in enumerate(sums)
    )


MULTIPLY_FP8 = _for_each_word("""mov.b32 {first, second}, $w;
    cvt.rn.f16x2.e4m3x2 code, first;
    fma.rn.f16x2 sum, code, $a, sum;
    cvt.rn.f16x2.e4m3x2 code, second;
    fma.rn.f16x2 sum, code, $b, sum;""") + _end("sum")  # fmt: skip
# Of products with high bytes `more` is the sum. The last operand, $13 or $21, is added; of INT4 a sixteenth
# of it, for high halves are multiplied where they stand.
MULTIPLY = "dp4a.{0}.s32 more, {1}, {2}, more; dp4a.{0}.u32 sum, {1}, {3}, sum;"
MULTIPLY_LOW = MULTIPLY.format("u32", "code", "$a", "$b")
MULTIPLY_HIGH = MULTIPLY.format("u32", "code", "$c", "$d")
END_INTEGERS = "shl.b32 more, more, 8; add.s32 $0, more, sum;"
MULTIPLY_INT8 = f"""mov.b32 sum, $13;
    {_for_each_word(MULTIPLY.format("s32", "$w", "$a", "$b"))}{END_INTEGERS}"""
MULTIPLY_INT4 = f"""mov.b32 sum, $21;
    {_for_each_word("and.b32 code, $w, 0xf0f0f0f0;" + MULTIPLY_HIGH)}
    shr.s32 more, more, 4; shr.s32 sum, sum, 4;
    {_for_each_word("and.b32 code, $w, 0x0f0f0f0f;" + MULTIPLY_LOW)}{END_INTEGERS}"""


def _move_and_multiply(place: int, inputs: str) -> str:
    """
    The codes of MXFP4 at this bit of either 16 become float16: a sign there is bit 15, and the other three
    bits, from 9 on, are 2^-14 times the number.
    """
    move = f"shl.b32 code, $w, {9 - place};" if place < 9 else f"shr.b32 code, $w, {place - 9};"
    return f"""{move} and.b32 code, code, 0x0e000e00;
        shl.b32 sign, $w, {12 - place}; and.b32 sign, sign, 0x80008000; or.b32 code, code, sign;
        fma.rn.f16x2 sum, code, {inputs}, sum;"""


def _look_up_and_multiply(numbers: list[float], high: str) -> str:
    """A word of places in a table; the products of high halves are added to the sum of that name."""
    table_bytes = bytes_of(numbers, torch.float16)
    return f"""mov.b32 place, $w; xor.b32 opposite, place, 0x88888888;{table_bytes}
    prmt.b32 code, low, high, 0x6240;
    fma.rn.f16x2 sum, code, $a, sum;
    prmt.b32 code, low, high, 0x7351;
    fma.rn.f16x2 {high}, code, $c, {high};
    shr.b32 place, place, 16; shr.b32 opposite, opposite, 16;{table_bytes}
    prmt.b32 code, low, high, 0x6240;
    fma.rn.f16x2 sum, code, $b, sum;
    prmt.b32 code, low, high, 0x7351;
    fma.rn.f16x2 {high}, code, $d, {high};"""


# Low halves of bytes 0 and 2, and of bytes 1 and 3; then the high halves.
MULTIPLY_MXFP4 = _for_each_word(
    "".join(map(_move_and_multiply, (0, 8, 4, 12), ("$a", "$b", "$c", "$d")))
) + _end("sum")
MULTIPLY_NF4 = _for_each_word(_look_up_and_multiply(NUMBERS, "sum")) + _end("sum")
MULTIPLY_FP4 = _for_each_word(_look_up_and_multiply(FP4_NUMBERS, "more"), 2) + _end("sum", "more")
BY_KIND = MULTIPLY_FP8, MULTIPLY_INT8, MULTIPLY_INT4, MULTIPLY_MXFP4, MULTIPLY_NF4, MULTIPLY_FP4
ASSEMBLY = tl.constexpr(tuple(f"{BEGIN}{each}}}" for each in BY_KIND))
# The constraints of their operands, by kind: results, and then so many words, four of codes, the inputs as
# `prepare_inputs` makes them, and what sums of integers start with.
RESULTS = ("=f", 12), ("=r", 13), ("=r", 21), ("=f", 20), ("=f", 20), ("=&f,=&f", 20)
CONSTRAINTS = tl.constexpr(tuple(results + ",r" * count for results, count in RESULTS))
IS_INTEGER = tl.constexpr((False, True, True, False, False, False))  # by kind
EXPONENTS = tl.constexpr((2, 0, 0, 12, 2, 2))  # that the largest input gets, by kind
STEPS = tl.constexpr(2.0**13)  # of integers that inputs from -2 to 2 become


@triton.jit
def load_inputs(x, norm_weight, share, column, is_there, KIND):
    """
    The inputs that meet pieces of codes, from `column` [PIECES, 1, 1, 1] on, times the norm's weights and
    times a share, unless these are None: by eights, as many as a thread loads at once, so that threads need
    not exchange any. -> two float32 [PIECES, 1, ROWS, 8], or four beside codes of 4 bits, and squares.
    """
    eights, squares = (), 0.0
    for i in tl.static_range(4 if KIND >= INT4 else 2):
        place = column + (8 * i + tl.arange(0, 8))[None, None, None, :]
        values = masked_load(x + place, is_there).to(tl.float32)
        squares += values * values
        if norm_weight is not None:
            values *= masked_load(norm_weight + place, is_there).to(tl.float32)
        if share is not None:
            values *= share
        eights += (values,)
    return eights, squares


@triton.jit
def prepare_inputs(eights, factor, KIND):
    """
    -> what `multiply_pieces` wants of inputs, and the factor of its results, times what they are divided by.
    As integers, inputs have 14 bits and a sign, as the largest of a piece has them: each piece has its unit
    [PIECES, 1, ROWS], which is infinite if one of the inputs is not finite. In float16, they are divided by a
    power of two for each row, so that the largest becomes 4 to 8, and no sum of 16 products with codes up to
    448 leaves its range; codes of MXFP4 are 2^-14 times too small there, so their inputs become 2^10 times as
    large. The interpreter, which multiplies in float32, leaves them as they are.
    """
    TO_INTEGERS: tl.constexpr = IS_INTEGER[KIND]
    sums, unit = 0.0, 1.0
    if IS_INTERPRETED:
        words = eights
        for i in tl.static_range(len(eights)):
            sums += tl.sum(eights[i], axis=3)
    else:
        largest = _largest(eights)
        if not TO_INTEGERS:
            largest = tl.max(largest, axis=0)[None, :, :]
        exponent = (largest.to(tl.int32, bitcast=True) >> 23) - 127 - EXPONENTS[KIND]
        exponent = tl.maximum(exponent, -126)
        divisor = _power_of_two(-exponent)[:, :, :, None]
        fours = ()
        for i in tl.static_range(len(eights)):
            values = eights[i] * divisor
            if TO_INTEGERS:  # above 2^23 float32 has no fractions; its last 16 bits are the integer
                values = values * STEPS + 1.5 * 2.0**23
            fours += (_split_four(tl.reshape(values, [values.shape[0], values.shape[2], 2, 4])),)
        words = ()
        for i in tl.static_range(len(fours)):
            a, b, c, d = fours[i]  # codes of MXFP4 that meet at once are two bytes apart
            words += _words_of((a, c, b, d) if KIND == MXFP4 else (a, b, c, d), TO_INTEGERS)
        if TO_INTEGERS:
            unit = _power_of_two(exponent)
            factor /= STEPS
            word = tl.full([1, 1, 1], 0x11111111 if KIND == INT4 else 0x01010101, tl.int32)  # codes of 1
            sums = _multiply((word, word, word, word) + words + (tl.zeros_like(word),), KIND)
        else:
            factor *= _power_of_two(tl.reshape(exponent, factor.shape))
            if KIND == MXFP4:
                factor *= 2.0**14
    return (words, sums, unit), factor


@triton.jit
def _largest(eights):
    """The largest absolute number of each piece and row, [PIECES, 1, ROWS]; NaN is larger than all."""
    largest = tl.abs(eights[0])
    for i in tl.static_range(1, len(eights)):
        largest = _larger(largest, tl.abs(eights[i]))
    return tl.reduce(largest, 3, _larger)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _power_of_two(exponent):
    """2 ** exponent, float32, for int32 from -126 to 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _words_of(numbers, TO_INTEGERS):
    """
    Two fours [PIECES, ROWS, 2] -> four int32 [PIECES, 1, ROWS]: of integers the high bytes of both fours, and
    then the low ones; else pairs of float16, the first ones of fours and then the second ones.
    """
    pairs: tl.constexpr = "cvt.rn.f16x2.f32 $0, $3, $2; cvt.rn.f16x2.f32 $1, $5, $4;"
    bytes: tl.constexpr = """{ .reg .b32 first, second;
        prmt.b32 first, $2, $3, 0x5410;
        prmt.b32 second, $4, $5, 0x5410;
        prmt.b32 $0, first, second, 0x7531;
        prmt.b32 $1, first, second, 0x6420; }"""
    asm: tl.constexpr = bytes if TO_INTEGERS else pairs
    first, second = tl.inline_asm_elementwise(
        asm, "=&r,=r,f,f,f,f", numbers, dtype=(tl.int32, tl.int32), is_pure=True, pack=1
    )
    shape: tl.constexpr = [first.shape[0], 1, first.shape[1], 2]
    return tl.split(tl.reshape(first, shape)) + tl.split(tl.reshape(second, shape))


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
    the low halves of bytes, and behind these high halves, whose scale FP4 has in place of an offset.
    """
    its_inputs, sums, unit = inputs
    subtracted = tl.full([1, 1, 1], ZERO_POINT, tl.int32) if grids[1] is None else zero.to(tl.int32)
    if IS_INTERPRETED:
        parts = _multiply_by_arithmetic(words, its_inputs, KIND, 0)
        if KIND >= INT4:
            more = _multiply_by_arithmetic(words, its_inputs, KIND, 4)
            if KIND != FP4:
                parts += more
        if IS_INTEGER[KIND]:
            parts -= subtracted.to(tl.float32) * sums
    else:
        operands = _split_four(words) + its_inputs
        if KIND == FP4:
            parts, more = _multiply(operands, KIND)
        elif IS_INTEGER[KIND]:
            start = sums * (-16 if KIND == INT4 else -1) * subtracted
            parts = _multiply(operands + (start,), KIND).to(tl.float32)
        else:
            parts = _multiply(operands, KIND)
    if KIND == FP4:
        return parts * scale + more * zero
    if KIND == MXFP4:
        scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    parts = parts * unit * scale
    if grids[2] is not None:
        parts += zero * (sums * unit)
    return parts


@triton.jit
def _multiply(operands, KIND):
    asm: tl.constexpr = ASSEMBLY[KIND]
    constraints: tl.constexpr = CONSTRAINTS[KIND]
    if KIND == FP4:
        return tl.inline_asm_elementwise(asm, constraints, operands, (tl.float32, tl.float32), True, 1)
    elif IS_INTEGER[KIND]:
        return tl.inline_asm_elementwise(asm, constraints, operands, tl.int32, True, 1)
    else:
        return tl.inline_asm_elementwise(asm, constraints, operands, tl.float32, True, 1)


@triton.jit
def _multiply_by_arithmetic(words, eights, KIND, shift):
    """For Triton's interpreter: sums of products of the codes at this place of each byte and their inputs."""
    codes = code_to_float(words[:, :, :, :, None] >> 8 * tl.arange(0, 4), shift, KIND)
    codes = tl.reshape(codes, [words.shape[0], words.shape[1], 1, 2, 8])
    first, second = tl.split(tl.permute(codes, [0, 1, 2, 4, 3]))
    return tl.sum(first * eights[shift // 2] + second * eights[shift // 2 + 1], axis=3)
