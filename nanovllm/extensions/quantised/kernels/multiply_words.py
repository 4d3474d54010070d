"""Sums of products of 16 bytes of a quantised weight and the inputs that they meet, in few instructions.

Codes become float16, two at a time, which is exact, and are multiplied and added so. Triton has no operations
on pairs, so a GPU computes them in assembly language; the interpreter does the same in float32.
"""

from nanovllm.extensions.quantised.kernels.quantised_weight import FP8, INT4, MXFP4, multiply_by_arithmetic
from nanovllm.kernels.runtime import IS_INTERPRETED, tl, triton


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
