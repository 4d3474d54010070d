"""Weights in 8-bit floating point (e4m3): one scale a tensor, a row or a block.

The format of Qwen's and DeepSeek's checkpoints (`quant_method` "fp8", blocks of 128 x 128), one of
compressed-tensors', two of NVIDIA's modelopt, and made here from weights of more bits.
"""

from typing import Any

import torch

from nanovllm.extensions.quantised.fp4 import MODELOPT_NVFP4, NVFP4_GROUP, Fp4
from nanovllm.extensions.quantised.scaled import FLOATS, IGNORED, ONE_TILE, SCALES, ScaledWeight, Source
from nanovllm.extensions.quantised.scheme import Format, Scheme, choose, listed, names_in, same_for_all
from nanovllm.layers.linear import Shard

CODES = {"weight": "codes", **IGNORED}
# Scales of whatever dtype they are: products are rounded only once.
FP8 = Source("fp8", CODES | {"weight_scale_inv": "scales"}, scale_dtypes={torch.float8_e8m0fnu, *SCALES})
AUTO_FP8 = FP8._replace(name="AutoFP8", tensors=CODES | {"weight_scale": "scales"})
MODELOPT = AUTO_FP8._replace(name="modelopt", has_flat_scales=True)
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
    source = FP8 if "weight_block_size" in config else AUTO_FP8
    format = Format(Fp8, {"stored_tile": tuple(block or ONE_TILE), "source": source})
    return same_for_all(format, listed(config, "modules_to_not_convert", "ignored_layers"))


def read_modelopt(config: dict[str, Any]) -> Scheme:
    """What a `quantization_config` of quant_method "modelopt" says. Raises ValueError naming the field."""
    algorithm = config.get("quant_algo")
    algorithm = algorithm.upper() if isinstance(algorithm, str) else algorithm
    choose({"quant_algo": algorithm}, "quant_algo", [*MODELOPT_TILES, *MODELOPT_FP4])
    ignored = {"ignore": [*map(_as_pattern, names_in(config, "ignore"))]}
    if algorithm in MODELOPT_FP4:
        choose(config, "group_size", [NVFP4_GROUP], NVFP4_GROUP)
        format = Format(Fp4, {"stored_tile": (1, NVFP4_GROUP), "source": MODELOPT_NVFP4})
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
    return same_for_all(Format(Fp8, {"stored_tile": (1, 0), "source": FLOATS}))


class Fp8(ScaledWeight):
    """`weight` float8_e4m3fn [out, in], `scales` float32."""

    code_dtype, lowest, highest = torch.float8_e4m3fn, -448.0, 448.0

    def load_codes(self, loaded: Any, shard: Shard) -> None:
        super().load_codes(loaded, shard)
        if ((self.weight.data[shard.place].view(torch.uint8) & 0x7F) == 0x7F).any():
            raise ValueError("holds NaN")
