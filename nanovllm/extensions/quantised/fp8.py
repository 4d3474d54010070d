"""Weights in 8-bit floating point (e4m3): one scale a tensor, a row or a block.

The format of Qwen's and DeepSeek's checkpoints (`quant_method` "fp8", blocks of 128 x 128), one of
compressed-tensors', two of NVIDIA's modelopt, and made here from weights of more bits.
"""

from typing import Any

import torch

from nanovllm.extensions.quantised.fp4 import GROUPS, MODELOPT, Fp4
from nanovllm.extensions.quantised.kernels.fp8_linear import can_use_fp8
from nanovllm.extensions.quantised.products import Fp8Product, example_row, gemv_products
from nanovllm.extensions.quantised.scaled import IGNORED, ONE_TILE, SCALES, Packing, ScaledWeight
from nanovllm.extensions.quantised.scheme import Format, Scheme, choose, listed, names_in, same_for_all
from nanovllm.layers.linear import Product, Shard
from nanovllm.utils.loader import StoredTensor

EXPONENTS = {torch.float8_e8m0fnu, *SCALES}
BLOCK = [128, 128]
MODELOPT_TILES = {"FP8": ONE_TILE, "FP8_PER_CHANNEL_PER_TOKEN": (1, 0)}
MODELOPT_FP4 = "NVFP4", "W4A16_NVFP4"  # what it says of activations is not needed


def read_fp8(config: dict[str, Any]) -> Scheme:
    """What a `quantization_config` of quant_method "fp8" says. Raises ValueError naming the field."""
    choose(config, "fmt", ["e4m3", "float8_e4m3fn"], "e4m3")
    choose(config, "activation_scheme", ["dynamic", "static"], "dynamic")
    choose(config, "scale_fmt", ["float", "ue8m0"], "float")
    block = choose(config, "weight_block_size", [None, BLOCK])
    # AutoFP8 has no such field, and another name for its scales.
    source = "fp8" if "weight_block_size" in config else "AutoFP8"
    format = Format(Fp8, {"stored_tile": tuple(block or ONE_TILE), "source": source})
    return same_for_all(format, listed(config, "modules_to_not_convert", "ignored_layers"))


def read_modelopt(config: dict[str, Any]) -> Scheme:
    """What a `quantization_config` of quant_method "modelopt" says. Raises ValueError naming the field."""
    algorithm = config.get("quant_algo")
    algorithm = algorithm.upper() if isinstance(algorithm, str) else algorithm
    choose({"quant_algo": algorithm}, "quant_algo", [*MODELOPT_TILES, *MODELOPT_FP4])
    ignored = {"ignore": [*map(_as_pattern, names_in(config, "ignore"))]}
    if algorithm in MODELOPT_FP4:
        choose(config, "group_size", [GROUPS[MODELOPT]], GROUPS[MODELOPT])
        format = Format(Fp4, {"source": MODELOPT})
    else:
        format = Format(Fp8, {"stored_tile": MODELOPT_TILES[algorithm], "source": MODELOPT})
    return same_for_all(format, listed(ignored, "ignore"))


def _as_pattern(name: str) -> str:
    """For `listed`, from a name with `*` for any text, or "re:" and a regular expression."""
    if name.startswith("re:"):
        return name[3:]
    return name.replace(".", r"\.").replace("*", ".*") if "*" in name else name


def make_fp8() -> Scheme:
    """A scale for each row of each rank's part."""
    return same_for_all(Format(Fp8, {"stored_tile": (1, 0), "source": "floats"}))


class Fp8(ScaledWeight):
    """`weight` float8_e4m3fn [out, in], `scales` float32."""

    code_dtype, highest = torch.float8_e4m3fn, 448.0
    packing = Packing(torch.float8_e4m3fn, 8)

    def __init__(self, shards: dict[Any, Shard], stored_tile: tuple[int, int], source: str):
        super().__init__(shards, stored_tile)
        if source == "floats":
            return
        self.stored = {"weight": StoredTensor(self._load_weight)}
        # The last three are of keys and values.
        names = "input_scale", "activation_scale", "output_scale", "k_scale", "v_scale"
        self.stored |= dict.fromkeys(names, IGNORED)
        name = "weight_scale_inv" if source == "fp8" else "weight_scale"
        self.stored[name] = StoredTensor(self.load_scales)
        self.has_flat_scales = source == MODELOPT
        if source in ("fp8", "AutoFP8", MODELOPT):
            self.stored_scales = EXPONENTS  # of whatever dtype they are, products are rounded only once

    def _load_weight(self, loaded: Any, shard: Shard) -> None:
        self.load_codes(loaded, shard)
        if ((self.weight.data[shard.place].view(torch.uint8) & 0x7F) == 0x7F).any():
            raise ValueError("holds NaN")

    def products(self, layer: Any) -> list[Product]:
        """In 8 bits beside a residual stream, where the norm or the activation quantises."""
        weight = self.quantised
        gemv = gemv_products(weight, self.dtype, self.make_gemv)
        if layer.hidden_size is None or not can_use_fp8(example_row(weight, self.dtype), weight):
            return gemv
        return [*gemv, Fp8Product(weight)]

    def round(self, values: torch.Tensor) -> torch.Tensor:
        return values.clamp_(-self.highest, self.highest)
