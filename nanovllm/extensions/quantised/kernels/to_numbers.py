"""How codes become bfloat16 or float16, in which a GPU's matrix unit multiplies them: grouped_codes.py.

Their bits are placed beside an exponent: a conversion instruction would cost several times as much. A GPU
does so for four bytes at once, in assembly language; the interpreter computes in float32.
"""

from string import Template
from typing import Any

from nanovllm.extensions.quantised.kernels.quantised_weight import FP8, MXFP4, code_to_float
from nanovllm.kernels.runtime import IS_INTERPRETED, tl, triton


def _both(asm: str, **of_dtypes: tuple[str, str]) -> Any:
    """Instructions for numbers in bfloat16, and for those in float16."""
    filled = (
        Template(asm).substitute(dict(zip(of_dtypes, each, strict=True)))
        for each in zip(*of_dtypes.values(), strict=True)
    )
    return tl.constexpr(tuple(filled))


# Moved to where the dtype has them, the bits of e4m3 are 2^-120 or 2^-8 times the number. GPUs before Hopper
# cannot multiply pairs without adding: -0, which changes nothing.
E4M3_TO_NUMBERS = _both(
    """{
    .reg .b32 pair, sign, factor, zero;
    mov.b32 factor, $factor;
    mov.b32 zero, 0x80008000;
    prmt.b32 pair, $$2, 0, 0x1404;
    and.b32 sign, pair, 0x80008000;
    shr.b32 pair, pair, $shift;
    and.b32 pair, pair, $mask;
    or.b32 pair, pair, sign;
    fma.rn.$type $$0, pair, factor, zero;
    prmt.b32 pair, $$2, 0, 0x3424;
    and.b32 sign, pair, 0x80008000;
    shr.b32 pair, pair, $shift;
    and.b32 pair, pair, $mask;
    or.b32 pair, pair, sign;
    fma.rn.$type $$1, pair, factor, zero;
    }""",
    factor=("0x7b807b80", "0x5c005c00"),
    shift=("4", "1"),
    mask=("0x07f007f0", "0x3f803f80"),
    type=("bf16x2", "f16x2"),
)
# The halves of four bytes, each of which becomes the last bits of a number.
LOW_HALVES, HIGH_HALVES = (
    _both(
        """{
        .reg .b32 halves;
        shr.b32 halves, $$2, $shift;
        and.b32 halves, halves, 0x0f0f0f0f;
        prmt.b32 $$0, halves, $above, 0x7170;
        prmt.b32 $$1, halves, $above, 0x7372;
        }""",
        shift=(shift, shift),
        above=("0x43434343", "0x64646464"),
    )
    for shift in ("0", "4")
)
E2M1_TO_NUMBERS = _both(
    """{
    .reg .b32 pair, bits, sign;
    prmt.b32 pair, $$4, 0, 0x1404;
    $low bits, pair, $by;
    and.b32 bits, bits, $mask;
    shl.b32 sign, pair, 4;
    and.b32 sign, sign, 0x80008000;
    or.b32 $$0, bits, sign;
    shr.b32 bits, pair, $shift;
    and.b32 bits, bits, $mask;
    and.b32 sign, pair, 0x80008000;
    or.b32 $$2, bits, sign;
    prmt.b32 pair, $$4, 0, 0x3424;
    $low bits, pair, $by;
    and.b32 bits, bits, $mask;
    shl.b32 sign, pair, 4;
    and.b32 sign, sign, 0x80008000;
    or.b32 $$1, bits, sign;
    shr.b32 bits, pair, $shift;
    and.b32 bits, bits, $mask;
    and.b32 sign, pair, 0x80008000;
    or.b32 $$3, bits, sign;
    }""",
    low=("shr.b32", "shl.b32"),
    by=("2", "1"),
    shift=("6", "3"),
    mask=("0x01c001c0", "0x0e000e00"),
)


@triton.jit
def codes_to_numbers(codes, KIND, dtype):
    """uint8 [..., n], codes of 8 bits -> this shape and dtype, which is exact; float32 if interpreted."""
    if IS_INTERPRETED:
        return code_to_float(codes.to(tl.int32), 0, KIND)
    if KIND == FP8:
        asm: tl.constexpr = E4M3_TO_NUMBERS[dtype == tl.float16]
        bits = tl.inline_asm_elementwise(asm, "=r,=r,r", [codes], dtype=tl.int16, is_pure=True, pack=4)
        return bits.to(dtype, bitcast=True)
    return codes.to(tl.int8, bitcast=True).to(tl.float32).to(dtype)


@triton.jit
def halves_to_numbers(packed, dtype):
    """
    uint8 -> two tensors of its shape: the codes in the low, and in the high halves, and 128 more in bfloat16,
    1024 more in float16, where a code is the last bits of such a number.
    """
    F16: tl.constexpr = dtype == tl.float16
    if IS_INTERPRETED:
        above: tl.constexpr = 1024 if F16 else 128
        return (packed & 15).to(tl.float32) + above, (packed >> 4).to(tl.float32) + above
    low_asm: tl.constexpr = LOW_HALVES[F16]
    low = tl.inline_asm_elementwise(low_asm, "=r,=r,r", [packed], dtype=tl.int16, is_pure=True, pack=4)
    high_asm: tl.constexpr = HIGH_HALVES[F16]
    high = tl.inline_asm_elementwise(high_asm, "=r,=r,r", [packed], dtype=tl.int16, is_pure=True, pack=4)
    return low.to(dtype, bitcast=True), high.to(dtype, bitcast=True)


@triton.jit
def e2m1_to_numbers(packed, dtype):
    """
    uint8 -> two tensors of its shape: the numbers in the low and in the high halves, times 2^-126 in bfloat16
    or 2^-14 in float16 (where it has these bits). `power_of_two` makes up for that.
    """
    if IS_INTERPRETED:
        words = packed.to(tl.int32)
        return code_to_float(words, 0, MXFP4), code_to_float(words, 4, MXFP4)
    asm: tl.constexpr = E2M1_TO_NUMBERS[dtype == tl.float16]
    low, high = tl.inline_asm_elementwise(
        asm, "=&r,=&r,=&r,=&r,r", [packed], dtype=(tl.int16, tl.int16), is_pure=True, pack=4
    )
    return low.to(dtype, bitcast=True), high.to(dtype, bitcast=True)


@triton.jit
def power_of_two(scale, dtype):
    """
    2^(scale - 127) for bytes up to 128, times what `e2m1_to_numbers` leaves out. In float16 those below 2^-28
    are 0.
    """
    if IS_INTERPRETED:
        return tl.exp2(scale.to(tl.float32) - 127)
    ABOVE: tl.constexpr = -98 if dtype == tl.float16 else 126
    MANTISSA: tl.constexpr = 10 if dtype == tl.float16 else 7  # bits
    exponent = tl.maximum(scale.to(tl.int32) + ABOVE, 0) << MANTISSA
    return exponent.to(tl.int16).to(dtype, bitcast=True)
