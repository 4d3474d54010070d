"""Weights in 8-bit floating point (e4m3): one scale a tensor, a row or a block.

The format of Qwen's and DeepSeek's checkpoints (`quant_method` "fp8", blocks of 128 x 128), one of
compressed-tensors', and made here from weights of more bits.
"""

from typing import Any

import torch

from nanovllm.kernels.fp8_linear import QuantisedRows, Unscaled, can_use_fp8, fp8_linear
from nanovllm.layers.quantization.scaled import SCALES, Part, Scaled, ignore
from nanovllm.layers.quantization.scheme import Format, Scheme, choose, listed, same_for_all
from nanovllm.utils.loader import StoredTensor, check_stored
from nanovllm.utils.validation import shown

EXPONENTS = {torch.float8_e8m0fnu, *SCALES}
BLOCK = 128


def read_fp8(config: dict[str, Any]) -> Scheme:
    """What a `quantization_config` of quant_method "fp8" says. Raises ValueError naming the field."""
    choose(config, "fmt", ["e4m3", "float8_e4m3fn"], "e4m3")
    choose(config, "activation_scheme", ["dynamic", "static"], "dynamic")
    choose(config, "scale_fmt", ["float", "ue8m0"], "float")
    block = config.get("weight_block_size")
    if block not in (None, [BLOCK, BLOCK]):
        raise ValueError(f"weight_block_size = {shown(block)} is not supported; supported: [128, 128], null")
    format = Format(Fp8, {"stored_tile": tuple(block or (0, 0)), "source": "fp8"})
    return same_for_all(format, listed(config, "modules_to_not_convert", "ignored_layers"))


def make_fp8() -> Scheme:
    """A scale for each row of each rank's part."""
    return same_for_all(Format(Fp8, {"stored_tile": (1, 0), "source": "floats"}))


class Fp8(Scaled):
    """`weight` float8_e4m3fn [out, in], `scales` float32."""

    highest = 448.0

    def __init__(self, parts: dict[Any, Part], stored_tile: tuple[int, int], source: str):
        super().__init__(parts, stored_tile)
        self.weight = self._parameter("weight", *self.shape, dtype=torch.float8_e4m3fn)
        if source == "floats":
            self.stored = {"weight": StoredTensor(self.load_floats)}
            return
        self.stored = {"weight": StoredTensor(self._load_weight)}
        self.stored |= dict.fromkeys(("input_scale", "activation_scale"), StoredTensor(ignore, True))
        if source == "fp8":
            self.stored["weight_scale_inv"] = StoredTensor(self._load_exact_scales)
        else:
            self.stored["weight_scale"] = StoredTensor(self.load_scales)

    def _load_weight(self, loaded: Any, part: Part) -> None:
        check_stored(loaded, part.shape, {torch.float8_e4m3fn})
        target = self.weight.data[part.place].copy_(loaded[part.rows, part.columns])
        if ((target.view(torch.uint8) & 0x7F) == 0x7F).any():
            raise ValueError("holds NaN")

    def _load_exact_scales(self, loaded: Any, part: Part) -> None:
        """Scales of whatever dtype, with products that are rounded only once."""
        self.load_scales(loaded, part, dtypes=EXPONENTS)

    def activation_group(self, x: torch.Tensor) -> int | None:
        weight = self.quantised
        return weight.group if can_use_fp8(x, weight) else None

    def multiply(
        self, x: torch.Tensor | QuantisedRows, bias: torch.Tensor | None, leave_scales: bool = False
    ) -> torch.Tensor | Unscaled:
        if isinstance(x, QuantisedRows):
            return fp8_linear(x, self.quantised, bias, leave_scales)
        return super().multiply(x, bias)

    def round(self, values: torch.Tensor) -> torch.Tensor:
        return values.clamp_(-self.highest, self.highest)

    def set_codes(self, rows: slice, codes: torch.Tensor) -> None:
        self.weight.data[rows] = codes.to(torch.float8_e4m3fn)
