"""Tables of 16 numbers, of nf4 and of 4-bit floating point, and how a GPU looks four of them up at once.

The instruction `prmt` takes four halves of bytes as places in a table of eight bytes. Where a place is 8 or
more, it gives the first bit of the byte at that place less 8, eight times. So a byte of a number is what its
code finds among those of the first eight numbers, xor what the code with its first bit flipped finds among
those of the others, if the bytes of codes i and i + 8 begin with the same bit: this is what tables have their
order for. Where that bit is 1, the byte of code i + 8 stands inverted in its table.
"""

from nanovllm.kernels.runtime import IS_INTERPRETED, tl, triton

# Source: bitsandbytes' `get_4bit_type`, where they are sorted.
NUMBERS = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.28444138169288635]
NUMBERS += [0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.44070982933044434]
NUMBERS += [-0.39491748809814453, -0.18477343022823334, 0.0, -0.09105003625154495]
NUMBERS += [0.33791524171829224, 0.5626170039176941, 0.7229568362236023, 1.0]
# Those of e2m1: 0, 1, 2 and 4, and 8 places behind each of them the number that comes next.
FP4_NUMBERS = [-0.0, -1.0, -2.0, -4.0, 0.0, 1.0, 2.0, 4.0, -0.5, -1.5, -3.0, -6.0, 0.5, 1.5, 3.0, 6.0]
TABLES = tl.constexpr((tuple(NUMBERS), tuple(FP4_NUMBERS)))
BF16_BYTES = """
    prmt.b32 low, 0x92063280, 0xe27c25a3, place;
    prmt.b32 other, 0x45003d35, 0x7f391052, opposite;
    xor.b32 low, low, other;
    prmt.b32 high, 0xbebfbfbf, 0x3e3e3e3d, place;
    prmt.b32 other, 0x427f4141, 0x3f3f3f3e, opposite;
    xor.b32 high, high, other;"""
# Here 0.5626 is 0.562, or its low byte would not begin as that of 0.161.
F16_BYTES = """
    prmt.b32 low, 0x8d339200, 0x0de02618, place;
    prmt.b32 other, 0x2b001552, 0x00367f68, opposite;
    xor.b32 low, low, other;
    prmt.b32 high, 0xb4b8b9bc, 0x3733312d, place;
    prmt.b32 other, 0x527f4e49, 0x3c393835, opposite;
    xor.b32 high, high, other;"""
FP4_BF16_BYTES = """
    prmt.b32 low, 0x80008000, 0x80008000, place;
    prmt.b32 other, 0x3f403f00, 0x3f403f00, opposite;
    xor.b32 low, low, other;
    prmt.b32 high, 0xc0c0bf80, 0x40403f00, place;
    prmt.b32 other, 0x3f3f4040, 0x40403f3f, opposite;
    xor.b32 high, high, other;"""
FP4_F16_BYTES = """
    mov.b32 low, 0;
    prmt.b32 high, 0xc4c0bc80, 0x44403c00, place;
    prmt.b32 other, 0x393d4147, 0x46423e38, opposite;
    xor.b32 high, high, other;"""
# The first two bytes' low halves are places 0 and 2, their high halves 1 and 3.
TO_NUMBERS = """{ .reg .b32 place, opposite, low, high, other;
    mov.b32 place, $4;
    xor.b32 opposite, place, 0x88888888;%s
    prmt.b32 $0, low, high, 0x6240;
    prmt.b32 $2, low, high, 0x7351;
    shr.b32 place, place, 16;
    shr.b32 opposite, opposite, 16;%s
    prmt.b32 $1, low, high, 0x6240;
    prmt.b32 $3, low, high, 0x7351; }"""
TO_F16 = tl.constexpr(tuple(TO_NUMBERS % (each, each) for each in (F16_BYTES, FP4_F16_BYTES)))
TO_BF16 = tl.constexpr(tuple(TO_NUMBERS % (each, each) for each in (BF16_BYTES, FP4_BF16_BYTES)))


@triton.jit
def number_of(codes, TABLE: tl.constexpr):
    """float32, by arithmetic."""
    numbers = codes.to(tl.float32)
    for code in tl.static_range(16):
        numbers = tl.where(codes == code, TABLES[TABLE][code], numbers)
    return numbers


@triton.jit
def look_up(packed, dtype: tl.constexpr, TABLE: tl.constexpr):
    """uint8 -> two tensors of its shape, bfloat16 or float16: numbers in the low, and in the high halves."""
    if IS_INTERPRETED:
        return number_of(packed & 15, TABLE), number_of(packed >> 4, TABLE)
    asm: tl.constexpr = TO_BF16[TABLE] if dtype == tl.bfloat16 else TO_F16[TABLE]
    low, high = tl.inline_asm_elementwise(
        asm, "=&r,=&r,=&r,=&r,r", [packed], dtype=(tl.int16, tl.int16), is_pure=True, pack=4
    )
    return low.to(dtype, bitcast=True), high.to(dtype, bitcast=True)
