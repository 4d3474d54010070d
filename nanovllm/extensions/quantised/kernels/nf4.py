"""Tables of 16 numbers, of nf4 and of 4-bit floating point, and how a GPU looks four of them up at once.

The instruction `prmt` takes four halves of bytes as places in a table of eight bytes. Where a place is 8 or
more, it gives the first bit of the byte at that place less 8, eight times. So a byte of a number is what its
code finds among those of the first eight numbers, xor what the code with its first bit flipped finds among
those of the others, if the bytes of codes i and i + 8 begin with the same bit: this is what tables have their
order for. Where that bit is 1, the byte of code i + 8 stands inverted in its table.
"""

import torch

from nanovllm.kernels.runtime import IS_INTERPRETED, tl, triton

# Source: bitsandbytes' `get_4bit_type`, where they are sorted. 0 has the sign of its partner, -0.525.
NUMBERS = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.28444138169288635]
NUMBERS += [0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.44070982933044434]
NUMBERS += [-0.39491748809814453, -0.18477343022823334, -0.0, -0.09105003625154495]
NUMBERS += [0.33791524171829224, 0.5626170039176941, 0.7229568362236023, 1.0]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # the numbers of codes 0 to 7
E2M1 += [-number for number in E2M1]  # of 8 to 15
# By their places: 0, 1, 2 and 4 stand 8 before the numbers that come next. Negative ones come first.
FP4_CODES = sorted(range(16), key=lambda code: (code % 2, code < 8))
FP4_NUMBERS = [E2M1[code] for code in FP4_CODES]
TABLES = tl.constexpr((tuple(NUMBERS), tuple(FP4_NUMBERS)))
FIND_BYTE = """
    prmt.b32 {0}, {1:#010x}, {2:#010x}, place;
    prmt.b32 other, {3:#010x}, {4:#010x}, opposite;
    xor.b32 {0}, {0}, other;"""


def bytes_of(numbers: list[float], dtype: torch.dtype) -> str:
    """Instructions that find both bytes of four numbers; `opposite` has the codes with first bits flipped."""
    bits = torch.tensor(numbers, dtype=dtype, device="cpu").view(torch.int16)
    # Where the low bytes of two numbers would not begin alike, the second becomes the next smaller number:
    # nf4's 0.5626 is 0.562 in float16.
    bits[8:] -= (bits[:8] ^ bits[8:]) >> 7 & 1
    tables = bits.view(torch.uint8).view(16, 2).T.contiguous()
    tables[:, 8:] ^= 255 * (tables[:, :8] >> 7)
    low, high = tables.numpy().view("<u4")  # [4] words each
    find_low = FIND_BYTE.format("low", *low) if low.any() else "\n    mov.b32 low, 0;"
    return find_low + FIND_BYTE.format("high", *high)


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
TO_F16, TO_BF16 = (
    tl.constexpr(
        tuple(TO_NUMBERS.replace("%s", bytes_of(numbers, dtype)) for numbers in (NUMBERS, FP4_NUMBERS))
    )
    for dtype in (torch.float16, torch.bfloat16)
)


@triton.jit
def number_of(codes, TABLE):
    """float32, by arithmetic."""
    numbers = codes.to(tl.float32)
    for code in tl.static_range(16):
        numbers = tl.where(codes == code, TABLES[TABLE][code], numbers)
    return numbers


@triton.jit
def look_up(packed, dtype, TABLE):
    """uint8 -> two tensors of its shape, bfloat16 or float16: numbers in the low, and in the high halves."""
    if IS_INTERPRETED:
        return number_of(packed & 15, TABLE), number_of(packed >> 4, TABLE)
    asm: tl.constexpr = TO_BF16[TABLE] if dtype == tl.bfloat16 else TO_F16[TABLE]
    low, high = tl.inline_asm_elementwise(
        asm, "=&r,=&r,=&r,=&r,r", [packed], dtype=(tl.int16, tl.int16), is_pure=True, pack=4
    )
    return low.to(dtype, bitcast=True), high.to(dtype, bitcast=True)
