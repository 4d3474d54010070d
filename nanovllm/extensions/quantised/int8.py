"""Weights as integers of 8 bits with a scale, and perhaps a zero point, a row or a group of inputs.

compressed-tensors stores them as they are ("int-quantized") or four in an int32 ("pack-quantized").
"""

from typing import Any

import torch

from nanovllm.extensions.quantised.scaled import ONE_TILE, ScaledWeight, ignore
from nanovllm.kernels.runtime import cdiv
from nanovllm.layers.weight import Shard
from nanovllm.utils.loader import StoredTensor, check_stored

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
        check_stored(loaded, (shard.shape[0], cdiv(shard.shape[1], 4)), {torch.int32})
        first = shard.columns.start // 4
        words = loaded[shard.rows, first : cdiv(shard.columns.stop, 4)]
        codes = _unpack(words.to(self.weight.device))[:, shard.columns.start - 4 * first :]
        self.weight.data[shard.place] = codes[:, : self.shape[1]]

    def _load_zeros(self, loaded: Any, shard: Shard) -> None:
        self._check_grid(loaded, shard, False, {torch.int8})
        self._load_grid(self.zeros, loaded, shard)

    def _load_packed_zeros(self, loaded: Any, shard: Shard) -> None:
        rows, columns = self._stored_grid(shard)
        check_stored(loaded, (cdiv(rows, 4), columns), {torch.int32})
        self._load_grid(self.zeros, _unpack(loaded[:].t()), shard, transposed=True)

    def set_codes(self, rows: slice, codes: torch.Tensor) -> None:
        self.weight.data[rows] = codes.to(torch.int8)


def bytes_of(words: torch.Tensor) -> torch.Tensor:
    """int32 [rows, n] -> uint8 [rows, 4 * n]."""
    # Not contiguous(), which leaves the strides of a single column as they are; `view` wants 1.
    return words.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _unpack(words: torch.Tensor) -> torch.Tensor:
    """int32 [rows, n] -> int8 [rows, 4 * n]."""
    return (bytes_of(words) ^ SIGN).view(torch.int8)


def check_shape(loaded: Any, shard: Shard) -> None:
    """Of `weight_shape`, which says again what the model's configuration says."""
    check_stored(loaded, (2,), {torch.int64, torch.int32})
    if tuple(loaded[:].tolist()) != shard.shape:
        raise ValueError(f"holds {loaded[:].tolist()}, expected {list(shard.shape)}")
