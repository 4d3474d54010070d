"""The choice of experts for each token of a mixture of experts."""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels import runtime
from nanovllm.kernels.runtime import cdiv, next_power_of_2, tl, triton, use_triton

LOWEST = tl.constexpr(-3e38)
ROWS = 4


class Chosen(NamedTuple):
    """The experts of each token, the most probable first, and what their outputs are multiplied by."""

    experts: Tensor  # int32 [tokens, top_k]
    weights: Tensor  # float32 [tokens, top_k]


def choose_experts(logits: Tensor, top_k: int, normalise: bool) -> Chosen:
    """
    The most probable experts by their logits [tokens, experts], of equal ones the first. Their weights are
    their probabilities among all experts, or, to normalise, among those that are chosen.
    """
    if not use_triton(logits):
        return choose_experts_torch(logits, top_k, normalise)
    rows, num_experts = logits.shape
    experts = torch.empty(rows, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=logits.device)
    if rows:
        _choose_kernel[(cdiv(rows, ROWS),)](
            logits, experts, weights, rows, logits.stride(0),
            EXPERTS=num_experts, EXPERTS_PAD=next_power_of_2(num_experts),
            TOP_K=top_k, TOP_K_PAD=next_power_of_2(top_k), NORMALISE=normalise, ROWS=ROWS,
            num_warps=4, **runtime.overlap_options(logits.device),
        )  # fmt: skip
    return Chosen(experts, weights)


def choose_experts_torch(logits: Tensor, top_k: int, normalise: bool) -> Chosen:
    # Not `topk`: which of equal ones it takes is open.
    logits, experts = logits.float().sort(dim=-1, descending=True, stable=True)
    weights, experts = logits.softmax(-1)[:, :top_k], experts[:, :top_k]
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return Chosen(experts.int(), weights.contiguous())


@triton.jit(do_not_specialize=["rows"])
def _choose_kernel(
    logits, experts, weights, rows, stride,
    EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, TOP_K: tl.constexpr, TOP_K_PAD: tl.constexpr,
    NORMALISE: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    expert = tl.arange(0, EXPERTS_PAD)[None, :]
    is_real = (row < rows) & (expert < EXPERTS)
    value = tl.load(logits + row.to(tl.int64) * stride + expert, mask=is_real, other=0.0).to(tl.float32)
    # NaN too becomes a number: whatever the logits, a token gets experts that exist, and each of them once.
    value = tl.where(value > LOWEST, value, LOWEST)
    value = tl.where(expert < EXPERTS, value, float("-inf"))
    place = tl.arange(0, TOP_K_PAD)[None, :]
    chosen = tl.zeros([ROWS, TOP_K_PAD], tl.int32)
    best = tl.full([ROWS, TOP_K_PAD], float("-inf"), tl.float32)
    for k in tl.static_range(TOP_K):
        highest, index = tl.max(value, axis=1, return_indices=True)  # of equal ones the first
        chosen = tl.where(place == k, index[:, None], chosen)
        best = tl.where(place == k, highest[:, None], best)
        value = tl.where(expert == index[:, None], float("-inf"), value)
    highest = tl.max(best, axis=1)[:, None]
    shares = tl.exp(best - highest)
    total = tl.sum(shares, axis=1)
    if not NORMALISE:
        total += tl.sum(tl.exp(value - highest), axis=1)
    is_real = (row < rows) & (place < TOP_K)
    tl.store(experts + row * TOP_K + place, chosen, mask=is_real)
    tl.store(weights + row * TOP_K + place, shares / total[:, None], mask=is_real)
