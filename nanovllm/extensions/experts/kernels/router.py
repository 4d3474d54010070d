"""The choice of experts for each token of a mixture of experts, and these assignments sorted by expert.

A token and one of its experts are an *assignment*, numbered token * top_k + place.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.runtime import (
    MINUS_INF,
    arrival_counters,
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
ASSIGNMENTS_PER_PROGRAM = 256  # that it sorts


class Chosen(NamedTuple):
    """The experts of each token, the most probable first, and what their outputs are multiplied by."""

    experts: Tensor  # int32 [tokens, top_k]
    weights: Tensor  # float32 [tokens, top_k]


class SortedAssignments(NamedTuple):
    """
    Assignments by expert, for a grouped GEMM: the tiles of all experts are numbered one after another.
    """

    assignments: Tensor  # int32 [experts, tokens]: an expert has a token once at most
    table: Tensor  # int32 [2, experts]: how many assignments each expert has, and where its tiles end
    max_tiles: int  # that there can be


class SigmoidRule(NamedTuple):
    """
    DeepSeek-V3's (arXiv:2412.19437), which GLM follows: an expert's score is the sigmoid of its logit. With a
    bias added scores are for the choice alone: of groups, by the sum of their two best, and of the best
    experts in these. Without one logits decide (Llama 4). Weights are scores times a factor.
    """

    bias: Tensor | None = None  # float32 [experts]
    num_groups: int = 1  # of neighbours
    top_groups: int = 1  # that are chosen
    factor: float = 1.0


def choose_experts(
    logits: Tensor, top_k: int, normalise: bool, sigmoids: SigmoidRule | None = None
) -> Chosen:
    """
    The best experts by their logits [tokens, experts], of equal ones the first. Their weights are their
    probabilities among all experts, or scores by a rule of sigmoids; or, to `normalise`, their shares in the
    sum of these, which of probabilities is softmax of the chosen experts' logits.
    """
    if not use_triton(logits) or sigmoids and sigmoids.num_groups > 1:
        return choose_experts_torch(logits, top_k, normalise, sigmoids)
    rows, num_experts = logits.shape
    experts = torch.empty(rows, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=logits.device)
    if rows:
        _choose_kernel[(cdiv(rows, ROWS),)](
            logits,
            experts,
            weights,
            sigmoids and sigmoids.bias,
            rows,
            logits.stride(0),
            sigmoids.factor if sigmoids else 1.0,
            EXPERTS=num_experts,
            EXPERTS_PAD=next_power_of_2(num_experts),
            TOP_K=top_k,
            TOP_K_PAD=next_power_of_2(top_k),
            NORMALISE=normalise,
            SIGMOIDS=sigmoids is not None,
            ROWS=ROWS,
            num_warps=4,
            **overlap_options(logits.device),
        )
    return Chosen(experts, weights)


def choose_experts_torch(
    logits: Tensor, top_k: int, normalise: bool, sigmoids: SigmoidRule | None = None
) -> Chosen:
    logits = logits.float()
    # Not by probabilities, which may be equal, or 0, where logits are not.
    order, scores, factor = logits, logits.softmax(-1), 1.0
    if sigmoids is not None:
        scores, factor = logits.sigmoid(), sigmoids.factor
        if sigmoids.bias is not None:
            order = in_best_groups(scores + sigmoids.bias, sigmoids)
    # Not `topk`: which of equal ones it takes is open.
    experts = order.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, experts)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # sigmoids may all be 0
    return Chosen(experts.int(), weights * factor)


def in_best_groups(scores: Tensor, rule: SigmoidRule) -> Tensor:
    """Scores [tokens, experts], with -inf for experts of other groups than the best."""
    groups = scores.unflatten(1, (rule.num_groups, -1))
    totals = groups.topk(min(2, groups.shape[2])).values.sum(-1)
    best = totals.topk(rule.top_groups).indices
    is_left_out = torch.ones_like(totals, dtype=torch.bool).scatter(1, best, False)
    return groups.masked_fill(is_left_out[..., None], float("-inf")).flatten(1)


@triton.jit(do_not_specialize=["rows"])
def _choose_kernel(
    logits,
    experts,
    weights,
    bias,
    rows,
    stride,
    factor,
    EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_PAD: tl.constexpr,
    NORMALISE: tl.constexpr,
    SIGMOIDS: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    pdl_wait(OVERLAP)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    expert = tl.arange(0, EXPERTS_PAD)[None, :]
    is_real = (row < rows) & (expert < EXPERTS)
    value = masked_load(logits + row.to(tl.int64) * stride + expert, is_real).to(tl.float32)
    # NaN too becomes a number: whatever the logits, a token gets experts that exist, and each of them once.
    value = tl.where(value > LOWEST, value, LOWEST)
    if bias is not None:
        score = tl.sigmoid(value)
        value = score + masked_load(bias + expert, expert < EXPERTS)
    value = tl.where(expert < EXPERTS, value, MINUS_INF)
    # For softmax; where sigmoids are used the compiler leaves these out.
    peak = tl.max(value, axis=1)
    total = tl.sum(tl.exp(value - peak[:, None]), axis=1)
    place = tl.arange(0, TOP_K_PAD)[None, :]
    chosen = tl.zeros([ROWS, TOP_K_PAD], tl.int32)
    share = tl.zeros([ROWS, TOP_K_PAD], tl.float32)
    for k in tl.static_range(TOP_K):
        highest, index = tl.max(value, axis=1, return_indices=True)  # of equal ones the first
        is_it = expert == index[:, None]
        chosen = tl.where(place == k, index[:, None], chosen)
        if bias is not None:
            its = tl.sum(tl.where(is_it, score, 0.0), axis=1)
        elif SIGMOIDS:
            its = tl.sigmoid(highest)
        else:
            its = tl.exp(highest - peak) / total
        share = tl.where(place == k, its[:, None], share)
        value = tl.where(is_it, MINUS_INF, value)
    if NORMALISE:
        share /= (tl.sum(share, axis=1) + 1e-20)[:, None]
    share *= factor
    is_real = (row < rows) & (place < TOP_K)
    tl.store(experts + row * TOP_K + place, chosen, mask=is_real)
    tl.store(weights + row * TOP_K + place, share, mask=is_real)


def sort_assignments(experts: Tensor, num_experts: int, block_m: int) -> SortedAssignments:
    """Sort those of experts int32 [tokens, top_k], for tiles of `block_m`."""
    count, device = experts.numel(), experts.device
    assignments = torch.empty(num_experts, len(experts), dtype=torch.int32, device=device)
    table = torch.empty(2, num_experts, dtype=torch.int32, device=device)
    if count:
        _sort_kernel[(cdiv(count, ASSIGNMENTS_PER_PROGRAM),)](
            experts,
            arrival_counters(device),
            assignments,
            table,
            count,
            len(experts),
            EXPERTS=num_experts,
            EXPERTS_PAD=next_power_of_2(num_experts),
            BLOCK_M=block_m,
            BLOCK=ASSIGNMENTS_PER_PROGRAM,
            num_warps=4,
            **overlap_options(device),
        )
    return SortedAssignments(assignments, table, max_tiles(count, num_experts, block_m))


def max_tiles(count: int, num_experts: int, block_m: int) -> int:
    """The most tiles that so many assignments can have: each expert may have one that is not full."""
    return (count + min(num_experts, count) * (block_m - 1)) // block_m


@triton.jit(do_not_specialize=["count", "tokens"])
def _sort_kernel(
    experts,
    counters,
    assignments,
    table,
    count,
    tokens,
    EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Counts with a counter for each expert; the last program writes the table and clears the counters."""
    pdl_wait(OVERLAP)
    assignment = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_real = assignment < count
    expert = masked_load(experts + assignment, is_real)
    # Relaxed, so that all are under way at once: the counter of programs brings order.
    place = tl.atomic_add(counters + expert, 1, mask=is_real, sem="relaxed")
    tl.store(assignments + expert.to(tl.int64) * tokens + place, assignment, mask=is_real)
    tl.debug_barrier()  # all threads have counted before the last counter says so
    num_before = tl.atomic_add(counters + EXPERTS, 1)
    if num_before == tl.num_programs(0) - 1:
        each = tl.arange(0, EXPERTS_PAD)
        is_expert = each < EXPERTS
        counts = tl.load(counters + each, mask=is_expert, other=0, cache_modifier=".cg")
        tl.store(counters + each, 0, mask=is_expert)
        tl.store(counters + EXPERTS, 0)
        tl.store(table + each, counts, mask=is_expert)
        tl.store(table + EXPERTS + each, tl.cumsum(tl.cdiv(counts, BLOCK_M), 0), mask=is_expert)
