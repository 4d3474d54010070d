"""Products of quantised weights, and what they leave half done for the next one.

A product in 8 bits wants its input quantised, which is part of what computes it: of the norm
(`quantised_rows`) or of the activation (`Gates`). torch's library is faster without scales, so they are left
to that kernel, too: an addition to the residual waits for the norm that follows (`PendingAdd`). A product of
codes wants the columns of its input in another order, which is also part of the norm or the activation.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.extensions.quantised.kernels.fp8_linear import (
    GROUP,
    QuantisedRows,
    Unscaled,
    can_use_fp8,
    fp8_linear,
    library_scales_groups,
    prepare_rows,
    quantise,
)
from nanovllm.extensions.quantised.kernels.grouped_codes import (
    MAX_ROWS,
    can_use_linear_codes,
    linear_codes,
)
from nanovllm.extensions.quantised.kernels.grouped_fp8 import MAX_LINEAR_ROWS, linear_fp8
from nanovllm.extensions.quantised.kernels.grouped_int4 import in_fp8, linear_int4
from nanovllm.extensions.quantised.kernels.permute_k import PADDING, permute_k
from nanovllm.extensions.quantised.kernels.quantised_matvec import (
    can_use_quantised_matvec,
    matvec_of_parts,
    quantised_matvec,
)
from nanovllm.extensions.quantised.kernels.quantised_weight import QuantisedWeight
from nanovllm.kernels.activation import silu_and_mul
from nanovllm.layers.layernorm import RMSNorm, Stream
from nanovllm.layers.linear import Product, activated

# Where int4's inputs may be rounded: up to the first number of rows they are not, which is as fast; above the
# second torch's library multiplies.
MAX_UNROUNDED_ROWS, MAX_INT4_ROWS = 64, 1024


@dataclass
class PendingAdd(Stream):
    """On one rank: something that is to be added to x together with the norm."""

    pending_add: Tensor | Unscaled | None = None  # as x, or parts of a sum [tokens, parts, hidden]

    @property
    def is_untouched(self) -> bool:
        return self.normed is None and self.pending_add is None

    def residual(self) -> Tensor:
        if self.pending_add is not None:
            _normalise(self, None, True)
        return self.x

    def normalised(self) -> Tensor:
        self.residual()  # which keeps the norm, too
        return super().normalised()


def _can_normalise(stream: Stream) -> bool:
    """Whether the norm is still to be computed, and this rank has all that it needs."""
    if getattr(stream, "pending_add", None) is not None:
        return True
    return stream.is_untouched and stream.norm.group.size == 1


def _normalise(
    stream: Stream, scale_group: int | None, keep: bool, per_byte: int = 0
) -> QuantisedRows | None:
    """The addition if there is one, the norm, and unless scale_group is None its codes, by one kernel."""
    x, residual = stream.x, None
    if (pending_add := getattr(stream, "pending_add", None)) is not None:
        x, residual, stream.pending_add = pending_add, stream.x, None
    norm = dict(residual=residual, weight=stream.norm.weight, eps=stream.norm.eps)
    rows, stream.x, stream.normed = prepare_rows(x, scale_group, keep, per_byte, **norm)
    return rows


def quantised_rows(stream: Stream, scale_group: int, per_byte: int = 0, keep: bool = False) -> QuantisedRows:
    """
    norm(x) with a scale for so many of its numbers, or, if that is 0, for each row. `keep` says that
    `normalised` will be asked for, too. `per_byte`: see `prepare_rows`.
    """
    if not _can_normalise(stream):
        return quantise(stream.normalised(), scale_group, per_byte)
    return _normalise(stream, scale_group, keep, per_byte)


class Gates(NamedTuple):
    """A product in front of the activation: the product that follows knows whether it wants it quantised."""

    product: Tensor | Unscaled  # [tokens, 2 * width]

    def activated(self) -> Tensor:
        """[tokens, width]."""
        return silu_and_mul(Unscaled.of(self.product).scaled())


class PreparedProduct(Product):
    """Of rows that are `prepared` for it by what computes them: the norm, or the activation."""

    def __init__(self, weight: QuantisedWeight):
        self.weight = weight

    def linear(self, x: Any, bias: Tensor | None, gated: bool = False) -> Tensor | Gates:
        return self._multiply(self.prepared(x), bias, gated)

    def norm_linear(self, stream: Stream, bias: Tensor | None, gated: bool = False) -> Tensor | Gates:
        return self._multiply(self.normed(stream), bias, gated)

    def linear_add(self, stream: Stream, x: Any, bias: Tensor | None, next_norm: RMSNorm) -> Stream:
        y = self.multiply_rows(self.prepared(x), bias, leave_scales=True)
        return PendingAdd(stream.residual(), next_norm, pending_add=y)

    def _multiply(self, rows: Any, bias: Tensor | None, gated: bool) -> Tensor | Gates:
        y = self.multiply_rows(rows, bias, leave_scales=gated)
        return Gates(y) if gated else y


class Fp8Product(PreparedProduct):
    """In 8 bits, for rows that are quantised as the weight is."""

    def __init__(self, weight: QuantisedWeight):
        super().__init__(weight)
        self.layout = weight.group, 0  # of rows: inputs of a scale, and `per_byte` of `prepare_rows`

    def prepared(self, x: Any) -> QuantisedRows:
        if isinstance(x, Gates):
            return quantise(x.product, *self.layout, gated=True)
        return quantise(activated(x), *self.layout)

    def normed(self, stream: Stream) -> QuantisedRows:
        return quantised_rows(stream, *self.layout)

    def multiply_rows(
        self, rows: QuantisedRows, bias: Tensor | None, leave_scales: bool
    ) -> Tensor | Unscaled:
        return fp8_linear(rows, self.weight, bias, leave_scales)


class FewRowsFp8Product(Fp8Product):
    """In decode steps of so few rows that a kernel of our own is faster; it applies scales and gates."""

    def accepts(self, rows: int, is_prefill: bool) -> bool:
        return not is_prefill and 0 < rows <= MAX_LINEAR_ROWS

    def multiply_rows(self, rows: QuantisedRows, bias: Tensor | None, leave_scales: bool) -> Tensor:
        return linear_fp8(rows, self.weight, bias)

    def _multiply(self, rows: QuantisedRows, bias: Tensor | None, gated: bool) -> Tensor:
        return linear_fp8(rows, self.weight, bias, gated)


class Int4Product(Fp8Product):
    """In 8 bits, too, for rows with a scale each, whose columns are permuted."""

    def __init__(self, weight: QuantisedWeight):
        super().__init__(weight)
        self.layout = 0, weight.codes_per_byte

    def multiply_rows(self, rows: QuantisedRows, bias: Tensor | None, leave_scales: bool) -> Tensor:
        return linear_int4(rows, self.weight, bias)


class UnpackedInt4Product(Fp8Product):
    """For so many rows that torch's library is faster, although it takes codes of 8 bits."""

    def __init__(self, weight: QuantisedWeight):
        super().__init__(weight)
        self.layout = GROUP, 0

    def accepts(self, rows: int, is_prefill: bool) -> bool:
        return rows > MAX_INT4_ROWS

    def multiply_rows(self, rows: QuantisedRows, bias: Tensor | None, leave_scales: bool) -> Tensor:
        return fp8_linear(rows, in_fp8(self.weight), bias)


class CodesProduct(PreparedProduct):
    """Of codes that become bfloat16 or float16, for rows whose columns are permuted."""

    def __init__(self, weight: QuantisedWeight, max_rows: int = MAX_ROWS):
        super().__init__(weight)
        self.max_rows = max_rows

    def accepts(self, rows: int, is_prefill: bool) -> bool:
        return 0 < rows <= self.max_rows

    def prepared(self, x: Any) -> Tensor:
        if isinstance(x, Gates):
            return prepare_rows(x.product, None, True, self.weight.codes_per_byte, gated=True)[2]
        return permute_k(activated(x), self.weight.codes_per_byte)

    def normed(self, stream: Stream) -> Tensor:
        per_byte = self.weight.codes_per_byte
        if not _can_normalise(stream):
            return permute_k(stream.normalised(), per_byte)
        _normalise(stream, None, True, per_byte)
        rows, stream.normed = stream.normed, None  # for others it would be in the wrong order
        return rows

    def multiply_rows(self, rows: Tensor, bias: Tensor | None, leave_scales: bool) -> Tensor:
        return linear_codes(rows, self.weight, bias)


def fast_products(
    weights: list[QuantisedWeight], layer: Any, dtype: torch.dtype, make_gemv: Callable[..., Product] | None
) -> list[Product]:
    """
    What this device has for inputs of this dtype: for a row or two, and for more; in 8 bits beside a residual
    stream alone, where the norm or the activation quantises. `make_gemv` makes the first one of what
    multiplies, as for dense weights; None if there is none for these either. Several weights are one below
    the other, and have that one alone.
    """
    found: list[Product] = []
    weight = weights[0]
    row = torch.empty(1, 1, dtype=dtype, device=weight.codes.device).expand(1, weight.shape[1])
    if make_gemv is not None and all(can_use_quantised_matvec(row, each) for each in weights):
        multiply = functools.partial(matvec_of_parts, weights=weights)
        if len(weights) == 1:
            multiply = functools.partial(quantised_matvec, weight=weight)
        found.append(make_gemv(multiply))
    if len(weights) > 1:
        return found
    if weight.is_fp8:
        if layer.hidden_size is not None and can_use_fp8(row, weight):
            found += [FewRowsFp8Product(weight), Fp8Product(weight)]
        return found
    if weight.shape[1] % PADDING == 0 and can_use_linear_codes(row, weight):
        found.append(CodesProduct(weight, MAX_UNROUNDED_ROWS if weight.rounds_inputs else MAX_ROWS))
    if weight.rounds_inputs and weight.shape[0] % 16 == 0 and library_scales_groups(row.device):
        found.append(UnpackedInt4Product(weight))
    if weight.rounds_inputs:
        found.append(Int4Product(weight))
    return found
