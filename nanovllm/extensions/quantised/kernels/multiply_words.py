"""Sums of products of 16 bytes of a quantised weight and the inputs that they meet, in few instructions.

Codes become float16, two at a time, which is exact, and are multiplied and added so. Triton has no operations
on pairs, so a GPU computes them in assembly language; the interpreter does the same in float32.
"""

from string import Template

from nanovllm.extensions.quantised.kernels.quantised_weight import FP8, INT4, MXFP4, multiply_by_arithmetic
from nanovllm.kernels.runtime import IS_INTERPRETED, masked_load, tl, triton


def _assembly(begin: str, word: str) -> tl.constexpr:
    """
    `begin`, and then `word` for each of four words of codes ($1 to $4). $w is the word. The pairs of inputs
    that its codes of 8 bits meet, or those in the low halves of its bytes, are $a and $b; $c and $d are those
    of the high halves. $low and $high are what is added to codes of 4 bits that stand in these halves.
    """
    lines = [".reg .b32 code, sum;", ".reg .f16 first, second;", ".reg .f32 other;", "mov.b32 sum, 0;", begin]
    for i in range(4):
        places = dict(w=1 + i, a=5 + 2 * i, b=6 + 2 * i, c=13 + 2 * i, d=14 + 2 * i, low=21, high=22)
        lines.append(Template(word).substitute({name: f"${place}" for name, place in places.items()}))
    lines += ["mov.b32 {first, second}, sum;", "cvt.f32.f16 $0, first;", "cvt.f32.f16 other, second;"]
    return tl.constexpr("\n".join(["{", *lines, "add.f32 $0, $0, other;", "}"]))


MULTIPLY_FP8 = _assembly(
    ".reg .b16 low, high;",
    """mov.b32 {low, high}, $w;
    cvt.rn.f16x2.e4m3x2 code, low;
    fma.rn.f16x2 sum, code, $a, sum;
    cvt.rn.f16x2.e4m3x2 code, high;
    fma.rn.f16x2 sum, code, $b, sum;""",
)
# With its sign bit flipped a byte is 128 + code; beside 0x64 that is the number 1152 + code.
MULTIPLY_INT8 = _assembly(
    ".reg .b32 biased, bias; mov.b32 bias, 0xe480e480;",  # -1152
    """xor.b32 biased, $w, 0x80808080;
    prmt.b32 code, biased, 0x64646464, 0x7170;
    add.f16x2 code, code, bias;
    fma.rn.f16x2 sum, code, $a, sum;
    prmt.b32 code, biased, 0x64646464, 0x7372;
    add.f16x2 code, code, bias;
    fma.rn.f16x2 sum, code, $b, sum;""",
)
# A low half beside 0x64 is the number 1024 + code. A high half, where it stands, is 1024 + 16 * code, and a
# sixteenth of that 64 + code. $low and $high are -1024 - zero and -64 - zero.
MULTIPLY_INT4 = _assembly(
    ".reg .b32 word, sixteenth; mov.b32 sixteenth, 0x2c002c00;",
    """mov.b32 word, $w;
    lop3.b32 code, word, 0x000f000f, 0x64006400, 0xea;
    add.f16x2 code, code, $low;
    fma.rn.f16x2 sum, code, $a, sum;
    lop3.b32 code, word, 0x00f000f0, 0x64006400, 0xea;
    fma.rn.f16x2 code, code, sixteenth, $high;
    fma.rn.f16x2 sum, code, $c, sum;
    shr.b32 word, word, 8;
    lop3.b32 code, word, 0x000f000f, 0x64006400, 0xea;
    add.f16x2 code, code, $low;
    fma.rn.f16x2 sum, code, $b, sum;
    lop3.b32 code, word, 0x00f000f0, 0x64006400, 0xea;
    fma.rn.f16x2 code, code, sixteenth, $high;
    fma.rn.f16x2 sum, code, $d, sum;""",
)
# The bits of a half, placed where float16 has them, are 2^-14 times its number: those of bytes 0 and 2, and
# of bytes 1 and 3, first their low halves and then the high ones.
MULTIPLY_MXFP4 = _assembly(
    ".reg .b32 bits, sign;",
    """shl.b32 bits, $w, 9;
    and.b32 bits, bits, 0x0e000e00;
    shl.b32 sign, $w, 12;
    and.b32 sign, sign, 0x80008000;
    or.b32 code, bits, sign;
    fma.rn.f16x2 sum, code, $a, sum;
    shl.b32 bits, $w, 1;
    and.b32 bits, bits, 0x0e000e00;
    shl.b32 sign, $w, 4;
    and.b32 sign, sign, 0x80008000;
    or.b32 code, bits, sign;
    fma.rn.f16x2 sum, code, $b, sum;
    shl.b32 bits, $w, 5;
    and.b32 bits, bits, 0x0e000e00;
    shl.b32 sign, $w, 8;
    and.b32 sign, sign, 0x80008000;
    or.b32 code, bits, sign;
    fma.rn.f16x2 sum, code, $c, sum;
    shr.b32 bits, $w, 3;
    and.b32 bits, bits, 0x0e000e00;
    and.b32 sign, $w, 0x80008000;
    or.b32 code, bits, sign;
    fma.rn.f16x2 sum, code, $d, sum;""",
)
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
def load_inputs(x, norm_weight, share, column, is_there, has_column, KIND: tl.constexpr):
    """
    The inputs that meet pieces of codes, float32 [PIECES, 1, ROWS, 16], times the norm's weights and times a
    share, unless these are None: `values`, and `others`, which are 16 columns behind, for codes of 4 bits.
    -> values, others, squares before that, the largest of each piece [PIECES, 1, ROWS].
    """
    values, squares = _load_half(x + column, norm_weight, share, column, is_there, has_column)
    largest = tl.max(tl.abs(values), axis=3)
    others = values
    if KIND >= INT4:
        address = x + column + 16
        others, more = _load_half(address, norm_weight, share, column + 16, is_there, has_column)
        squares += more
        largest = tl.maximum(largest, tl.max(tl.abs(others), axis=3))
    return values, others, squares, largest


@triton.jit
def _load_half(address, norm_weight, share, column, is_there, has_column):
    values = masked_load(address, is_there).to(tl.float32)
    squares = values * values
    if norm_weight is not None:
        values *= masked_load(norm_weight + column, has_column).to(tl.float32)
    if share is not None:
        values *= share
    return values, squares


@triton.jit
def range_exponent(largest, KIND: tl.constexpr):
    """
    The exponent of the power of two that the inputs are divided by. The largest becomes 4 to 8, so that no
    sum of 16 products with codes up to 448 leaves the range of float16. Codes in floating point of 4 bits
    come 2^14 times too small; there it becomes 2^10 times as large.
    """
    LARGEST: tl.constexpr = 139 if KIND == MXFP4 else 129
    return tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) - LARGEST, -126)


@triton.jit
def prepare_inputs(values, others, divisor, KIND: tl.constexpr, PIECES: tl.constexpr, ROWS: tl.constexpr):
    """
    Divide inputs by this power of two: -> what `multiply_piece` wants, the last of which are their sums. The
    interpreter multiplies in float32, where any range will do.
    """
    pairs, other_pairs = values, others
    if not IS_INTERPRETED:
        values *= divisor
        pairs = pairs_of(values, PIECES, ROWS, 2 if KIND >= INT4 else 1)
    sums = tl.sum(values, axis=3)  # [PIECES, 1, ROWS]
    if KIND >= INT4:
        if not IS_INTERPRETED:
            others *= divisor
            other_pairs = pairs_of(others, PIECES, ROWS, 2)
        sums += tl.sum(others, axis=3)
    return values, others, pairs, other_pairs, sums


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
def multiply_pieces(words, scale, zero, inputs, grids, KIND: tl.constexpr, ZERO_POINT: tl.constexpr):
    """
    Sums of products of a weight and the `prepare_inputs` that it meets, [PIECES, HEIGHT, ROWS]: of the codes
    in words [PIECES, HEIGHT, 1, 4], with the scale of each piece, and its zero or else its offset. `grids`
    (scales, zeros, offsets) say which there are.
    """
    values, others, pairs, other_pairs, sums = inputs
    subtracted = tl.full([1, 1, 1], ZERO_POINT, tl.int32) if grids[1] is None else zero
    parts = multiply_words(words, values, others, pairs, other_pairs, subtracted, sums, KIND)
    if KIND < INT4 and grids[1] is not None:
        parts -= zero.to(tl.float32) * sums
    if KIND == MXFP4:
        scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    parts *= scale.to(tl.float32)
    if grids[2] is not None:
        parts += zero.to(tl.float32) * sums
    return parts
