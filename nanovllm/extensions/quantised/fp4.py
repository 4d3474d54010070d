"""Weights in 4-bit floating point (e2m1): NVFP4 and MXFP4.

NVFP4 has a scale in e4m3 for 16 inputs and a factor for the matrix, MXFP4 a power of two (e8m0) for 32
inputs. Of compressed-tensors and modelopt, codes become places in a table whose numbers are looked up as
those of nf4, and scales are kept times the factor. Experts in MXFP4, of gpt-oss and of GGUF files, keep their
codes, for kernels of their own. Source: OCP's Microscaling Formats specification.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanovllm.extensions.quantised.kernels.nf4 import FP4_CODES
from nanovllm.extensions.quantised.kernels.quantised_weight import (
    BLOCK,
    FP4_TABLE,
    HALF,
    in_bricks,
    unpack,
)
from nanovllm.extensions.quantised.scaled import IGNORED, ScaledWeight, Source
from nanovllm.extensions.quantised.scheme import Format, Scheme, listed
from nanovllm.kernels.runtime import gpu_properties
from nanovllm.layers.linear import Shard
from nanovllm.utils.loader import check_stored
from nanovllm.utils.validation import check

NVFP4_GROUP, MXFP4_GROUP = 16, BLOCK  # inputs that share a scale
LARGEST_SCALE = 128  # 2: kernels multiply by it and by 2^126 at once
ORDER = torch.tensor(FP4_CODES).argsort()  # where each code's number stands in the table


class Fp4(ScaledWeight):
    """`weight` uint8 [out, in / 2], places in FP4_NUMBERS; `scales` times the matrix's factor."""

    code_dtype, kept_codes, table, finest_group = torch.uint8, ORDER, FP4_TABLE, HALF
    product_dtype, highest = torch.float32, 6.0

    def __init__(self, shards: dict[Any, Shard], stored_tile: tuple[int, int], source: Source):
        self.scale_dtype = torch.bfloat16 if torch.get_default_dtype() == torch.bfloat16 else torch.float32
        super().__init__(shards, stored_tile, source)
        self.factors = torch.ones(self.shape[0], 1, dtype=torch.float32)

    def finish(self) -> None:
        combine = torch.mul if self.source is MODELOPT_NVFP4 else torch.div
        combine(self.scales.data, self.factors, out=self.scales.data)
        self.factors.fill_(1)
        super().finish()

    def load_factor(self, loaded: Any, shard: Shard) -> None:
        check_stored(loaded, () if tuple(loaded.shape) == () else (1,), {torch.float32})
        factor = float(loaded[...])
        check(0 < factor < torch.inf, "must hold a number above 0", factor)
        self.factors[shard.place] = factor


def read_mxfp4(config: dict[str, Any]) -> Scheme:
    """What a `quantization_config` of quant_method "mxfp4" says. Raises ValueError naming the field."""
    is_excepted, format = listed(config, "modules_to_not_convert"), Format(Mxfp4, {"source": MXFP4})
    return Scheme([format], lambda name: format if ".experts." in name and not is_excepted(name) else None)


class Mxfp4(ScaledWeight):
    """
    `weight` uint8 [out, in / 2], as of `Int4`, `scales` float8_e8m0fnu. On Hopper GPUs `finish` brings both
    into bricks for activations of 16 bits, and `largest` is the largest scale of each row.
    """

    code_dtype, scale_dtype, product_dtype = torch.uint8, torch.float8_e8m0fnu, torch.float32
    highest = 6.0

    def __init__(self, shards: dict[Any, Shard], source: Source, rounds_inputs: bool = False):
        super().__init__(shards, (1, MXFP4_GROUP), source)
        self.rounds_inputs = rounds_inputs
        # The rows of gates are the inputs of the second product: either both weights are packed, or neither.
        self.has_whole_bricks = all(shard.size[0] % BLOCK == 0 for shard in shards.values())

    def finish(self) -> None:
        weight, properties = self.quantised, gpu_properties(self.weight.device)
        can_be_packed = self.has_whole_bricks and weight.can_be_read() and self.dtype.itemsize == 2
        if properties and properties.major == 9 and can_be_packed:
            weight = in_bricks(weight)
            self.weight.data, self.scales.data = weight.codes, weight.scales
            self.largest = weight.largest
        elif self.rounds_inputs:
            raise ValueError(
                "activation_dtype='fp8' needs a Hopper GPU, dtype='bfloat16' or 'float16', and ranks with a "
                f"multiple of {BLOCK} of each expert's rows"
            )
        else:
            super().finish()

    def load_blocks(self, loaded: Tensor, shard: Shard) -> None:
        """[rows, groups, bytes of a group]."""
        rows, inputs = shard.shape
        check_stored(loaded, (rows, inputs // BLOCK, HALF), {torch.uint8})
        self.load_codes(loaded.flatten(1), shard)

    def load_scales(self, loaded: Tensor, shard: Shard) -> None:
        self._check_grid(loaded, shard, {torch.uint8})
        if (loaded > LARGEST_SCALE).any():
            raise ValueError(f"holds scales above 2 (a byte above {LARGEST_SCALE})")
        self._load_grid(self.scales.view(torch.uint8), loaded, shard)

    def load_blocks_of_gguf(self, loaded: Any, shard: Shard) -> None:
        """Blocks of a scale and the codes of 32 inputs, the first 16 in the low halves of bytes."""
        check_stored(loaded, shard.shape)
        if not hasattr(loaded, "encoded"):
            raise ValueError("is MXFP4, which no adapter can change")
        encoded = torch.from_numpy(np.array(loaded.encoded)).to(self.weight.device)
        blocks = encoded.unflatten(1, (-1, 1 + HALF))
        self.set_codes(shard.place, unpack(blocks[..., 1:].flatten(1))[shard.rows, shard.columns])
        self.load_scales(blocks[..., 0], shard)


MODELOPT_NVFP4 = Source(
    "modelopt",
    {
        "weight": ScaledWeight.load_codes,
        "weight_scale": ScaledWeight.load_scales,
        "weight_scale_2": Fp4.load_factor,
        **IGNORED,
    },
    word=torch.uint8,
    scale_dtypes={torch.float8_e4m3fn},
)
# Of experts, as gpt-oss's own checkpoints and GGUF files have them.
MXFP4 = Source("mxfp4", {"blocks": Mxfp4.load_blocks, "scales": ScaledWeight.load_scales}, word=torch.uint8)
MXFP4_OF_GGUF = Source("gguf", {"weight": Mxfp4.load_blocks_of_gguf})
