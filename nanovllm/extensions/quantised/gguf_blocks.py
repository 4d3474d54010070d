"""How GGUF's quantised types lay out a block, and what its values are.

A block is a few bytes of scales and the codes of 32 or 256 values. Values come in groups of 16 or 32 with a
scale each: code * scale, in some types + offset. Everything here is torch, so that all threads, or a GPU,
decode. Values are bit for bit ggml's, as the order of float32 operations is the same. Source: ggml-quants.c.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# Bytes that are decoded at a time: on a CPU what lies between then stays in a cache, and on a GPU every
# operation takes microseconds to start.
PIECES = {"cpu": 2**20, "cuda": 2**25}
ROWS = 64  # a piece is a multiple of so many rows, or the last one
# What the codes of 4 bits of IQ4_NL and IQ4_XS stand for: the smaller, the closer together.
IQ4_CODES = -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113


class Groups(NamedTuple):
    """
    codes * scales + offsets: int8, or uint8 where there are offsets, [rows, groups, values of a group], and
    float32 [rows, groups].
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None = None

    def write(self, values: Tensor) -> None:
        """Set float32 [rows, values] to what these are."""
        values = values.view(self.codes.shape)
        torch.mul(self.codes.float(), self.scales.unsqueeze(-1), out=values)
        if self.offsets is not None:
            values.add_(self.offsets.unsqueeze(-1))

    def cut(self, groups: slice) -> "Groups":
        """These groups of all rows."""
        return Groups(*(each if each is None else each[:, groups] for each in self))


def decode_groups(encoded: np.ndarray, kind: str, device: torch.device) -> Iterator[Groups]:
    """Rows of blocks, uint8 [rows, bytes], as groups on a device: some rows after the others."""
    type_ = TYPES[kind]
    rows, width = encoded.shape
    step = max(1, PIECES[device.type] // max(width, 1) // ROWS) * ROWS
    for start in range(0, rows, step):
        # torch wants to be able to write.
        piece = np.require(encoded[start : start + step], requirements="CW")
        blocks = torch.from_numpy(piece).to(device).view(len(piece), width // type_.bytes, type_.bytes)
        yield Groups(*(each if each is None else each.flatten(1, 2) for each in type_.decode(blocks)))


def decode_values(encoded: np.ndarray, kind: str, device: torch.device) -> Tensor:
    """Rows of blocks, uint8 [..., bytes], as float32 [..., values] on a device."""
    *shape, width = encoded.shape
    rows = encoded.reshape(math.prod(shape), width)
    values = torch.empty(len(rows), width // TYPES[kind].bytes * TYPES[kind].values, device=device)
    start = 0
    for groups in decode_groups(rows, kind, device):
        groups.write(values[start : start + len(groups.codes)])
        start += len(groups.codes)
    return values.view(*shape, values.shape[1])


def floats(pair: Tensor) -> Tensor:
    """A float16 number, [..., 2 bytes], as float32 [..., 1]."""
    return pair.contiguous().view(torch.float16).float()


def nibbles(pairs: Tensor) -> Tensor:
    """Bytes [..., n] to their low halves and their high halves: [..., 2, n]."""
    return torch.stack((pairs & 15, pairs >> 4), dim=-2)


def fields(packed: Tensor, bits: int) -> Tensor:
    """Bytes [..., n] to their fields of so many bits, the lowest of all bytes first: [..., 8 // bits, n]."""
    return torch.stack([(packed >> shift) & (1 << bits) - 1 for shift in range(0, 8, bits)], dim=-2)


def decode_short(blocks: Tensor, bits: int, has_offset: bool = False) -> Groups:
    """
    Blocks of one group of 32: a scale, perhaps an offset, of codes of 5 bits the fifth ones, and the rest.
    Without an offset codes of less than 8 bits have half of their range added.
    """
    offset_end = 4 if has_offset else 2
    codes_start = offset_end + (4 if bits == 5 else 0)
    scale, offset, fifth, codes = blocks.tensor_split([2, offset_end, codes_start], -1)
    if bits < 8:
        codes = nibbles(codes).flatten(-2)
    if bits == 5:  # a byte of them has those of eight neighbours
        codes.bitwise_or_(fields(fifth, 1).transpose(-1, -2).flatten(-2) << 4)
    codes = codes.unsqueeze(-2)
    if has_offset:
        return Groups(codes, floats(scale), floats(offset))
    codes = codes.view(torch.int8)
    return Groups(codes.sub_(1 << bits - 1) if bits < 8 else codes, floats(scale))


def decode_long(blocks: Tensor, bits: int) -> Groups:
    """Blocks of eight groups of 32 with offsets, of codes of 4 or 5 bits."""
    scale, step, packed, fifth, pairs = blocks.tensor_split([2, 4, 16, blocks.shape[-1] - 128], -1)
    codes = nibbles(pairs.unflatten(-1, (4, 32))).flatten(-3, -2)
    if bits == 5:
        codes.bitwise_or_(fields(fifth, 1) << 4)
    return Groups(codes, *_scales_and_offsets(scale, step, packed))


def decode_q6_k(blocks: Tensor) -> Groups:
    pairs, upper, scales, scale = blocks.split([128, 64, 16, 2], -1)
    high = fields(upper.unflatten(-1, (2, 32)), 2).flatten(-2)  # [..., 2, 128]
    codes = (high << 4).bitwise_or_(nibbles(pairs.unflatten(-1, (2, 64))).flatten(-2))
    codes = codes.view(torch.int8).sub_(32).flatten(-2).unflatten(-1, (16, 16))
    return Groups(codes, floats(scale) * scales.view(torch.int8))


def decode_q2_k(blocks: Tensor) -> Groups:
    scales_and_steps, packed, scale, step = blocks.split([16, 64, 2, 2], -1)
    codes = fields(packed.unflatten(-1, (2, 32)), 2).flatten(-3).unflatten(-1, (16, 16))
    scales, steps = scales_and_steps & 15, scales_and_steps >> 4
    return Groups(codes, floats(scale) * scales, -floats(step) * steps)


def decode_q3_k(blocks: Tensor) -> Groups:
    third, packed, low, high, scale = blocks.split([32, 64, 8, 4, 2], -1)  # third: of a code's bits
    codes = fields(packed.unflatten(-1, (2, 32)), 2).flatten(-3, -2)  # [..., 8, 32]
    codes = codes.bitwise_or_(fields(third, 1) << 2).view(torch.int8).sub_(4)
    scales = nibbles(low).flatten(-2) | fields(high, 2).flatten(-2) << 4
    return Groups(codes.flatten(-2).unflatten(-1, (16, 16)), floats(scale) * (scales.view(torch.int8) - 32))


def decode_iq4_nl(blocks: Tensor) -> Groups:
    scale, pairs = blocks.split([2, 16], -1)
    return Groups(look_up(pairs.unsqueeze(-2)), floats(scale))


def decode_iq4_xs(blocks: Tensor) -> Groups:
    scale, high, low, pairs = blocks.split([2, 2, 4, 128], -1)
    # A byte has the bits of neighbouring groups: [..., 8].
    low, high = (each.transpose(-1, -2).flatten(-2) for each in (nibbles(low), fields(high, 2)))
    scales = (low | high << 4).view(torch.int8) - 32
    return Groups(look_up(pairs.unflatten(-1, (8, 16))), floats(scale) * scales)


def look_up(pairs: Tensor) -> Tensor:
    """The codes that bytes [..., 16] stand for, int8 [..., 32]: those of their low halves come first."""
    return torch.tensor(IQ4_CODES, dtype=torch.int8, device=pairs.device)[nibbles(pairs).flatten(-2).int()]


def _scales_and_offsets(scale: Tensor, step: Tensor, packed: Tensor) -> tuple[Tensor, Tensor]:
    """
    Of eight groups, whose multiples of the block's scale and step have 6 bits: those of the first four in the
    first eight bytes' low bits. The last four have 4 bits each in the last bytes, and 2 in the others' tops.
    """
    scales, steps, rest = packed.split(4, -1)
    scales = torch.cat((scales & 63, (rest & 15) | (scales >> 2) & 48), -1)
    steps = torch.cat((steps & 63, (rest >> 4) | (steps >> 2) & 48), -1)
    return floats(scale) * scales, -floats(step) * steps


class Type(NamedTuple):
    """Values and bytes of a block, and what decodes uint8 [rows, blocks, bytes] to [rows, blocks, ...]."""

    values: int
    bytes: int
    decode: Callable[[Tensor], Groups]


TYPES = {
    "Q8_0": Type(32, 34, partial(decode_short, bits=8)),
    "Q4_0": Type(32, 18, partial(decode_short, bits=4)),
    "Q4_1": Type(32, 20, partial(decode_short, bits=4, has_offset=True)),
    "Q5_0": Type(32, 22, partial(decode_short, bits=5)),
    "Q5_1": Type(32, 24, partial(decode_short, bits=5, has_offset=True)),
    "Q4_K": Type(256, 144, partial(decode_long, bits=4)),
    "Q5_K": Type(256, 176, partial(decode_long, bits=5)),
    "Q6_K": Type(256, 210, decode_q6_k),
    "Q2_K": Type(256, 84, decode_q2_k),
    "Q3_K": Type(256, 110, decode_q3_k),
    "IQ4_NL": Type(32, 18, decode_iq4_nl),
    "IQ4_XS": Type(256, 136, decode_iq4_xs),
}
