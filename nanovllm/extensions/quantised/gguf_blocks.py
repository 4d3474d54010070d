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

from nanovllm.extensions.quantised.kernels.quantised_weight import unpack

# Bytes that are decoded at a time: on a CPU what lies between then stays in a cache, and on a GPU every
# operation takes microseconds to start.
PIECES = {"cpu": 2**20, "cuda": 2**25}
ROWS = 64  # a piece is a multiple of so many rows, or the last one
# What the codes of 4 bits of IQ4_NL and IQ4_XS stand for: the smaller, the closer together.
IQ4_CODES = -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113

Parts = dict[str, Tensor]  # of blocks, by name: uint8 [..., bytes]


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


class PackedIntegers(NamedTuple):
    """
    How a part of a block holds integers. `low` is how many bits a byte has of each, and how many bytes go
    together: these hold first the lowest bits of all of theirs, then the next ones. What `high` says of
    another part are the integers' upper bits. A `middle` is added to integers that have a sign.
    """

    low: tuple[int, int]
    high: tuple[int, int] | None = None
    middle: int | None = None

    def __call__(self, parts: Parts, name: str) -> Tensor:
        """uint8, or int8 where there is a middle, [..., integers]."""
        integers = unpack(parts[name], *self.low)
        if self.high is not None:
            integers |= unpack(parts[f"{name}_high"], *self.high) << self.low[0]
        if self.middle is None:
            return integers
        integers = integers.view(torch.int8)
        return integers.sub_(self.middle) if self.middle else integers


def six_bits(parts: Parts, name: str) -> Tensor:
    """
    Eight multiples for scales and eight for offsets. Of both the first four have 6 bits in the first eight
    bytes. The others have 4 bits in the last four bytes, and 2 in the tops of the first.
    """
    start, end = parts[name].split([8, 4], -1)
    first, tops = unpack(start, 6, 8).chunk(2, -1)
    others = unpack(end, 4, 4) | tops << 4
    both = torch.stack((first, others), -2).unflatten(-1, (2, 4))
    return both.transpose(-3, -2).flatten(-3)


class Type(NamedTuple):
    """
    The values of a block, and the bytes of its parts, in their order: "floats", which are the scale and
    perhaps the offset in float16, "codes", and where it has several groups the "multiples" of these that are
    theirs. `numbers` are what codes stand for that are places in a table.
    """

    values: int
    parts: dict[str, int]
    codes: PackedIntegers
    multiples: Callable[[Parts, str], Tensor] | None = None
    numbers: tuple[int, ...] | None = None

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def bits(self) -> int:
        """Of a code, or of what it stands for."""
        high_bits, _ = self.codes.high or (0, 0)
        return self.codes.low[0] + high_bits if self.numbers is None else 8

    def decode(self, blocks: Tensor) -> Groups:
        """Of uint8 [rows, blocks, bytes]."""
        split = blocks.split([*self.parts.values()], -1)
        parts = dict(zip(self.parts, split, strict=True))
        codes = self.codes(parts, "codes")
        if self.numbers is not None:
            table = torch.tensor(self.numbers, dtype=torch.int8, device=codes.device)
            codes = table[codes.int()]
        floats = parts["floats"].contiguous().view(torch.float16)
        floats = floats.float().unsqueeze(-1)  # [..., 1 or 2, 1]
        if self.multiples is not None:
            multiples = self.multiples(parts, "multiples")
            floats = floats * multiples.unflatten(-1, (floats.shape[-2], -1))
            floats[..., 1:, :].neg_()  # these offsets are subtracted
        codes = codes.unflatten(-1, (floats.shape[-1], -1))
        return Groups(*(each.flatten(1, 2) for each in (codes, *floats.unbind(-2))))


BYTES = PackedIntegers((8, 1), middle=0)
NIBBLES, LONG_NIBBLES, PAIRS = (4, 16), (4, 32), (2, 32)

TYPES = {
    "Q8_0": Type(32, {"floats": 2, "codes": 32}, BYTES),
    "Q4_0": Type(32, {"floats": 2, "codes": 16}, PackedIntegers(NIBBLES, middle=8)),
    "Q4_1": Type(32, {"floats": 4, "codes": 16}, PackedIntegers(NIBBLES)),
    "Q5_0": Type(32, {"floats": 2, "codes_high": 4, "codes": 16}, PackedIntegers(NIBBLES, (1, 1), 16)),
    "Q5_1": Type(32, {"floats": 4, "codes_high": 4, "codes": 16}, PackedIntegers(NIBBLES, (1, 1))),
    "Q4_K": Type(256, {"floats": 4, "multiples": 12, "codes": 128}, PackedIntegers(LONG_NIBBLES), six_bits),
    "Q5_K": Type(
        256,
        {"floats": 4, "multiples": 12, "codes_high": 32, "codes": 128},
        PackedIntegers(LONG_NIBBLES, (1, 32)),
        six_bits,
    ),
    "Q6_K": Type(
        256,
        {"codes": 128, "codes_high": 64, "multiples": 16, "floats": 2},
        PackedIntegers((4, 64), PAIRS, 32),
        BYTES,
    ),
    "Q2_K": Type(
        256, {"multiples": 16, "codes": 64, "floats": 4}, PackedIntegers(PAIRS), PackedIntegers(NIBBLES)
    ),
    "Q3_K": Type(
        256,
        {"codes_high": 32, "codes": 64, "multiples": 8, "multiples_high": 4, "floats": 2},
        PackedIntegers(PAIRS, (1, 32), 4),
        PackedIntegers((4, 8), (2, 4), 32),
    ),
    "IQ4_NL": Type(32, {"floats": 2, "codes": 16}, PackedIntegers(NIBBLES), numbers=IQ4_CODES),
    "IQ4_XS": Type(
        256,
        {"floats": 2, "multiples_high": 2, "multiples": 4, "codes": 128},
        PackedIntegers(NIBBLES),
        PackedIntegers((4, 1), (2, 1), 32),
        IQ4_CODES,
    ),
}


def decode_groups(encoded: np.ndarray, kind: str, device: torch.device) -> Iterator[Groups]:
    """Rows of blocks, uint8 [rows, bytes], as groups on a device: some rows after the others."""
    type_ = TYPES[kind]
    rows, width = encoded.shape
    step = max(1, PIECES[device.type] // max(width, 1) // ROWS) * ROWS
    for start in range(0, rows, step):
        # torch wants to be able to write.
        piece = np.require(encoded[start : start + step], requirements="CW")
        blocks = torch.from_numpy(piece).to(device)
        yield type_.decode(blocks.unflatten(1, (width // type_.bytes, type_.bytes)))


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
