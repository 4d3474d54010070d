"""Weights as integers of 8 or 4 bits with a scale, and perhaps a zero point, a row or a group of inputs.

compressed-tensors has integers of 8 bits as they are, or as many in an int32 as it holds, without a sign:
the middle of their range stands for 0. So do GPTQ and AWQ, whose matrices are transposed: GPTQ has four
or eight inputs in an int32, AWQ eight outputs. In memory there is one layout for all.
"""

import math
from typing import Any

import torch
from torch import Tensor

from nanovllm.extensions.quantised.kernels.fp8_linear import GROUP
from nanovllm.extensions.quantised.kernels.grouped_int4 import can_round_inputs
from nanovllm.extensions.quantised.scaled import ONE_TILE, OPTIONAL, SMALLEST, ScaledWeight, Source
from nanovllm.layers.linear import Product, Shard
from nanovllm.utils.loader import check_stored
from nanovllm.utils.validation import check

WHOLE = slice(None), slice(None)
SHRINKS = [1.0, 0.95, 0.9, 0.85, 0.8]  # scales that are tried: large weights may be cut off for the others


class Integers(ScaledWeight):
    """
    Unless symmetric there are `zeros`, in the dtype of the codes. If the checkpoint groups inputs that are
    not neighbours, input i of the weight is input `order[i]` of x.
    """

    def __init__(
        self,
        shards: dict[Any, Shard],
        stored_tile: tuple[int, int],
        source: Source,
        is_symmetric: bool = True,
        has_order: bool = False,
    ):
        if not has_order:
            self.optional = OPTIONAL | {"load_order"}
        super().__init__(shards, stored_tile, source)
        if is_symmetric:
            self.stored.pop("weight_zero_point", None)
        else:
            self.zeros = self._parameter("zeros", *self.scales.shape, dtype=self.code_dtype)
        self.order: Tensor | None = None
        if has_order:
            self.order = self._parameter("order", self.shape[1], dtype=torch.int64)
            self.order.data.copy_(torch.arange(self.shape[1]))
        self._found_order: Tensor | None = None

    # Products

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.order is not None:
            x = x[..., self.order]
        return super().multiply(x, bias)

    def products(self, layer: Any) -> list[Product]:
        return super().products(layer) if self.order is None else []

    # Loading

    def load_zeros(self, loaded: Any, shard: Shard) -> None:
        if self.source.word is None or self.stored_tile == ONE_TILE:
            self._check_grid(loaded, shard, {torch.int8})
            zeros = loaded[...] + self.zero_point
        else:  # packed along the other axis, but for AWQ
            zeros = self.read_codes(loaded, self._stored_grid(shard), WHOLE, int(self.source.turn < 0))
        if self.source.added_to_zeros:
            zeros = zeros + self.source.added_to_zeros  # those of 8 bits wrap by themselves
            if self.bits == 4:
                zeros = zeros & 15
        if self.zeros is not None:
            self._load_grid(self.zeros, zeros, shard)
        elif (zeros != self.zero_point).any():
            raise ValueError(f"holds zero points other than {self.zero_point} in a symmetric weight")

    def load_order(self, loaded: Any, shard: Shard) -> None:
        """From the group of each input. Where they are no neighbours, inputs are put in the groups' order."""
        width = shard.shape[1]
        group = self.stored_tile[1] or width
        check_stored(loaded, (width,), {torch.int32, torch.int64})
        groups, expected = loaded[:].long(), torch.arange(width) // group
        order = groups.argsort(stable=True)
        if not torch.equal(groups[order], expected):
            raise ValueError(f"does not put {group} inputs into each group")
        if not torch.equal(groups, expected):
            if self.order is None:
                raise ValueError("puts inputs into groups out of order, which the configuration denies")
            if self.shape[1] != width:
                raise ValueError("puts inputs into groups out of order, which works on one rank only")
        if self._found_order is not None and not torch.equal(self._found_order, order):
            raise ValueError("puts inputs in another order than a part of the same matrix")
        self._found_order = order

    def load_shape(self, loaded: Any, shard: Shard) -> None:
        """Says again what the model's configuration says."""
        check_stored(loaded, (2,), {torch.int64, torch.int32})
        if tuple(loaded[:].tolist()) != shard.shape:
            raise ValueError(f"holds {loaded[:].tolist()}, expected {list(shard.shape)}")

    def load_row_order(self, loaded: Any, shard: Shard) -> None:
        check_stored(loaded, (), {torch.uint8})
        check(not loaded[...], "must be 0, for codes row by row", loaded[...])

    def load_no_bias(self, loaded: Any, shard: Shard) -> None:
        """Some programs write a bias where the model has none."""
        check_stored(loaded, shard.shape[:1])
        if loaded[:].any():
            raise ValueError("is a bias, which the model does not have")

    def finish(self) -> None:
        """Put the inputs in the groups' order."""
        if self.order is not None and self._found_order is not None:
            self.order.data.copy_(self._found_order)
            for rows in self.pieces(self.shape[0]):
                self.set_codes(rows, self.quantised.codes_of(rows)[:, self.order])
            self._found_order = None  # so that codes stay in order when another weight is loaded again
        super().finish()


class Int8(Integers):
    """`weight` int8 [out, in], `scales` float32."""

    code_dtype = torch.int8
    lowest, highest = -128.0, 127.0


class Int4(Integers):
    """
    `weight` uint8 [out, in / 2], see kernels/quantised_weight.py. `scales` have the dtype of the
    checkpoint's. The zero point of a symmetric weight is 8.
    """

    code_dtype, scale_dtype = torch.uint8, None
    lowest, highest = -8.0, 7.0
    zero_point = 8

    def __init__(self, *args: Any, rounds_inputs: bool = False, **settings: Any):
        super().__init__(*args, **settings)
        self.rounds_inputs = rounds_inputs

    def finish(self) -> None:
        super().finish()
        can_round = self.order is None and can_round_inputs(self.quantised, self.dtype)
        if self.rounds_inputs and not can_round:
            raise ValueError(
                "activation_dtype='fp8' needs a Hopper GPU, dtype='bfloat16' or 'float16', and int4 weights "
                f"whose scales are for a multiple of {GROUP} neighbouring inputs, on each rank"
            )

    def choose_scales(self, tiles: Tensor) -> Tensor:
        """Those with the least squared error, of either sign: there is one more code below 0 than above."""
        largest = tiles.abs().amax((1, 3), keepdim=True)
        sign = torch.where(tiles.amax((1, 3), keepdim=True) == largest, -1.0, 1.0)
        best, least = largest, torch.full_like(largest, math.inf)
        for shrink in SHRINKS:
            scales = (largest * (shrink / -self.lowest)).clamp_min(SMALLEST)
            scales = scales.to(self.scales.dtype).float() * sign
            error = (self.round(tiles / scales) * scales - tiles).square_().sum((1, 3), keepdim=True)
            best, least = torch.where(error < least, scales, best), torch.minimum(error, least)
        return best
