"""The networks of the experts in a mixture of experts: which kernels compute them, and the reference."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.extensions.experts.kernels.experts import ExpertWeights, activate_torch
from nanovllm.extensions.experts.kernels.gemv import multiply_and_sum, multiply_gates
from nanovllm.extensions.experts.kernels.gemv_codes import multiply_and_sum_codes, multiply_gates_codes
from nanovllm.extensions.experts.kernels.grouped_gemm import DENSE_TILES, multiply_dense
from nanovllm.extensions.experts.kernels.grouped_mxfp4 import MXFP4_TILES, multiply_mxfp4
from nanovllm.extensions.experts.kernels.router import Chosen, sort_assignments
from nanovllm.extensions.quantised.kernels.fp8_linear import GROUP, QuantisedRows
from nanovllm.extensions.quantised.kernels.gpu import gpu_supports
from nanovllm.extensions.quantised.kernels.grouped_codes import CODE_TILES, multiply_codes
from nanovllm.extensions.quantised.kernels.grouped_fp8 import FP8_BLOCK_TILES, FP8_TILES, multiply_fp8
from nanovllm.extensions.quantised.kernels.grouped_gemm import GroupedProduct, Tile
from nanovllm.extensions.quantised.kernels.grouped_int4 import INT4_TILES, multiply_int4
from nanovllm.extensions.quantised.kernels.permute_k import permuted_width
from nanovllm.extensions.quantised.kernels.quantised_matvec import can_use_quantised_matvec
from nanovllm.extensions.quantised.kernels.quantised_weight import QuantisedWeight
from nanovllm.kernels.runtime import is_on_gpu, use_triton

MAX_GEMV_ROWS = 4
MAX_GEMV_ROWS_IN_BRICKS = 2  # for more the grouped GEMM is faster


class Gemv(NamedTuple):
    """What multiplies a few rows: the two products of `run_gemv`."""

    multiply_gates: Callable[..., None]
    multiply_and_sum: Callable[..., None]


class GroupedGemm(NamedTuple):
    """What multiplies any number of rows, and its tiles: see `GroupedProduct`."""

    multiply: Callable[..., None]
    tiles: dict[int, Tile]


GEMV = Gemv(multiply_gates, multiply_and_sum)
GEMV_CODES = Gemv(multiply_gates_codes, multiply_and_sum_codes)
DENSE = GroupedGemm(multiply_dense, DENSE_TILES)
FP8 = GroupedGemm(multiply_fp8, FP8_TILES)
FP8_BLOCKS = GroupedGemm(multiply_fp8, FP8_BLOCK_TILES)
CODES = GroupedGemm(multiply_codes, CODE_TILES)
MXFP4 = GroupedGemm(multiply_mxfp4, MXFP4_TILES)
ROUNDED_INT4 = GroupedGemm(multiply_int4, INT4_TILES)


def choose_kernels(x: Tensor, experts: ExpertWeights, is_prefill: bool) -> Gemv | GroupedGemm | None:
    """The fastest for rows like x in a step; None: the reference. DENSE takes weights of any other format."""
    if not use_triton(x):
        return None
    is_few = not is_prefill and len(x) <= MAX_GEMV_ROWS
    weights = [each for each in (experts.gate_up, experts.down) if isinstance(each, QuantisedWeight)]
    if len(weights) < 2:
        return GEMV if is_few and not weights else DENSE
    are_bricks = [each.is_in_bricks for each in weights]
    is_few = is_few and (len(x) <= MAX_GEMV_ROWS_IN_BRICKS or not any(are_bricks))
    if is_few and all(can_use_quantised_matvec(x[:1], each) for each in weights):
        return GEMV_CODES
    if x.dtype == torch.bfloat16 and gpu_supports(x.device, 8, 9) and all(map(_is_multiplied, weights)):
        return FP8_BLOCKS if experts.gate_up.group else FP8
    if is_on_gpu(x) and not (x.element_size() == 2 and gpu_supports(x.device, 8, 0)):
        return DENSE
    if all(are_bricks):
        return MXFP4
    if all(each.rounds_inputs for each in weights):
        return ROUNDED_INT4
    return CODES if not any(are_bricks) and all(each.can_be_read() for each in weights) else DENSE


def _is_multiplied(weight: QuantisedWeight) -> bool:
    """Whether the matrix unit takes its codes as they are."""
    in_blocks = weight.tile == (GROUP, GROUP) and weight.shape[1] % GROUP == 0
    return weight.is_fp8 and weight.shape[1] % 16 == 0 and (weight.group == 0 or in_blocks)


def run_experts(x: Tensor, experts: ExpertWeights, chosen: Chosen, is_prefill: bool) -> Tensor:
    """The weighted sum of what the chosen experts make of each row of x [tokens, hidden], in its shape."""
    kernels = choose_kernels(x, experts, is_prefill)
    if isinstance(kernels, Gemv):
        return run_gemv(kernels, x, experts, chosen)
    return run_grouped(kernels, x, experts, chosen, is_prefill).sum(1)


def run_gemv(
    kernels: Gemv,
    x: Tensor,
    experts: ExpertWeights,
    chosen: Chosen,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
) -> Tensor:
    """
    The same for a few rows. With norm_weight [hidden] x is normalised first; the residual [tokens, hidden] is
    added to the sum.
    """
    gated, out = x.new_empty(chosen.experts.numel(), experts.width), x.new_empty(x.shape)
    kernels.multiply_gates(x, experts, chosen, norm_weight, eps, gated)
    kernels.multiply_and_sum(gated, experts, chosen, residual, out)
    return out


def run_grouped(
    kernels: GroupedGemm | None,
    x: Tensor,
    experts: ExpertWeights,
    chosen: Chosen,
    is_prefill: bool,
    rows_of_x: QuantisedRows | None = None,
) -> Tensor:
    """
    What each of the chosen experts makes of a row of x [tokens, hidden], multiplied by its weight: [tokens,
    top_k, hidden]. `rows_of_x` is x quantised already, for kernels of 8-bit floating point.
    """
    if kernels is None:
        return run_experts_torch(x, experts, chosen)
    count, num_experts = chosen.experts.numel(), experts.num_experts
    *_, tile = kernels.tiles.values()
    if not is_prefill:
        tile = next(tile for most, tile in kernels.tiles.items() if count <= most * num_experts)
    assignments = sort_assignments(chosen.experts, num_experts, tile.BLOCK_M)
    width, per_byte = experts.width, 0
    if kernels is CODES:
        width, per_byte = permuted_width(width), experts.down.codes_per_byte
    gated, parts = x.new_empty(count, width), x.new_empty(*chosen.experts.shape, x.shape[1])
    if count:
        top_k = chosen.experts.shape[1]
        options = dict(is_clamped=experts.is_clamped, next_per_byte=per_byte)
        first = GroupedProduct(experts.gate_up_bias, assignments, gated, tile, top_k, **options)
        kernels.multiply(rows_of_x or x, experts.gate_up, first)
        out = parts.flatten(0, 1)
        second = GroupedProduct(experts.down_bias, assignments, out, tile, weights=chosen.weights)
        kernels.multiply(gated, experts.down, second)
    return parts


def run_experts_torch(x: Tensor, weights: ExpertWeights, chosen: Chosen) -> Tensor:
    top_k = chosen.experts.shape[1]
    experts, shares = chosen.experts.flatten(), chosen.weights.flatten().to(x.dtype)
    parts = x.new_empty(len(experts), x.shape[1])
    counts = torch.bincount(experts, minlength=weights.num_experts).tolist()
    for expert, its in enumerate(experts.argsort(stable=True).split(counts)):
        if len(its):
            y = weights.multiply_torch(x[its // top_k], weights.gate_up, weights.gate_up_bias, expert)
            y = activate_torch(y, weights.is_clamped)
            y = weights.multiply_torch(y, weights.down, weights.down_bias, expert)
            parts[its] = y * shares[its, None]
    return parts.view(-1, top_k, x.shape[1])
