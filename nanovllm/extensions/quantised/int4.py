"""Weights as integers of 4 bits with a scale, and perhaps a zero point, a group of inputs.

Checkpoints pack eight of them into an int32 in three ways: compressed-tensors ("pack-quantized"), GPTQ and
AWQ. In memory there is one layout for all.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nanovllm.extensions.quantised.int8 import WHOLE, check_shape, read_words
from nanovllm.extensions.quantised.kernels.quantised_weight import BLOCK, pack, unpack
from nanovllm.extensions.quantised.patterns import pattern
from nanovllm.extensions.quantised.scaled import ONE_TILE, ScaledWeight, ignore
from nanovllm.extensions.quantised.scheme import (
    Format,
    Scheme,
    choose,
    choose_group,
    listed,
    names_in,
    refuse,
    same_for_all,
)
from nanovllm.kernels.runtime import cdiv
from nanovllm.layers.weight import Product, Shard
from nanovllm.utils.loader import StoredTensor, check_stored
from nanovllm.utils.validation import shown

IN_ORDER = [0, 1, 2, 3, 4, 5, 6, 7]
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where AWQ has each of eight outputs in an int32
SYMMETRIC_ZERO = 8
MADE_GROUP = 32  # of inputs, where the weights are quantised here
SHRINKS = [1.0, 0.95, 0.9, 0.85, 0.8]  # scales that are tried: large weights may be cut off for the others


def read_gptq(config: dict[str, Any]) -> Scheme:
    """What a `quantization_config` of GPTQ or AutoRound says. Raises ValueError naming the field."""
    choose(config, "bits", [4])
    is_auto_round = config["quant_method"] == "auto-round"
    choose(config, "packing_format", ["auto_round:auto_gptq"] if is_auto_round else [None])
    has_order = choose(config, "desc_act", [True, False], False)
    settings = {"group": choose_group(config), "source": "gptq"}
    settings["is_symmetric"] = choose(config, "sym", [True, False], True)
    settings["has_order"] = has_order
    # Version 1, which AutoRound writes too, holds zero points less 1.
    version = choose(config, "checkpoint_format", ["gptq", "gptq_v2"], "gptq")
    settings["added_to_zeros"] = 1 if version == "gptq" else 0
    refuse(config, "lm_head", "is_marlin_format")
    return same_for_all(Format(Int4, settings), _exceptions(config))


def _exceptions(config: dict[str, Any]) -> Callable[[str], bool]:
    """Which layers GPTQ's or AutoRound's fields leave out."""
    rules = config.get("dynamic") or config.get("extra_config") or {}
    if not isinstance(rules, dict) or len(rules) > 2**12:
        raise ValueError(f"dynamic and extra_config must be objects, got {shown(rules)}")
    left_out, plain = [], set()
    for name, rule in rules.items():
        if name.startswith("-:"):
            left_out.append(pattern("dynamic", name[2:], name[2:]).match)
        elif isinstance(rule, dict) and rule.get("bits") == 16 and re.fullmatch(r"[\w.]+", name):
            plain.add(name)
        else:
            raise ValueError(f"dynamic or extra_config: {shown({name: rule})} is not supported")
    inside = config.get("modules_in_block_to_quantize") or []
    if isinstance(inside, list) and all(isinstance(names, list) for names in inside):
        inside = [name for names in inside for name in names]  # those of one step of quantisation
    inside = names_in({"modules_in_block_to_quantize": inside}, "modules_in_block_to_quantize")
    inside = tuple(f".{name}" for name in inside)
    return lambda name: (
        name in plain or bool(inside and not name.endswith(inside)) or any(match(name) for match in left_out)
    )


def read_awq(config: dict[str, Any]) -> Scheme:
    """What a `quantization_config` of AWQ says. Raises ValueError naming the field."""
    choose(config, "bits", [4])
    choose(config, "version", ["gemm", "GEMM"], "gemm")
    choose(config, "zero_point", [True], True)
    settings = {"group": choose_group(config), "source": "awq", "is_symmetric": False}
    return same_for_all(Format(Int4, settings), listed(config, "modules_to_not_convert"))


def make_int4() -> Scheme:
    """Symmetric groups of inputs."""
    return same_for_all(Format(Int4, {"group": MADE_GROUP, "source": "floats", "is_symmetric": True}))


class Int4(ScaledWeight):
    """
    `weight` uint8 [out, in / 2], see kernels/quantised_weight.py. `scales` have the dtype of the
    checkpoint's, `zeros` are uint8; a symmetric weight has none, and its zero point is 8. If the checkpoint
    groups inputs that are not neighbours, input i of the weight is input `order[i]` of x.
    """

    lowest, highest = -8.0, 7.0
    keeps_scale_dtype = True
    zero_point = SYMMETRIC_ZERO

    def __init__(
        self,
        shards: dict[Any, Shard],
        group: int,
        source: str,
        is_symmetric: bool,
        has_order: bool = False,
        added_to_zeros: int = 0,
        tile_rows: int = 1,
    ):
        super().__init__(shards, (tile_rows, group))
        self.group, self.is_symmetric, self.added_to_zeros = group, is_symmetric, added_to_zeros
        num_bytes = cdiv(self.shape[1], BLOCK) * BLOCK // 2
        self.weight = self._parameter("qweight", self.shape[0], num_bytes, dtype=torch.uint8)
        if not is_symmetric:
            self.zeros = self._parameter("zeros", *self.scales.shape, dtype=torch.uint8)
        self.order = self._parameter("order", self.shape[1], dtype=torch.int64) if has_order else None
        self._found_order: Tensor | None = None
        order = StoredTensor(self._load_order, not has_order)
        if source == "floats":
            self.stored = {"weight": StoredTensor(self.load_floats)}
        elif source == "pack-quantized":
            self.stored = {
                "weight_packed": StoredTensor(self._load_packed),
                "weight_scale": StoredTensor(self.load_scales),
                "weight_shape": StoredTensor(check_shape, True),
                "weight_g_idx": order,
                "input_scale": StoredTensor(ignore, True),
            }
            if not is_symmetric:
                is_one = self.stored_tile == ONE_TILE
                load = self._load_zero if is_one else self._load_packed_zeros
                self.stored["weight_zero_point"] = StoredTensor(load)
        else:
            self.word_order = AWQ_ORDER if source == "awq" else IN_ORDER
            self.stored = {
                "qweight": StoredTensor(self._load_transposed),
                "scales": StoredTensor(self._load_transposed_scales),
                "qzeros": StoredTensor(self._load_transposed_zeros),
            }
            if source == "gptq":
                self.stored |= {"g_idx": order, "bias": StoredTensor(_check_zeros, True)}

    # Products

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return super().multiply(x if self.order is None else x[..., self.order], bias)

    def products(self, layer: Any) -> list[Product]:
        return super().products(layer) if self.order is None else []

    def set_codes(self, rows: slice, codes: Tensor) -> None:
        self.weight.data[rows] = pack((codes + SYMMETRIC_ZERO).to(torch.uint8))

    def choose_scales(self, tiles: Tensor) -> Tensor:
        """Those with the least squared error, of either sign: there is one more code below 0 than above."""
        largest = tiles.abs().amax((1, 3), keepdim=True)
        sign = torch.where(tiles.amax((1, 3), keepdim=True) == largest, -1.0, 1.0)
        best, least = None, None
        for shrink in SHRINKS:
            scales = self.smallest(largest * (shrink / -self.lowest)).to(self.scales.dtype).float() * sign
            error = (self.round(tiles / scales) * scales - tiles).square_().sum((1, 3), keepdim=True)
            best = scales if best is None else torch.where(error < least, scales, best)
            least = error if least is None else torch.minimum(error, least)
        return best

    # Loading

    def _load_packed(self, loaded: Any, shard: Shard) -> None:
        self._set(shard, self._read(loaded, shard.shape, (shard.rows, shard.columns), 1, IN_ORDER))

    def _load_transposed(self, loaded: Any, shard: Shard) -> None:
        """GPTQ has eight inputs in an int32, AWQ eight outputs."""
        axis, cut = int(self.word_order is AWQ_ORDER), (shard.columns, shard.rows)
        self._set(shard, self._read(loaded, shard.shape[::-1], cut, axis, self.word_order).t())

    def _read(self, *args: Any) -> Tensor:
        return read_words(*args, self.weight.device)

    def _set(self, shard: Shard, codes: Tensor) -> None:
        for rows in self.pieces(len(codes)):
            start = shard.place.start + rows.start
            self.weight.data[start : start + rows.stop - rows.start] = pack(codes[rows])

    def _load_transposed_scales(self, loaded: Any, shard: Shard) -> None:
        self.load_scales(loaded, shard, transposed=True)

    def _load_packed_zeros(self, loaded: Any, shard: Shard) -> None:
        zeros = self._read(loaded, self._stored_grid(shard), WHOLE, 0, IN_ORDER)
        self._load_grid(self.zeros, zeros, shard)

    def _load_zero(self, loaded: Any, shard: Shard) -> None:
        """The only one of a part, which is stored less 8."""
        self._check_grid(loaded, shard, False, {torch.int8})
        self._load_grid(self.zeros, loaded[...] + SYMMETRIC_ZERO, shard)

    def _load_transposed_zeros(self, loaded: Any, shard: Shard) -> None:
        zeros = self._read(loaded, self._stored_grid(shard)[::-1], WHOLE, 1, self.word_order)
        zeros = zeros + self.added_to_zeros & 15
        if self.zeros is not None:
            self._load_grid(self.zeros, zeros, shard, transposed=True)
        elif (zeros != SYMMETRIC_ZERO).any():
            raise ValueError(f"holds zero points other than {SYMMETRIC_ZERO} in a symmetric weight")

    def _load_order(self, loaded: Any, shard: Shard) -> None:
        """From the group of each input. Where they are no neighbours, inputs are put in the groups' order."""
        width = shard.shape[1]
        check_stored(loaded, (width,), {torch.int32, torch.int64})
        groups = loaded[:].long()
        expected = torch.arange(width) // (self.group or width)
        order = groups.argsort(stable=True)
        if not torch.equal(groups[order], expected):
            raise ValueError(f"does not put {self.group or width} inputs into each group")
        if not torch.equal(groups, expected):
            if self.order is None:
                raise ValueError("puts inputs into groups out of order, which the configuration denies")
            if self.shape[1] != width:
                raise ValueError("puts inputs into groups out of order, which works on one rank only")
        if self._found_order is not None and not torch.equal(self._found_order, order):
            raise ValueError("puts inputs in another order than a part of the same matrix")
        self._found_order = order

    def finish(self) -> None:
        """Put the inputs in the groups' order."""
        if self.order is None or self._found_order is None:
            return
        self.order.data.copy_(self._found_order)
        for rows in self.pieces(self.shape[0]):
            self.weight.data[rows] = pack(unpack(self.weight[rows])[:, self.order])

    def fill(self, matrix: Tensor) -> None:
        super().fill(matrix)
        if self.order is not None:
            self.order.data.copy_(torch.arange(self.shape[1]))


def _check_zeros(loaded: Any, shard: Shard) -> None:
    """Of a bias, which some programs write where the model has none."""
    check_stored(loaded, shard.shape[:1])
    if loaded[:].any():
        raise ValueError("is a bias, which the model does not have")
