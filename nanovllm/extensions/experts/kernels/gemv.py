"""The experts of a few tokens: matrix-vector products, one for each token and each expert of it.

As in the gemv of other layers, what surrounds the products is part of them: the RMSNorm of the input and the
activation of the first, the weighted sum over the experts and the residual addition of the second. A token
and one of its experts are an *assignment*, numbered token * top_k + place.
"""

from torch import Tensor

from nanovllm.extensions.experts.kernels.experts import ExpertWeights
from nanovllm.extensions.experts.kernels.router import Chosen
from nanovllm.extensions.quantised.kernels.grouped_gemm import activate
from nanovllm.kernels.runtime import (
    cdiv,
    masked_load,
    next_power_of_2,
    overlap_options,
    pdl_wait,
    pdl_wait_then_launch,
    tl,
    triton,
)

GATES_HEIGHT, GATES_WIDTH = 2, 1024  # rows and columns of a weight that a program multiplies at a time
SUM_HEIGHT, SUM_WIDTH = 2, 128


def multiply_gates(
    x: Tensor, experts: ExpertWeights, chosen: Chosen, norm_weight: Tensor | None, eps: float, out: Tensor
) -> None:
    """
    What the first product makes of each row of x [rows, hidden], activated: out [rows * top_k, width]. With
    norm_weight [hidden] x is normalised first.
    """
    hidden, width = x.shape[1], experts.width
    _gates_kernel[(cdiv(2 * width, GATES_HEIGHT), len(out))](
        x,
        experts.gate_up,
        experts.gate_up_bias,
        chosen.experts,
        norm_weight,
        out,
        eps,
        x.stride(0),
        HIDDEN=hidden,
        EXPERT_WIDTH=width,
        TOP_K=chosen.experts.shape[1],
        CLAMPED=experts.is_clamped,
        HEIGHT=GATES_HEIGHT,
        WIDTH=min(next_power_of_2(hidden), GATES_WIDTH),
        num_warps=4,
        **overlap_options(x.device),
    )


def multiply_and_sum(
    x: Tensor, experts: ExpertWeights, chosen: Chosen, residual: Tensor | None, out: Tensor
) -> None:
    """
    The weighted sum of what the second product makes of x [rows * top_k, width]: out [rows, hidden]. The
    residual [rows, hidden] is added to it.
    """
    rows, hidden = out.shape
    width, top_k = experts.width, chosen.experts.shape[1]
    _sum_kernel[(cdiv(hidden, SUM_HEIGHT), rows)](
        x,
        experts.down,
        experts.down_bias,
        *chosen,
        residual,
        out,
        residual.stride(0) if residual is not None else 0,
        HIDDEN=hidden,
        EXPERT_WIDTH=width,
        TOP_K=top_k,
        TOP_K_PAD=next_power_of_2(top_k),
        HEIGHT=SUM_HEIGHT,
        WIDTH=min(next_power_of_2(width), SUM_WIDTH),
        num_warps=4,
        **overlap_options(x.device),
    )


@triton.jit
def _gates_kernel(
    x,
    weight,
    bias,
    experts,
    norm_weight,
    out,
    eps,
    x_stride,
    HIDDEN: tl.constexpr,
    EXPERT_WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    CLAMPED: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program takes HEIGHT rows of an assignment's expert, gates and ups in turn, WIDTH columns a time."""
    pdl_wait_then_launch(OVERLAP)  # the second kernel asks for its experts' weights while this one computes
    assignment = tl.program_id(1)
    first = tl.program_id(0) * HEIGHT
    line = first + tl.arange(0, HEIGHT)
    inside = (line < 2 * EXPERT_WIDTH)[:, None]
    weight_row = tl.load(experts + assignment).to(tl.int64) * 2 * EXPERT_WIDTH
    weight_row += (line % 2) * EXPERT_WIDTH + line // 2
    column = tl.arange(0, WIDTH)[None, :]
    address = weight + weight_row[:, None] * HIDDEN + column
    x += (assignment // TOP_K) * x_stride
    tile = masked_load(address, inside & (column < HIDDEN))
    # As in gemv.py, sums are kept apart by column until the end.
    products = tl.zeros([HEIGHT, WIDTH], tl.float32)
    squares = tl.zeros([1, WIDTH], tl.float32)
    for start in range(0, HIDDEN, WIDTH):
        current = tile.to(tl.float32)
        place = start + column
        tile = masked_load(address + start + WIDTH, inside & (place + WIDTH < HIDDEN))
        values = masked_load(x + place, place < HIDDEN).to(tl.float32)
        if norm_weight is not None:
            squares += values * values
            values *= masked_load(norm_weight + place, place < HIDDEN).to(tl.float32)
        products += current * values
    acc = tl.sum(products, axis=1)
    if norm_weight is not None:
        acc *= tl.rsqrt(tl.sum(squares) / HIDDEN + eps)
    if bias is not None:
        acc += masked_load(bias + weight_row, line < 2 * EXPERT_WIDTH).to(tl.float32)
    gate, up = tl.split(tl.reshape(acc, [HEIGHT // 2, 2]))
    place = first // 2 + tl.arange(0, HEIGHT // 2)
    result = activate(gate, up, CLAMPED)
    tl.store(out + assignment * EXPERT_WIDTH + place, result, mask=place < EXPERT_WIDTH)


@triton.jit
def _sum_kernel(
    x,
    weight,
    bias,
    experts,
    weights,
    residual,
    out,
    residual_stride,
    HIDDEN: tl.constexpr,
    EXPERT_WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_PAD: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program takes HEIGHT rows of all experts of a token, WIDTH columns at a time."""
    row = tl.program_id(1)
    line = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    member = tl.arange(0, TOP_K_PAD)
    is_chosen = member < TOP_K
    expert = masked_load(experts + row * TOP_K + member, is_chosen).to(tl.int64)
    share = masked_load(weights + row * TOP_K + member, is_chosen)
    # [experts, rows of the weight, columns]
    column = tl.arange(0, WIDTH)[None, None, :]
    weight_row = expert[:, None, None] * HIDDEN + line[None, :, None]
    address = weight + weight_row * EXPERT_WIDTH + column
    inside = is_chosen[:, None, None] & (line < HIDDEN)[None, :, None]
    x_address = x + (row * TOP_K + member)[:, None, None] * EXPERT_WIDTH + column
    tile = masked_load(address, inside & (column < EXPERT_WIDTH))
    pdl_wait(OVERLAP)
    products = tl.zeros([TOP_K_PAD, HEIGHT, WIDTH], tl.float32)
    for start in range(0, EXPERT_WIDTH, WIDTH):
        current = tile.to(tl.float32)
        place = start + column
        tile = masked_load(address + start + WIDTH, inside & (place + WIDTH < EXPERT_WIDTH))
        present = is_chosen[:, None, None] & (place < EXPERT_WIDTH)
        products += current * masked_load(x_address + start, present).to(tl.float32)
    sums = tl.sum(products, axis=2)
    if bias is not None:
        its_bias = bias + expert[:, None] * HIDDEN + line[None, :]
        present = is_chosen[:, None] & (line < HIDDEN)[None, :]
        sums += masked_load(its_bias, present).to(tl.float32)
    acc = tl.sum(sums * share[:, None], axis=0)
    if residual is not None:
        added = masked_load(residual + row * residual_stride + line, line < HIDDEN)
        acc += added.to(tl.float32)
    tl.store(out + row * HIDDEN + line, acc, mask=line < HIDDEN)
