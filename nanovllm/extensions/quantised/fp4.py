"""Weights in 4-bit floating point (e2m1) by compressed-tensors and modelopt: NVFP4 and MXFP4.

NVFP4 has a scale in e4m3 for 16 inputs and a factor for the matrix, MXFP4 a power of two for 32 inputs. Twice
the number of a code is an integer, which is kept in a byte: kernels have 8-bit codes for any group of 16.
"""

from typing import Any

import torch
from torch import Tensor

from nanovllm.extensions.quantised.kernels.quantised_weight import E2M1
from nanovllm.extensions.quantised.packing import Packing
from nanovllm.extensions.quantised.scaled import IGNORED, ScaledWeight
from nanovllm.layers.linear import Shard
from nanovllm.utils.loader import StoredTensor, check_stored
from nanovllm.utils.validation import check

NVFP4, MXFP4, MODELOPT = "nvfp4-pack-quantized", "mxfp4-pack-quantized", "modelopt"
GROUPS = {NVFP4: 16, MXFP4: 32, MODELOPT: 16}  # inputs that share a scale
# What checkpoints call the codes, the matrix's factor, and what is not needed.
NAMES = {MODELOPT: ("weight", "weight_scale_2", "input_scale")}
OTHER_NAMES = "weight_packed", "weight_global_scale", "input_global_scale"
TWICE = torch.tensor([2 * number for number in E2M1 + [-number for number in E2M1]], dtype=torch.int8)


class Fp4(ScaledWeight):
    """`weight` int8 [out, in], twice the codes' numbers; `scales` float32, half of the checkpoint's."""

    code_dtype, kept_codes = torch.int8, TWICE
    packing = Packing(torch.uint8, 4)
    lowest, highest = -12.0, 12.0

    def __init__(self, shards: dict[Any, Shard], source: str):
        super().__init__(shards, (1, GROUPS[source]))
        self.source = source
        self.factors = torch.ones(self.shape[0], 1)
        self.stored_scales = {torch.uint8 if source == MXFP4 else torch.float8_e4m3fn}
        codes, factor, ignored = NAMES.get(source, OTHER_NAMES)
        self.stored = {
            codes: StoredTensor(self.load_codes),
            "weight_scale": StoredTensor(self.load_scales),
            ignored: IGNORED,
        }
        if source != MXFP4:
            self.stored[factor] = StoredTensor(self._load_factor)

    def finish(self) -> None:
        combine = torch.mul if self.source == MODELOPT else torch.div
        combine(self.scales.data, self.factors, out=self.scales.data)
        self.factors.fill_(1)

    def read_scales(self, stored: Tensor) -> Tensor:
        scales = stored.float()
        return ((scales - 127).exp2() if self.source == MXFP4 else scales) / 2

    def _load_factor(self, loaded: Any, shard: Shard) -> None:
        check_stored(loaded, () if tuple(loaded.shape) == () else (1,), {torch.float32})
        factor = float(loaded[...])
        check(0 < factor < torch.inf, "must hold a number above 0", factor)
        self.factors[shard.place] = factor
