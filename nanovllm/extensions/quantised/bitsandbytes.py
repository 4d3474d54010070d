"""Weights as bitsandbytes stores them: nf4, which are places in a table of 16 numbers, and 8-bit integers.

An nf4 weight is flattened; each 64 of it have a scale (`absmax`). With double quantisation these scales
are places in a table of 256 numbers, times a scale for 256 of them, plus an offset for all.
"""

import json
import math
from typing import Any

import torch

from nanovllm.extensions.quantised.integers import Int8
from nanovllm.extensions.quantised.kernels.quantised_weight import NF4_TABLE, TABLES
from nanovllm.extensions.quantised.scaled import ScaledWeight, Source
from nanovllm.extensions.quantised.scheme import FLAGS, Format, Scheme, choose, listed, same_for_all
from nanovllm.kernels.runtime import cdiv
from nanovllm.layers.linear import Shard
from nanovllm.utils.loader import check_finite, check_stored
from nanovllm.utils.validation import check, is_number

GROUP = 64  # weights that share a scale
NESTED = 256  # scales that share a scale, and numbers in their table
MAX_STATE = 512  # bytes of JSON
TABLE, ORDER = torch.tensor(TABLES[NF4_TABLE]).sort()  # bitsandbytes' codes have the order of their numbers

NAMES = {
    "weight": "halves",
    "weight.absmax": "scales",
    "weight.quant_map": "table",
    "weight.quant_state.bitsandbytes__nf4": "state",
}
NESTED_NAMES = {f"weight.{name}": name for name in ("absmax", "nested_absmax", "nested_quant_map")}
# The first code of a byte is in its high half.
PLAIN_NF4 = Source(
    "nf4", NAMES, torch.uint8, order=[1, 0], scale_dtypes={torch.float32}, has_flat_scales=True
)
NESTED_NF4 = PLAIN_NF4._replace(name="nested nf4", tensors=NAMES | NESTED_NAMES)
INT8 = PLAIN_NF4._replace(
    name="bitsandbytes",
    tensors={"weight": "codes", "SCB": "scales", "weight_format": "row_order"},
    word=None,
    scales_of=lambda largest: largest / 127,  # a row's largest number is stored, for which 127 stands
)


def read_bitsandbytes(config: dict[str, Any]) -> Scheme:
    """What a `quantization_config` of bitsandbytes says. Raises ValueError naming the field."""
    if choose(config, "load_in_8bit", FLAGS, False):
        format = Format(Int8, {"stored_tile": (1, 0), "source": INT8})
    else:
        choose(config, "bnb_4bit_quant_type", ["nf4"], "fp4")
        is_nested = choose(config, "bnb_4bit_use_double_quant", FLAGS, False)
        source = NESTED_NF4 if is_nested else PLAIN_NF4
        format = Format(NF4, {"stored_tile": (1, GROUP), "source": source})
    return same_for_all(format, listed(config, "llm_int8_skip_modules"))


class NF4(ScaledWeight):
    """`weight` uint8 [out, in / 2], places in NUMBERS; `scales` float32."""

    code_dtype, kept_codes, table = torch.uint8, ORDER, NF4_TABLE
    highest = 1.0

    def __init__(self, shards: dict[Any, Shard], stored_tile: tuple[int, int], source: Source):
        super().__init__(shards, stored_tile, source)
        self._parts: dict[int, dict[str, Any]] = {}  # of what scales are made, by a shard's first row

    def load_halves(self, loaded: Any, shard: Shard) -> None:
        """[out * in / 2, 1], the first code of a byte in its high half."""
        rows, inputs = shard.shape
        check(inputs % GROUP == 0, f"inputs must be a multiple of {GROUP}", inputs)
        check_stored(loaded, (rows * inputs // 2, 1), {torch.uint8})
        packed = loaded[shard.rows.start * inputs // 2 : shard.rows.stop * inputs // 2]
        part = Shard((shard.size[0], inputs), columns=shard.columns)
        part.place = shard.place
        self.load_codes(packed.view(-1, inputs // 2), part)

    def load_state(self, loaded: Any, shard: Shard) -> None:
        """JSON, of which only the offset is news."""
        check_stored(loaded, (min(MAX_STATE, math.prod(loaded.shape)),), {torch.uint8})
        state = json.loads(bytes(loaded[...].tolist()))
        check(isinstance(state, dict), "must be an object", state)
        expected = {"quant_type": "nf4", "blocksize": GROUP, "nested_blocksize": NESTED}
        for field, value in expected.items():
            choose(state, field, [value], value)
        choose(state, "shape", [[*shard.shape]], [*shard.shape])
        offset = state.get("nested_offset", 0)
        check(is_number(offset, float), "nested_offset must be a number", offset)
        self._keep("offset", offset, shard)

    def load_absmax(self, loaded: Any, shard: Shard) -> None:
        check_stored(loaded, (math.prod(shard.shape) // GROUP,), {torch.uint8})
        self._keep("absmax", loaded[...], shard)

    def load_nested_absmax(self, loaded: Any, shard: Shard) -> None:
        check_stored(loaded, (cdiv(math.prod(shard.shape), GROUP * NESTED),), {torch.float32})
        self._keep("nested_absmax", loaded[...], shard)

    def load_nested_quant_map(self, loaded: Any, shard: Shard) -> None:
        check_stored(loaded, (NESTED,), {torch.float32})
        self._keep("nested_quant_map", loaded[...], shard)

    def _keep(self, name: str, value: Any, shard: Shard) -> None:
        parts = self._parts.setdefault(shard.place.start, {})
        parts[name] = value
        if len(parts) == 4:
            places = parts["absmax"].int()
            scales = parts["nested_absmax"].repeat_interleave(NESTED)[: len(places)]
            scales = parts["nested_quant_map"][places] * scales + parts["offset"]
            check_finite(self._load_grid(self.scales, scales, shard))
            parts.clear()

    def load_table(self, loaded: Any, shard: Shard) -> None:
        check_stored(loaded, (len(TABLE),), {torch.float32})
        check(torch.equal(loaded[...], TABLE), "must be the table of nf4", loaded[...])
