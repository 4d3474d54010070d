"""The experts of a few tokens: matrix-vector products, one for each token and each expert of it.

As in gemv.py, what surrounds the products is part of them: the RMSNorm of the input and SwiGLU's activation
of the first, the weighted sum over the experts and the residual addition of the second. A token and one of
its experts are a *pair*, numbered token * top_k + place.
"""

import torch
from torch import Tensor

from nanovllm.extensions.experts.kernels.experts import ExpertWeights, activate
from nanovllm.extensions.experts.kernels.moe_quantised_matvec import can_use_few_quantised, run_few_quantised
from nanovllm.extensions.experts.kernels.router import Chosen
from nanovllm.kernels import runtime
from nanovllm.kernels.runtime import (
    cdiv,
    next_power_of_2,
    pdl_wait,
    pdl_wait_then_launch,
    tl,
    triton,
    use_triton,
)

MAX_FEW_ROWS = 4
GATES_HEIGHT, GATES_WIDTH = 2, 1024  # rows and columns of a weight that a program multiplies at a time
SUM_HEIGHT, SUM_WIDTH = 2, 128


def can_use_few(x: Tensor, experts: ExpertWeights) -> bool:
    """Whether `run_experts_few` is the fastest way for these rows of a decode step."""
    is_possible = not experts.are_quantised or can_use_few_quantised(x, experts)
    return use_triton(x) and is_possible and x.shape[0] <= MAX_FEW_ROWS


def run_experts_few(
    x: Tensor, experts: ExpertWeights, chosen: Chosen,
    norm_weight: Tensor | None = None, eps: float = 0.0, residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """
    The weighted sum of what the chosen experts make of each row of x [rows, hidden]: [rows, hidden]. With
    norm_weight [hidden] x is normalised first; residual [rows, hidden] is added to the sum.
    """
    if experts.are_quantised:
        return run_few_quantised(x, experts, chosen, norm_weight, eps, residual)
    rows, hidden = x.shape
    top_k, width = chosen.experts.shape[1], experts.width
    options = {"num_warps": 4, **runtime.overlap_options(x.device)}
    gated = torch.empty(rows * top_k, width, dtype=x.dtype, device=x.device)
    _gates_few_kernel[(cdiv(2 * width, GATES_HEIGHT), rows * top_k)](
        x, experts.gate_up, experts.gate_up_bias, chosen.experts, norm_weight, gated, eps, x.stride(0),
        HIDDEN=hidden, EXPERT_WIDTH=width, TOP_K=top_k, CLAMPED=experts.is_clamped,
        HEIGHT=GATES_HEIGHT, WIDTH=min(next_power_of_2(hidden), GATES_WIDTH), **options,
    )  # fmt: skip
    out = torch.empty(rows, hidden, dtype=x.dtype, device=x.device)
    _sum_few_kernel[(cdiv(hidden, SUM_HEIGHT), rows)](
        gated, experts.down, experts.down_bias, *chosen, residual, out,
        residual.stride(0) if residual is not None else 0,
        HIDDEN=hidden, EXPERT_WIDTH=width, TOP_K=top_k, TOP_K_PAD=next_power_of_2(top_k),
        HEIGHT=SUM_HEIGHT, WIDTH=min(next_power_of_2(width), SUM_WIDTH), **options,
    )  # fmt: skip
    return out


@triton.jit
def _gates_few_kernel(
    x, weight, bias, experts, norm_weight, out, eps, x_stride,
    HIDDEN: tl.constexpr, EXPERT_WIDTH: tl.constexpr, TOP_K: tl.constexpr, CLAMPED: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program takes HEIGHT rows of a pair's expert, gates and ups in turn, WIDTH columns at a time."""
    pdl_wait_then_launch(OVERLAP)  # the second kernel asks for its experts' weights while this one computes
    pair = tl.program_id(1)
    first = tl.program_id(0) * HEIGHT
    line = first + tl.arange(0, HEIGHT)
    inside = (line < 2 * EXPERT_WIDTH)[:, None]
    weight_row = tl.load(experts + pair).to(tl.int64) * 2 * EXPERT_WIDTH
    weight_row += (line % 2) * EXPERT_WIDTH + line // 2
    column = tl.arange(0, WIDTH)[None, :]
    address = weight + weight_row[:, None] * HIDDEN + column
    x += (pair // TOP_K) * x_stride
    tile = tl.load(address, mask=inside & (column < HIDDEN), other=0.0)
    # As in gemv.py, sums are kept apart by column until the end.
    products = tl.zeros([HEIGHT, WIDTH], tl.float32)
    squares = tl.zeros([1, WIDTH], tl.float32)
    for start in range(0, HIDDEN, WIDTH):
        current = tile.to(tl.float32)
        place = start + column
        tile = tl.load(address + start + WIDTH, mask=inside & (place + WIDTH < HIDDEN), other=0.0)
        values = tl.load(x + place, mask=place < HIDDEN, other=0.0).to(tl.float32)
        if norm_weight is not None:
            squares += values * values
            values *= tl.load(norm_weight + place, mask=place < HIDDEN, other=0.0).to(tl.float32)
        products += current * values
    acc = tl.sum(products, axis=1)
    if norm_weight is not None:
        acc *= tl.rsqrt(tl.sum(squares) / HIDDEN + eps)
    if bias is not None:
        acc += tl.load(bias + weight_row, mask=line < 2 * EXPERT_WIDTH, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(acc, [HEIGHT // 2, 2]))
    place = first // 2 + tl.arange(0, HEIGHT // 2)
    result = activate(gate, up, CLAMPED)
    tl.store(out + pair * EXPERT_WIDTH + place, result, mask=place < EXPERT_WIDTH)


@triton.jit
def _sum_few_kernel(
    x, weight, bias, experts, weights, residual, out, residual_stride,
    HIDDEN: tl.constexpr, EXPERT_WIDTH: tl.constexpr, TOP_K: tl.constexpr, TOP_K_PAD: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program takes HEIGHT rows of all experts of a token, WIDTH columns at a time."""
    row = tl.program_id(1)
    line = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    member = tl.arange(0, TOP_K_PAD)
    is_chosen = member < TOP_K
    expert = tl.load(experts + row * TOP_K + member, mask=is_chosen, other=0).to(tl.int64)
    share = tl.load(weights + row * TOP_K + member, mask=is_chosen, other=0.0)
    # [experts, rows of the weight, columns]
    column = tl.arange(0, WIDTH)[None, None, :]
    weight_row = expert[:, None, None] * HIDDEN + line[None, :, None]
    address = weight + weight_row * EXPERT_WIDTH + column
    inside = is_chosen[:, None, None] & (line < HIDDEN)[None, :, None]
    x_address = x + (row * TOP_K + member)[:, None, None] * EXPERT_WIDTH + column
    tile = tl.load(address, mask=inside & (column < EXPERT_WIDTH), other=0.0)
    pdl_wait(OVERLAP)
    products = tl.zeros([TOP_K_PAD, HEIGHT, WIDTH], tl.float32)
    for start in range(0, EXPERT_WIDTH, WIDTH):
        current = tile.to(tl.float32)
        place = start + column
        tile = tl.load(address + start + WIDTH, mask=inside & (place + WIDTH < EXPERT_WIDTH), other=0.0)
        present = is_chosen[:, None, None] & (place < EXPERT_WIDTH)
        products += current * tl.load(x_address + start, mask=present, other=0.0).to(tl.float32)
    sums = tl.sum(products, axis=2)
    if bias is not None:
        its_bias = bias + expert[:, None] * HIDDEN + line[None, :]
        present = is_chosen[:, None] & (line < HIDDEN)[None, :]
        sums += tl.load(its_bias, mask=present, other=0.0).to(tl.float32)
    acc = tl.sum(sums * share[:, None], axis=0)
    if residual is not None:
        added = tl.load(residual + row * residual_stride + line, mask=line < HIDDEN, other=0.0)
        acc += added.to(tl.float32)
    tl.store(out + row * HIDDEN + line, acc, mask=line < HIDDEN)
