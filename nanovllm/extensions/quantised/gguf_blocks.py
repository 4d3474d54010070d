"""How GGUF's quantised types lay out a block, and what its values are.

A block is a few bytes of scales and the codes of 32 or 256 values. Values come in groups of 16 or 32 with a
scale each: code * scale, in some types + offset. Everything here is torch, so that all threads, or a GPU,
decode. Values are bit for bit ggml's, as the order of float32 operations is the same. Source: ggml-quants.c.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

PIECE = 2**20  # bytes that are decoded at a time: what lies between then stays in a cache
ROWS = 64  # a piece is a multiple of so many rows, or the last one


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
    step = max(1, PIECE // max(width, 1) // ROWS) * ROWS
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
    """The low halves of n bytes, then the high ones: [..., 2 * n]."""
    return torch.cat((pairs & 15, pairs >> 4), dim=-1)


def fields(packed: Tensor, bits: int) -> Tensor:
    """Bytes [..., n] to their fields of so many bits, the lowest of all bytes first: [..., 8 // bits, n]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-2) >> shifts.unsqueeze(-1)) & (1 << bits) - 1


def decode_q8_0(blocks: Tensor) -> Groups:
    scale, codes = blocks.split([2, 32], -1)
    return Groups(codes.view(torch.int8).unsqueeze(-2), floats(scale))


def decode_q4_0(blocks: Tensor) -> Groups:
    scale, pairs = blocks.split([2, 16], -1)
    return Groups(nibbles(pairs).view(torch.int8).sub_(8).unsqueeze(-2), floats(scale))


def decode_q4_1(blocks: Tensor) -> Groups:
    scale, lowest, pairs = blocks.split([2, 2, 16], -1)
    return Groups(nibbles(pairs).unsqueeze(-2), floats(scale), floats(lowest))


def decode_q5_0(blocks: Tensor) -> Groups:
    scale, fifth, pairs = blocks.split([2, 4, 16], -1)
    return Groups(_with_fifth_bit(fifth, pairs).view(torch.int8).sub_(16), floats(scale))


def decode_q5_1(blocks: Tensor) -> Groups:
    scale, lowest, fifth, pairs = blocks.split([2, 2, 4, 16], -1)
    return Groups(_with_fifth_bit(fifth, pairs), floats(scale), floats(lowest))


def _with_fifth_bit(fifth: Tensor, pairs: Tensor) -> Tensor:
    """Codes of 5 bits [..., 1, 32]. Here a byte of fifth bits has those of eight neighbours."""
    bits = (fifth.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=fifth.device) & 1).flatten(-2)
    return (bits << 4).bitwise_or_(nibbles(pairs)).unsqueeze(-2)


def decode_q4_k(blocks: Tensor) -> Groups:
    scale, step, packed, pairs = blocks.split([2, 2, 12, 128], -1)
    return Groups(_rows_of_nibbles(pairs, 32), *_scales_and_offsets(scale, step, packed))


def decode_q5_k(blocks: Tensor) -> Groups:
    scale, step, packed, fifth, pairs = blocks.split([2, 2, 12, 32, 128], -1)
    codes = (fields(fifth, 1) << 4).bitwise_or_(_rows_of_nibbles(pairs, 32))
    return Groups(codes, *_scales_and_offsets(scale, step, packed))


def decode_q6_k(blocks: Tensor) -> Groups:
    pairs, upper, scales, scale = blocks.split([128, 64, 16, 2], -1)
    high = fields(upper.unflatten(-1, (2, 32)), 2).flatten(-2)  # [..., 2, 128]
    codes = (high << 4).bitwise_or_(_rows_of_nibbles(pairs, 64).view_as(high))
    codes = codes.view(torch.int8).sub_(32).flatten(-2).unflatten(-1, (16, 16))
    return Groups(codes, floats(scale) * scales.view(torch.int8))


def _rows_of_nibbles(pairs: Tensor, width: int) -> Tensor:
    """Rows of so many codes: the low halves of as many bytes, their high halves, those of the next bytes."""
    return nibbles(pairs.unflatten(-1, (-1, width))).flatten(-2).unflatten(-1, (-1, width))


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
    "Q8_0": Type(32, 34, decode_q8_0),
    "Q4_0": Type(32, 18, decode_q4_0),
    "Q4_1": Type(32, 20, decode_q4_1),
    "Q5_0": Type(32, 22, decode_q5_0),
    "Q5_1": Type(32, 24, decode_q5_1),
    "Q4_K": Type(256, 144, decode_q4_k),
    "Q5_K": Type(256, 176, decode_q5_k),
    "Q6_K": Type(256, 210, decode_q6_k),
}
