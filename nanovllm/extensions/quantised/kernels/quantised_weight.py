"""Weights of 4 and 8 bits: what kernels know of them.

weight = (code - zero) * scale + offset, one of each for a tile of the matrix. A code is a byte (e4m3 or
integer), or half of one: then a block of 32 inputs is 16 bytes, whose low halves are its first 16 codes and
whose high halves are the others, so that a thread that reads 16 bytes has neighbours in both.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.extensions.quantised.kernels.nf4 import E2M1, FP4_NUMBERS, NUMBERS, look_up, number_of
from nanovllm.kernels import runtime
from nanovllm.kernels.runtime import cdiv, masked_load, tl, triton, use_triton

BLOCK = 32  # inputs whose 4-bit codes are packed together
HALF = BLOCK // 2
PIECE_BYTES = 16  # that a thread reads at once
TILE = 2048  # weights of a row that a program converts
BRICK_ROWS, BRICK_PIECES = 16, 4  # of MXFP4 in bricks: rows, and blocks of inputs
# Kinds of codes by the dtype that holds them, and the same as numbers for kernels. The others have 4 bits
# too: floating point (e2m1), whose scales are powers of two (e8m0); and places in a table, that of nf4 or
# that of e2m1's numbers. The latter may have a scale for 16 inputs, two for those of a piece.
KINDS = [torch.float8_e4m3fn, torch.int8, torch.uint8]
NF4_TABLE, FP4_TABLE = 4, 5
FP8, INT8, INT4, MXFP4, NF4, FP4 = map(tl.constexpr, range(FP4_TABLE + 1))
NUMBERS_OF_CODES = {3: E2M1, NF4_TABLE: NUMBERS, FP4_TABLE: FP4_NUMBERS}  # by kind


class QuantisedWeight(NamedTuple):
    """
    A matrix [out, in]. `scales`, `zeros` and `offsets` are [rows of tiles, columns of tiles], `tile` is rows
    and columns of one; the last may be cut off by the matrix's end. Without `zeros` every code's zero is
    `zero_point`; there are no `zeros` beside `offsets`. Codes and scales may also be `in_bricks`, for
    some kernels.
    """

    codes: Tensor  # float8_e4m3fn or int8 [out, in]; or uint8 [out, bytes] of 4-bit codes
    shape: tuple[int, int]
    scales: Tensor
    tile: tuple[int, int]
    zeros: Tensor | None = None  # int8 or uint8
    zero_point: int = 0
    offsets: Tensor | None = None
    largest: Tensor | None = None  # uint8 [out], the largest scale of a row; only if it is `in_bricks`
    product_dtype: torch.dtype = torch.float32  # of codes times scales, where a CPU makes a whole matrix
    table: int = 0  # NF4_TABLE or FP4_TABLE, if codes are places there
    rounds_inputs: bool = False  # in bricks: to 8 bits in floating point, for more rows than a gemv has

    @property
    def kind(self) -> int:
        """FP8, INT8, INT4, MXFP4, NF4 or FP4, for kernels."""
        return self.table or KINDS.index(self.codes.dtype) + self.is_mxfp4

    @property
    def is_mxfp4(self) -> bool:
        return self.scales.dtype == torch.float8_e8m0fnu

    @property
    def is_fp8(self) -> bool:
        return self.codes.dtype == torch.float8_e4m3fn

    @property
    def codes_per_byte(self) -> int:
        return 2 if self.codes.dtype == torch.uint8 else 1

    @property
    def group(self) -> int:
        """Inputs that share a scale; 0 if a whole row does, and the scale may be applied to its sum."""
        is_fp4 = self.is_mxfp4 or self.table == FP4_TABLE
        is_row = self.scales.shape[1] == 1 and self.offsets is None and not is_fp4
        return 0 if is_row else self.tile[1]

    @property
    def constants(self) -> dict[str, int]:
        """For kernels."""
        group = BLOCK if self.table == FP4_TABLE else self.group
        return {"KIND": self.kind, "GROUP": group, "TILE_ROWS": self.tile[0], "ZERO_POINT": self.zero_point}

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        """For kernels: codes as numbers of this dtype, scales, zeros and offsets."""
        return self.codes.view(dtype), self.readable_scales, self.zeros, self.offsets

    @property
    def readable_scales(self) -> Tensor:
        """Those of MXFP4 as bytes, which are exponents; those of FP4 as integers, see `scale_pair`."""
        if self.table == FP4_TABLE:
            return self.scales.view(torch.int32 if self.scales.itemsize == 2 else torch.int64)
        return self.scales.view(torch.uint8) if self.is_mxfp4 else self.scales

    @property
    def is_in_bricks(self) -> bool:
        return self.largest is not None

    def can_be_read(self) -> bool:
        """Whether kernels can read it: tiles do not cut through what a thread reads at once."""
        unit = PIECE_BYTES * self.codes_per_byte
        has_whole_groups = self.group == HALF if self.table == FP4_TABLE else self.group % unit == 0
        return self.shape[1] % unit == 0 and has_whole_groups

    def codes_of(self, rows: slice) -> Tensor:
        """These rows' codes, [rows, in]; numbers if they are in floating point."""
        if self.codes_per_byte == 1:
            return self.codes[rows]
        codes = unpack(self.codes[rows])[:, : self.shape[1]]
        numbers = NUMBERS_OF_CODES.get(self.kind)
        return codes if numbers is None else torch.tensor(numbers, device=codes.device)[codes.int()]


def unpack(packed: Tensor, bits: int = 4, run: int = HALF) -> Tensor:
    """Bytes [..., n] to their fields of so many bits: of every `run` of them first the lowest ones."""
    if bits == 8:
        return packed
    rest, found = packed.unflatten(-1, (-1, run)), []
    for _ in range(bits, 8, bits):
        found.append(rest & (1 << bits) - 1)
        rest = rest >> bits
    return torch.stack([*found, rest], dim=-2).flatten(-3)


def pack(codes: Tensor) -> Tensor:
    """uint8 [rows, n], codes of 4 bits -> uint8 [rows, bytes of whole blocks]."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % BLOCK))
    low, high = padded.unflatten(-1, (-1, 2, HALF)).unbind(-2)
    return (low | high << 4).flatten(-2)


def in_bricks(weight: QuantisedWeight) -> QuantisedWeight:
    """
    MXFP4 with codes [out / BRICK_ROWS, bricks of a row, BRICK_ROWS, bytes], and scales [.., BRICK_PIECES]:
    what a program reads at once of neighbouring rows is one piece of memory. Zeros fill up the last ones.
    """
    scales = weight.readable_scales
    codes = _bricks(weight.codes, BRICK_PIECES * PIECE_BYTES)
    bricks = _bricks(scales, BRICK_PIECES).view(weight.scales.dtype)
    return weight._replace(codes=codes, scales=bricks, largest=scales.amax(1))


def _bricks(matrix: Tensor, width: int) -> Tensor:
    rows, size = matrix.shape
    bricks = matrix.new_empty(rows // BRICK_ROWS, cdiv(size, width), BRICK_ROWS, width)
    if runtime.compiling_for is None:  # else only the shape counts
        padded = torch.nn.functional.pad(matrix, (0, -size % width))
        bricks.copy_(padded.unflatten(1, (-1, width)).unflatten(0, (-1, BRICK_ROWS)).transpose(1, 2))
    return bricks


def dequantise_torch(weight: QuantisedWeight, rows: slice, dtype: torch.dtype) -> Tensor:
    """These rows of the weight, which begin with a tile, [rows, in]. Every step is rounded to `dtype`."""
    codes = weight.codes_of(rows).to(dtype)
    if weight.zeros is not None:
        codes -= _expand(weight, weight.zeros, rows).to(dtype)
    elif weight.zero_point:
        codes -= weight.zero_point
    codes.mul_(_expand(weight, weight.scales, rows).to(dtype))
    return codes if weight.offsets is None else codes.add_(_expand(weight, weight.offsets, rows).to(dtype))


def dequantise(weight: QuantisedWeight, dtype: torch.dtype) -> Tensor:
    """The whole weight [out, in], rounded once."""
    if not use_triton(weight.codes) or weight.is_mxfp4 or not weight.can_be_read():
        return dequantise_torch(weight, slice(0, weight.shape[0]), torch.float32).to(dtype)
    rows, width = weight.shape
    out = torch.empty(rows, width, dtype=dtype, device=weight.codes.device)
    grid = rows, cdiv(width, TILE)
    _dequantise_kernel[grid](weight.tensors(torch.uint8), out, **weight.constants, WIDTH=width, SIZE=TILE)
    return out


def _expand(weight: QuantisedWeight, grid: Tensor, rows: slice) -> Tensor:
    """What a grid of tiles holds for each weight of these rows."""
    height, width = weight.tile
    grid = grid[rows.start // height : cdiv(rows.stop, height)]
    if height > 1:
        grid = grid.repeat_interleave(height, 0)[: rows.stop - rows.start]
    return grid if grid.shape[1] == 1 else grid.repeat_interleave(width, 1)[:, : weight.shape[1]]


@triton.jit
def input_of(byte, KIND):
    """The input that meets a byte's code, or its low half; the high half's is 16 behind."""
    if KIND < INT4:
        return byte
    return tl.max_contiguous(tl.multiple_of(byte // 16 * 32 + byte % 16, 16), 16)


@triton.jit
def code_to_float(words, shift, KIND):
    """One of the codes in each word, by arithmetic. Floating point is moved to where float16 has its bits."""
    code = words >> shift
    if KIND == INT8:
        return code.to(tl.int8).to(tl.float32)
    if KIND == INT4:
        return (code & 15).to(tl.float32)
    if KIND >= NF4:
        return number_of(code & 15, KIND - NF4)
    if KIND == FP8:
        bits, factor = (code & 0x80) << 8 | (code & 0x7F) << 7, 256.0
    else:
        bits, factor = (code & 8) << 12 | (code & 7) << 9, 16384.0
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * factor


@triton.jit
def load_grids(weight, place, is_there):
    """The scales at these places, and their zeros or offsets if there are any: a weight never has both."""
    _, scales, zeros, offsets = weight
    shifts = offsets if zeros is None else zeros
    scale = masked_load(scales + place, is_there)
    shift = scale
    if shifts is not None:
        shift = masked_load(shifts + place, is_there)
    return scale, shift


@triton.jit
def scale_pair(words):
    """The scales of a piece's low and high halves: bfloat16, or of words of 64 bits float32."""
    if words.dtype == tl.int32:
        low, high = words.to(tl.int16), (words >> 16).to(tl.int16)
        return low.to(tl.bfloat16, bitcast=True), high.to(tl.bfloat16, bitcast=True)
    else:
        low, high = words.to(tl.int32), (words >> 32).to(tl.int32)
        return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)


@triton.jit
def _dequantise_kernel(
    weight, out, KIND: tl.constexpr, GROUP: tl.constexpr, TILE_ROWS: tl.constexpr, ZERO_POINT: tl.constexpr,
    WIDTH: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    codes, scales, zeros, offsets = weight
    PER_BYTE: tl.constexpr = 2 if KIND >= INT4 else 1
    row = tl.program_id(0).to(tl.int64)
    COUNT: tl.constexpr = SIZE // PER_BYTE
    byte = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    column = input_of(byte, KIND)
    inside = column < WIDTH
    place = (row // TILE_ROWS) * (1 if GROUP == 0 else tl.cdiv(WIDTH, GROUP)) + tl.zeros([COUNT], tl.int64)
    if GROUP > 0:
        place += column // GROUP
    scale = masked_load(scales + place, inside)
    scale_of = scale_pair(scale) if KIND == FP4 else (scale, scale)  # halves
    zero = ZERO_POINT
    if zeros is not None:
        zero = masked_load(zeros + place, inside).to(tl.float32)
    offset = 0.0
    if offsets is not None:
        offset = masked_load(offsets + place, inside).to(tl.float32)
    found = masked_load(codes + row * (WIDTH // PER_BYTE) + byte, inside)
    if KIND >= NF4:
        numbers = look_up(found, tl.float16, KIND - NF4)
    for half in tl.static_range(PER_BYTE):
        code = numbers[half] if KIND >= NF4 else code_to_float(found.to(tl.int32), 4 * half, KIND)
        number = (code.to(tl.float32) - zero) * scale_of[half].to(tl.float32) + offset
        tl.store(out + row * WIDTH + column + 16 * half, number, mask=inside)
