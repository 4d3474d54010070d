"""GGUF's types of 4 bits, Q4_0 and Q4_1, kept packed where a CPU computes in bfloat16.

A block of 32 inputs has a scale and a lowest value (Q4_0's codes are around 8). torch has a product for
exactly that, `_weight_int4pack_mm_for_cpu`: (code - 8) * scale + zero with both in the dtype of the
activations, which is the only rounding. It is made for few rows; for many the weight is converted in pieces.
In float32 that product is several times slower than oneDNN's on converted weights, and for other types torch
has none: they are converted when they are loaded.
"""

from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.kernels import runtime
from nanovllm.layers.quantization.plain import can_pack, multiply, packed
from nanovllm.layers.quantization.scaled import Part, matrix_shape
from nanovllm.layers.quantization.scheme import Format, Scheme, same_for_all
from nanovllm.layers.quantization.weight_format import WeightFormat
from nanovllm.utils.loader import StoredTensor, check_finite, check_stored

TYPES = {"Q4_0", "Q4_1"}
BLOCK = 32  # inputs
LANES = 64  # outputs whose codes torch keeps together, where it has AVX-512
MANY_ROWS = 64  # from here on, converting a weight first is faster
PIECE = 2**20  # weights that are converted at a time


def read_gguf(config: dict[str, Any]) -> Scheme:
    """All layers are loaded by `GGUF` where its products are fast, else none."""
    on_cpu = torch.get_default_device().type == "cpu" and runtime.compiling_for is None
    is_fast = on_cpu and torch.get_default_dtype() == torch.bfloat16
    return same_for_all(Format(GGUF, {}), lambda name: not is_fast)


class Codes(NamedTuple):
    """(codes - 8) * scales + zeros: uint8 [out, in], and float32 [out, blocks of inputs]."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor


class GGUF(WeightFormat):
    """A weight [out, in] whose parts have types of their own: neighbours of one kind are one product."""

    def __init__(self, parts: dict[Any, Part]):
        self.shape = matrix_shape(parts)
        self.stored = {"weight": StoredTensor(self._load)}
        self.products: list[PackedCodes | Converted] = []
        self._waiting: dict[int, Codes | torch.Tensor | None] = {part.offset: None for part in parts.values()}

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """What it multiplies with; nothing as long as parts are missing."""
        found = [tensor for product in self.products for tensor in product.tensors]
        return {str(i): tensor for i, tensor in enumerate(found)}

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None, leave_scales: bool = False
    ) -> torch.Tensor:
        """x [tokens, in] @ weight.T + bias: [tokens, out]."""
        outputs = [product.multiply(x) for product in self.products]
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        return y if bias is None else y + bias

    def dequantise(self) -> torch.Tensor:
        """The weight that is multiplied."""
        return torch.cat([product.dequantise() for product in self.products])

    def _load(self, loaded: Any, part: Part) -> None:
        check_stored(loaded, part.shape)
        self._waiting[part.offset] = self._read(loaded, part)
        if any(each is None for each in self._waiting.values()):
            return
        in_order = [each for _, each in sorted(self._waiting.items())]
        self._waiting = dict.fromkeys(self._waiting)
        for kind, run in groupby(in_order, type):
            if kind is Codes:
                self.products.append(PackedCodes(*map(torch.cat, zip(*run, strict=True))))
            else:
                self.products.append(Converted(torch.cat([*run])))

    def _read(self, loaded: Any, part: Part) -> Codes | torch.Tensor:
        cut = part.columns
        has_codes = getattr(loaded, "quantisation", None) is not None and loaded.quantisation.name in TYPES
        if has_codes and cut.start % BLOCK == cut.stop % BLOCK == part.size[0] % LANES == 0:
            codes = read_blocks(loaded.blocks(part.rows, cut), loaded.quantisation.name)
            check_finite(codes.scales + codes.zeros)
            return codes
        values = loaded[part.rows, cut].to(torch.get_default_dtype())
        check_finite(values)
        return values

    def finish(self) -> None:
        """Called when all tensors are loaded."""


def read_blocks(blocks: np.ndarray, kind: str) -> Codes:
    """Blocks as they are stored, uint8 [rows, blocks, bytes]: float16 scale, in Q4_1 minimum, 16 pairs."""
    first = 2 if kind == "Q4_0" else 4
    head = torch.from_numpy(blocks[..., :first].copy()).view(torch.float16).float()
    pairs = torch.from_numpy(blocks[..., first:].copy())
    codes = torch.cat((pairs & 15, pairs >> 4), dim=-1).flatten(1)
    scales = head[..., 0]
    # Exact in float32: the sum of a float16 number and eight times another of similar size.
    zeros = torch.zeros_like(scales) if kind == "Q4_0" else head[..., 1] + 8 * scales
    return Codes(codes, scales, zeros)


class PackedCodes:
    """Half a byte a weight, and scale and zero of each block in bfloat16."""

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor):
        self.shape = tuple(codes.shape)
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        pairs = torch.stack((scales, zeros), dim=-1).to(torch.bfloat16)
        self.scales_and_zeros = pairs.transpose(0, 1).contiguous()  # [blocks, out, 2]
        self.tensors = self.packed, self.scales_and_zeros
        # torch lays codes out as suits the CPU. Only this layout is known here; any can be multiplied.
        self.is_readable = torch.equal(self._codes(slice(0, self.shape[0])).flatten(1).t(), codes)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) < MANY_ROWS or not self.is_readable:
            pairs = self.scales_and_zeros
            return torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), self.packed, BLOCK, pairs)
        return torch.cat([x @ self._columns(piece) for piece in self._pieces()], dim=-1)

    def dequantise(self) -> torch.Tensor:
        return torch.cat([self._columns(piece).t() for piece in self._pieces()])

    def _pieces(self) -> list[slice]:
        rows, width = self.shape
        step = max(1, PIECE // width // LANES) * LANES
        return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]

    def _codes(self, rows: slice) -> torch.Tensor:
        """Of these outputs, uint8 [in, blocks of outputs, 64]."""
        pairs = self.packed.view(-1, self.shape[1], LANES // 2)
        pairs = pairs[rows.start // LANES : rows.stop // LANES].transpose(0, 1)
        return torch.cat((pairs & 15, pairs >> 4), dim=-1)

    def _columns(self, rows: slice) -> torch.Tensor:
        """These outputs' weights transposed, bfloat16 [in, outputs]."""
        codes = self._codes(rows).to(torch.bfloat16).sub_(8).view(-1, BLOCK, rows.stop - rows.start)
        scales, zeros = self.scales_and_zeros[:, rows].permute(2, 0, 1).unsqueeze(2).contiguous()
        return torch.addcmul(zeros, codes, scales).flatten(0, 1)


class Converted:
    """Weights in the dtype of the model."""

    def __init__(self, weight: torch.Tensor):
        self.weight = packed(weight) if can_pack(weight) else weight
        self.tensors = (self.weight,)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return multiply(x, self.weight)

    def dequantise(self) -> torch.Tensor:
        return self.weight.to_dense() if self.weight.is_mkldnn else self.weight
