"""The choice of experts for each token of a mixture of experts."""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.runtime import (
    cdiv,
    masked_load,
    next_power_of_2,
    overlap_options,
    pdl_wait,
    tl,
    triton,
    use_triton,
)

LOWEST = tl.constexpr(-3e38)
ROWS = 4


class Chosen(NamedTuple):
    """The experts of each token, the most probable first, and what their outputs are multiplied by."""

    experts: Tensor  # int32 [tokens, top_k]
    weights: Tensor  # float32 [tokens, top_k]


def choose_experts(logits: Tensor, top_k: int, normalise: bool) -> Chosen:
    """
    The best experts by their logits [tokens, experts], of equal ones the first. Their weights are their
    probabilities among all experts or, to `normalise`, their shares in the sum of these, which is softmax of
    the chosen experts' logits.
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
            TOP_K=top_k, TOP_K_PAD=next_power_of_2(top_k), NORMALISE=normalise,
            ROWS=ROWS, num_warps=4, **overlap_options(logits.device),
        )  # fmt: skip
    return Chosen(experts, weights)


def choose_experts_torch(logits: Tensor, top_k: int, normalise: bool) -> Chosen:
    logits = logits.float()
    # Not `topk`: which of equal ones it takes is open. Nor by probabilities, which may be equal, or 0, where
    # logits are not.
    experts = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = logits.softmax(-1).gather(1, experts)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return Chosen(experts.int(), weights)


@triton.jit(do_not_specialize=["rows"])
def _choose_kernel(
    logits, experts, weights, rows, stride,
    EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, TOP_K: tl.constexpr, TOP_K_PAD: tl.constexpr,
    NORMALISE: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    pdl_wait(OVERLAP)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    expert = tl.arange(0, EXPERTS_PAD)[None, :]
    is_real = (row < rows) & (expert < EXPERTS)
    value = masked_load(logits + row.to(tl.int64) * stride + expert, is_real).to(tl.float32)
    # NaN too becomes a number: whatever the logits, a token gets experts that exist, and each of them once.
    value = tl.where(value > LOWEST, value, LOWEST)
    value = tl.where(expert < EXPERTS, value, float("-inf"))
    peak = tl.max(value, axis=1)
    total = tl.sum(tl.exp(value - peak[:, None]), axis=1)
    place = tl.arange(0, TOP_K_PAD)[None, :]
    chosen = tl.zeros([ROWS, TOP_K_PAD], tl.int32)
    share = tl.zeros([ROWS, TOP_K_PAD], tl.float32)
    for k in tl.static_range(TOP_K):
        highest, index = tl.max(value, axis=1, return_indices=True)  # of equal ones the first
        is_it = expert == index[:, None]
        chosen = tl.where(place == k, index[:, None], chosen)
        share = tl.where(place == k, (tl.exp(highest - peak) / total)[:, None], share)
        value = tl.where(is_it, float("-inf"), value)
    if NORMALISE:
        share /= tl.sum(share, axis=1)[:, None]
    is_real = (row < rows) & (place < TOP_K)
    tl.store(experts + row * TOP_K + place, chosen, mask=is_real)
    tl.store(weights + row * TOP_K + place, share, mask=is_real)
