"""Weights as integers of 8 bits with a scale, and perhaps a zero point, a row or a group of inputs.

compressed-tensors stores them as they are ("int-quantized") or four in an int32 ("pack-quantized").
"""

from typing import Any

import torch

from nanovllm.extensions.quantised.scaled import ONE_TILE, ScaledWeight, ignore
from nanovllm.kernels.runtime import cdiv
from nanovllm.layers.weight import Shard
from nanovllm.utils.loader import StoredTensor, check_stored

WHOLE = slice(None), slice(None)
BYTES = [0, 1, 2, 3]  # of an int32, in their own order
SIGN = 0x80  # packed codes are stored with 128 added


class Int8(ScaledWeight):
    """`weight` int8 [out, in], `scales` float32 and, unless symmetric, `zeros` int8."""

    lowest, highest = -128.0, 127.0

    def __init__(
        self, shards: dict[Any, Shard], stored_tile: tuple[int, int], is_symmetric: bool, is_packed: bool
    ):
        super().__init__(shards, stored_tile)
        self.weight = self._parameter("weight", *self.shape, dtype=torch.int8)
        self.stored = {"weight_scale": StoredTensor(self.load_scales)}
        self.stored |= dict.fromkeys(("input_scale", "input_zero_point"), StoredTensor(ignore, True))
        if is_packed:
            self.stored["weight_packed"] = StoredTensor(self._load_packed)
            self.stored["weight_shape"] = StoredTensor(check_shape, True)
        else:
            self.stored["weight"] = StoredTensor(self._load_weight)
        if not is_symmetric:
            self.zeros = self._parameter("zeros", *self.scales.shape, dtype=torch.int8)
            has_packed_zeros = is_packed and stored_tile != ONE_TILE
            load = self._load_packed_zeros if has_packed_zeros else self._load_zeros
            self.stored["weight_zero_point"] = StoredTensor(load)

    def _load_weight(self, loaded: Any, shard: Shard) -> None:
        check_stored(loaded, shard.shape, {torch.int8})
        self.weight.data[shard.place] = loaded[shard.rows, shard.columns]

    def _load_packed(self, loaded: Any, shard: Shard) -> None:
        codes = read_words(loaded, shard.shape, (shard.rows, shard.columns), 1, BYTES, self.weight.device)
        self.weight.data[shard.place] = (codes ^ SIGN).view(torch.int8)

    def _load_zeros(self, loaded: Any, shard: Shard) -> None:
        self._check_grid(loaded, shard, False, {torch.int8})
        self._load_grid(self.zeros, loaded, shard)

    def _load_packed_zeros(self, loaded: Any, shard: Shard) -> None:
        zeros = read_words(loaded, self._stored_grid(shard), WHOLE, 0, BYTES, self.weight.device)
        self._load_grid(self.zeros, (zeros ^ SIGN).view(torch.int8), shard)

    def set_codes(self, rows: slice, codes: torch.Tensor) -> None:
        self.weight.data[rows] = codes.to(torch.int8)


def read_words(
    loaded: Any,
    shape: tuple[int, ...],
    cut: tuple[slice, slice],
    axis: int,
    order: list[int],
    device: torch.device,
) -> torch.Tensor:
    """
    A cut of a matrix of codes of this shape, uint8, of which neighbours along an axis are an int32. `order`
    says where in it each of them is.
    """
    size = len(order)
    check_stored(loaded, tuple(cdiv(n, size) if i == axis else n for i, n in enumerate(shape)), {torch.int32})
    start, stop, _ = cut[axis].indices(shape[axis])
    place = [*cut]
    place[axis] = slice(start // size, cdiv(stop, size))
    words = loaded[place[0], place[1]].to(device)
    words = words if axis else words.t()
    # Not contiguous(), which leaves the strides of a single column as they are; `view` wants 1.
    codes = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if size == 8:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
    if order != sorted(order):
        codes = codes.unflatten(1, (-1, size))[:, :, order].flatten(1)
    codes = codes[:, start % size : start % size + stop - start]
    return codes if axis else codes.t()


def check_shape(loaded: Any, shard: Shard) -> None:
    """Of `weight_shape`, which says again what the model's configuration says."""
    check_stored(loaded, (2,), {torch.int64, torch.int32})
    if tuple(loaded[:].tolist()) != shard.shape:
        raise ValueError(f"holds {loaded[:].tolist()}, expected {list(shard.shape)}")
