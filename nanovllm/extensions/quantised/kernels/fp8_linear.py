"""Products in 8-bit floating point: rows of activations are quantised as a checkpoint's weights are.

Where weights have a scale for each 128 x 128 block, activations get one for each 128 inputs of a row; where
weights have one for each row, activations do too. torch's library multiplies. It takes these scales itself,
but is faster without them, so where the next kernel can apply them that is left to it (`Unscaled`).
Quantising is part of what computes the activations: an RMSNorm or SwiGLU.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.extensions.quantised.kernels.gpu import gpu_supports
from nanovllm.extensions.quantised.kernels.permute_k import column_at, column_at_fp8
from nanovllm.extensions.quantised.kernels.quantised_weight import QuantisedWeight
from nanovllm.kernels.activation import silu, silu_and_mul_torch
from nanovllm.kernels.layernorm import add_rms_norm_torch
from nanovllm.kernels.runtime import (
    cdiv,
    gpu_properties,
    masked_load,
    next_power_of_2,
    on_default_stream,
    overlap_options,
    tl,
    triton,
    use_triton,
)

GROUP = 128
LARGEST, SMALLEST = 448.0, 1e-30  # code, and scale
LARGEST_CODE, SMALLEST_SCALE = tl.constexpr(LARGEST), tl.constexpr(SMALLEST)
INPUTS = tl.constexpr(GROUP)  # of a sum
ROW_MULTIPLE = 16  # the library takes whole multiples of rows


class QuantisedRows(NamedTuple):
    """
    x [rows, in] as float8_e4m3fn codes times scales, with room behind them for a multiple of ROW_MULTIPLE.
    `scales`, float32, are [padded rows] or, of groups of 128 inputs, [groups, padded rows].
    """

    codes: Tensor
    scales: Tensor
    rows: int
    dtype: torch.dtype  # of x
    sums: Tensor | None = None  # of codes of each 128 inputs, float32 [groups, padded rows], if permuted


class Unscaled(NamedTuple):
    """A product [rows, out] that, unless it has no scales, is still to be multiplied by two of them."""

    values: Tensor
    row_scales: Tensor | None = None  # float32, at least [rows]
    column_scales: Tensor | None = None  # float32 [out]

    @classmethod
    def of(cls, x: "Tensor | Unscaled") -> "Unscaled":
        return x if isinstance(x, Unscaled) else cls(x)

    def scaled(self) -> Tensor:
        if self.row_scales is None:
            return self.values
        rows = self.row_scales[: len(self.values), None]
        return (self.values.float() * rows * self.column_scales).to(self.values.dtype)


def can_use_fp8(x: Tensor, weight: QuantisedWeight) -> bool:
    """Whether rows like x [rows, features] can be quantised and multiplied by this weight."""
    is_possible = use_triton(x) and gpu_supports(x.device, 8, 9)
    if not (is_possible and weight.is_fp8 and x.dtype == torch.bfloat16):
        return False
    out_features, in_features = weight.shape
    if not weight.group:
        return out_features % 16 == in_features % 16 == 0
    # Four blocks of inputs: versions of torch differ in how they want the scales of fewer.
    fits = weight.tile == (GROUP, GROUP) and in_features % (4 * GROUP) == out_features % GROUP == 0
    return fits and library_scales_groups(x.device)


def library_scales_groups(device: torch.device) -> bool:
    """Whether torch's library multiplies rows with a scale for each GROUP inputs."""
    cuda = tuple(map(int, (torch.version.cuda or "0").split(".")[:2]))
    return cuda >= (12, 9) and gpu_properties(device).major == 9


def fp8_linear(
    x: QuantisedRows, weight: QuantisedWeight, bias: Tensor | None = None, leave_scales: bool = False
) -> Tensor | Unscaled:
    """x @ weight.T + bias: [rows, out]. Without a bias, scales of rows may be left to the next kernel."""
    is_left = leave_scales and bias is None and not weight.group
    if is_left:
        x_scales = weight_scales = _one(x.codes.device)
    else:
        x_scales = x.scales.t() if weight.group else x.scales[:, None]
        weight_scales = weight.scales.t()
    y = torch._scaled_mm(
        x.codes,
        weight.codes.t(),
        scale_a=x_scales,
        scale_b=weight_scales,
        out_dtype=x.dtype,
        use_fast_accum=not weight.group,
    )[: x.rows]
    if is_left:
        return Unscaled(y, x.scales, weight.scales[:, 0])
    return y if bias is None else y.add_(bias)


@functools.cache
def _one(device: torch.device) -> Tensor:
    """1, float32."""
    with on_default_stream(device):
        return torch.ones((), dtype=torch.float32, device=device)


def quantise(x: Tensor | Unscaled, group: int, per_byte: int = 0, gated: bool = False) -> QuantisedRows:
    """
    Quantise rows x [rows, width]; a scale is for `group` inputs, or for a row if that is 0. If gated, what is
    quantised is `silu_and_mul` of rows [rows, 2 * width]. `per_byte`: see `prepare_rows`.
    """
    return prepare_rows(x, group, False, per_byte, gated)[0]


def quantise_torch(x: Tensor, group: int) -> QuantisedRows:
    quantised = _empty_rows(x, x.shape[1], group)
    parts = x.float().view(len(x), -1, group or x.shape[1])
    scales = parts.abs().amax(-1).div(LARGEST).clamp_min(SMALLEST)
    quantised.codes[: len(x)] = (parts / scales[..., None]).view_as(x).to(torch.float8_e4m3fn)
    quantised.scales[..., : len(x)] = scales.t()
    return quantised


def prepare_rows(
    x: Tensor | Unscaled,
    group: int | None,
    keep: bool = False,
    per_byte: int = 0,
    gated: bool = False,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 0.0,
) -> tuple[QuantisedRows | None, Tensor, Tensor | None]:
    """
    What a product is to multiply, by one kernel: rows [rows, width], of which two parts side by side are
    `silu_and_mul` if gated; with a norm's weight as `layernorm.add_rms_norm`, and then x may be parts [rows,
    parts, width] of a sum, beside a residual. They are quantised, unless group is None; to `keep`, as they
    are, too. On GPUs, what is kept may have its columns permuted for a weight with `per_byte` codes in a
    byte: then the width is a multiple of PADDING. So may quantised rows with one scale and a width that is a
    multiple of GROUP, as `column_at_fp8` says, and then they have `sums`.
    -> quantised rows or None, the sum, the rows or None.
    """
    x = Unscaled.of(x)
    if not use_triton(x.values):
        rows = total = x.scaled()
        if weight is not None:
            total = rows.sum(1) if rows.dim() == 3 else rows
            rows, total = add_rms_norm_torch(total, residual, weight, eps)
        elif gated:
            rows = silu_and_mul_torch(rows)
        return None if group is None else quantise_torch(rows, group), total, rows if keep else None
    values = x.values
    num_rows, width = len(values), values.shape[-1] // (1 + gated)
    block = next_power_of_2(width)
    quantised, targets = None, (None, None, None, 0)
    if group is not None:
        quantised = _empty_rows(values, width, group)
        if per_byte:
            sums = quantised.scales.new_empty(width // GROUP, len(quantised.codes))
            quantised = quantised._replace(sums=sums)
        targets = quantised.codes, quantised.scales, quantised.sums, len(quantised.codes)
    total = None if residual is None else torch.empty_like(residual)
    kept = values.new_empty(num_rows, width) if keep else None
    if num_rows:
        _quantise_kernel[(num_rows,)](
            *x, residual, weight, total, kept, *targets,
            eps, values.stride(0), 0 if residual is None else residual.stride(0),
            PARTS=values.shape[1:].numel() // width, WIDTH=width, BLOCK=block, GROUP=group, PER_BYTE=per_byte,
            num_warps=max(1, min(16, block // 256)), **overlap_options(values.device),
        )  # fmt: skip
    return quantised, values if total is None else total, kept


def _empty_rows(x: Tensor, width: int, group: int) -> QuantisedRows:
    padded = cdiv(len(x), ROW_MULTIPLE) * ROW_MULTIPLE
    codes = torch.empty(padded, width, dtype=torch.float8_e4m3fn, device=x.device)
    shape = (width // group, padded) if group else (padded,)
    return QuantisedRows(codes, torch.empty(shape, dtype=torch.float32, device=x.device), len(x), x.dtype)


@triton.jit
def _store_quantised(value, row, codes, scales, sums, padded_rows, WIDTH, BLOCK, GROUP):
    """Store a row, float32 [BLOCK], which is 0 beyond WIDTH."""
    INPUTS_OF_SCALE: tl.constexpr = BLOCK if GROUP == 0 else GROUP
    part = tl.arange(0, BLOCK // INPUTS_OF_SCALE)
    parts = tl.reshape(value, [BLOCK // INPUTS_OF_SCALE, INPUTS_OF_SCALE])
    scale = tl.maximum(tl.max(tl.abs(parts), axis=1) / LARGEST_CODE, SMALLEST_SCALE)
    tl.store(scales + part.to(tl.int64) * padded_rows + row, scale, mask=part * INPUTS_OF_SCALE < WIDTH)
    quotient = tl.reshape(parts / scale[:, None], [BLOCK])
    column = tl.arange(0, BLOCK)
    code = quotient.to(codes.dtype.element_ty)
    tl.store(codes + row * WIDTH + column, code, mask=column < WIDTH)
    if sums is not None:
        part = tl.arange(0, BLOCK // INPUTS)
        its_sums = tl.sum(tl.reshape(code.to(tl.float32), [BLOCK // INPUTS, INPUTS]), axis=1)
        tl.store(sums + part.to(tl.int64) * padded_rows + row, its_sums, mask=part < WIDTH // INPUTS)


@triton.jit
def _quantise_kernel(
    x, row_scales, column_scales, residual, weight, total, normed, codes, scales, sums, padded_rows,
    eps, x_stride, residual_stride,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    PER_BYTE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """
    A row of x has PARTS of this width. With a norm's weight they are added up, and rounding is where
    layernorm's kernel rounds; else two are gates and what they multiply.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        if weight is None:  # first of all: loads on both sides of the wait would take twice the registers
            tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    if PER_BYTE > 0:  # WIDTH is a whole number of the pieces that are permuted
        column = column_at(column, PER_BYTE) if codes is None else column_at_fp8(column)
    inside = column < WIDTH
    if row_scales is not None:
        column_scale = masked_load(column_scales + column, inside)
    # Weights do not change, so they are loaded while the kernel before this one ends.
    if weight is not None:
        gain = masked_load(weight + column, inside).to(tl.float32)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
    x += row * x_stride + column
    value = masked_load(x, inside)
    dtype: tl.constexpr = value.dtype
    value = value.to(tl.float32)
    if row_scales is not None:
        value *= tl.load(row_scales + row) * column_scale
    for part in tl.static_range(1, PARTS):
        other = masked_load(x + part * WIDTH, inside).to(tl.float32)
        if row_scales is not None:
            other *= tl.load(row_scales + row) * masked_load(column_scales + part * WIDTH + column, inside)
        value = value + other if weight is not None else silu(value) * other
    if residual is not None:
        value += masked_load(residual + row * residual_stride + column, inside).to(tl.float32)
        value = value.to(dtype).to(tl.float32)
        tl.store(total + row * WIDTH + column, value, mask=inside)
    if weight is not None:
        scale = tl.rsqrt(tl.sum(value * value) / WIDTH + eps)
        value = (value * scale).to(dtype).to(tl.float32) * gain
    if normed is not None:
        tl.store(normed + row * WIDTH + tl.arange(0, BLOCK), value, mask=inside)
    if codes is not None:
        _store_quantised(value, row, codes, scales, sums, padded_rows, WIDTH, BLOCK, GROUP)
