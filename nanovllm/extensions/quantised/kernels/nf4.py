"""The 16 numbers of nf4, and how a GPU looks four of them up at once.

The instruction `prmt` takes four halves of bytes as places in a table of eight bytes. Where a place is 8 or
more, it gives the first bit of the byte at that place less 8, eight times. So a byte of a number is what its
code finds among those of the first eight numbers, xor what the code with its first bit flipped finds among
those of the others, if the bytes of codes i and i + 8 begin with the same bit: this is what NUMBERS has its
order for. Where that bit is 1, the byte of code i + 8 stands inverted in its table.
"""

from nanovllm.kernels.runtime import IS_INTERPRETED, tl, triton

# Source: bitsandbytes' `get_4bit_type`, where they are sorted.
NUMBERS = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.28444138169288635]
NUMBERS += [0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.44070982933044434]
NUMBERS += [-0.39491748809814453, -0.18477343022823334, 0.0, -0.09105003625154495]
NUMBERS += [0.33791524171829224, 0.5626170039176941, 0.7229568362236023, 1.0]
AS_CONSTEXPR = tl.constexpr(tuple(NUMBERS))
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
TO_F16 = tl.constexpr(TO_NUMBERS % (F16_BYTES, F16_BYTES))
TO_BF16 = tl.constexpr(TO_NUMBERS % (BF16_BYTES, BF16_BYTES))


@triton.jit
def number_of(codes):
    """float32, by arithmetic."""
    numbers = codes.to(tl.float32)
    for code in tl.static_range(16):
        numbers = tl.where(codes == code, AS_CONSTEXPR[code], numbers)
    return numbers


@triton.jit
def look_up(packed, dtype: tl.constexpr):
    """uint8 -> two tensors of its shape, bfloat16 or float16: numbers in the low, and in the high halves."""
    if IS_INTERPRETED:
        return number_of(packed & 15), number_of(packed >> 4)
    asm: tl.constexpr = TO_BF16 if dtype == tl.bfloat16 else TO_F16
    low, high = tl.inline_asm_elementwise(
        asm, "=&r,=&r,=&r,=&r,r", [packed], dtype=(tl.int16, tl.int16), is_pure=True, pack=4
    )
    return low.to(dtype, bitcast=True), high.to(dtype, bitcast=True)
