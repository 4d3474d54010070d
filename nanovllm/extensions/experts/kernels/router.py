"""The choice of experts for each token of a mixture of experts."""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels import runtime
from nanovllm.kernels.runtime import cdiv, next_power_of_2, pdl_wait, tl, triton, use_triton

LOWEST = tl.constexpr(-3e38)
TINY = 1e-20  # so that weights that are all 0 have no quotient of 0 and 0
TINY_SUM = tl.constexpr(TINY)
ROWS = 4


class Chosen(NamedTuple):
    """The experts of each token, the most probable first, and what their outputs are multiplied by."""

    experts: Tensor  # int32 [tokens, top_k]
    weights: Tensor  # float32 [tokens, top_k]


class Routing(NamedTuple):
    """
    How experts are chosen by their logits. An expert's score is its probability among all, or, with
    `uses_sigmoid`, one of its own. The weights of those that are chosen are their scores, or, to `normalise`,
    their shares in the sum of these, times `factor`. With groups, only experts of the `top_groups` best ones
    can be chosen; a group is as good as its `best_of_group` best experts together. Softmax of the chosen
    experts' logits is softmax of all, normalised.
    """

    top_k: int
    normalise: bool = True
    uses_sigmoid: bool = False
    num_groups: int = 1
    top_groups: int = 1
    best_of_group: int = 2
    factor: float = 1.0


def choose_experts(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> Chosen:
    """
    The best experts by their logits [tokens, experts], of equal ones the first. A correction [experts] is
    added to the scores for the choice alone.
    """
    if not use_triton(logits):
        return choose_experts_torch(logits, routing, correction)
    rows, num_experts = logits.shape
    experts = torch.empty(rows, routing.top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, routing.top_k, dtype=torch.float32, device=logits.device)
    if rows:
        _choose_kernel[(cdiv(rows, ROWS),)](
            logits, correction, experts, weights, rows, logits.stride(0),
            EXPERTS=num_experts, EXPERTS_PAD=next_power_of_2(num_experts),
            TOP_K=routing.top_k, TOP_K_PAD=next_power_of_2(routing.top_k), NORMALISE=routing.normalise,
            SIGMOID=routing.uses_sigmoid, GROUPS=routing.num_groups, TOP_GROUPS=routing.top_groups,
            BEST=routing.best_of_group, FACTOR=routing.factor, ROWS=ROWS,
            num_warps=4, **runtime.overlap_options(logits.device),
        )  # fmt: skip
    return Chosen(experts, weights)


def choose_experts_torch(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> Chosen:
    logits = logits.float()
    scores = logits.sigmoid() if routing.uses_sigmoid else logits.softmax(-1)
    # By logits: probabilities may be equal, or 0, where these are not.
    value = logits if correction is None and routing.num_groups == 1 and not routing.uses_sigmoid else scores
    if correction is not None:
        value = value + correction
    if routing.num_groups > 1:
        groups = value.unflatten(-1, (routing.num_groups, -1))
        best = groups.sort(dim=-1, descending=True).values[..., : routing.best_of_group].sum(-1)
        best = _first_of_the_highest(best, routing.top_groups)
        is_chosen = torch.zeros(groups.shape[:2], dtype=torch.bool, device=value.device)
        is_chosen.scatter_(1, best, True)
        value = groups.masked_fill(~is_chosen[..., None], -torch.inf).flatten(1)
    experts = _first_of_the_highest(value, routing.top_k)
    weights = scores.gather(1, experts)
    if routing.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    return Chosen(experts.int(), weights * routing.factor)


def _first_of_the_highest(values: Tensor, count: int) -> Tensor:
    """Not `topk`: which of equal ones it takes is open."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


@triton.jit(do_not_specialize=["rows"])
def _choose_kernel(
    logits, correction, experts, weights, rows, stride,
    EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, TOP_K: tl.constexpr, TOP_K_PAD: tl.constexpr,
    NORMALISE: tl.constexpr, SIGMOID: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    BEST: tl.constexpr, FACTOR: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    pdl_wait(OVERLAP)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    expert = tl.arange(0, EXPERTS_PAD)[None, :]
    is_real = (row < rows) & (expert < EXPERTS)
    value = tl.load(logits + row.to(tl.int64) * stride + expert, mask=is_real, other=0.0).to(tl.float32)
    # NaN too becomes a number: whatever the logits, a token gets experts that exist, and each of them once.
    value = tl.where(value > LOWEST, value, LOWEST)
    value = tl.where(expert < EXPERTS, value, float("-inf"))
    BY_LOGITS: tl.constexpr = not SIGMOID and GROUPS == 1 and correction is None
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-value))
    else:
        peak = tl.max(value, axis=1)
        scores = tl.exp(value - peak[:, None])
        total = tl.sum(scores, axis=1)
        scores /= total[:, None]
    if not BY_LOGITS:
        value = scores
    if correction is not None:
        value += tl.load(correction + expert, mask=expert < EXPERTS, other=0.0).to(tl.float32)
    value = tl.where(expert < EXPERTS, value, float("-inf"))
    if GROUPS > 1:
        SIZE: tl.constexpr = EXPERTS // GROUPS
        is_allowed = expert < 0
        quality = tl.full([ROWS, EXPERTS_PAD], float("-inf"), tl.float32)  # of a group, at its first expert
        for group in tl.static_range(GROUPS):
            inside = tl.where(expert // SIZE == group, value, float("-inf"))
            best = tl.zeros([ROWS], tl.float32)
            for _ in tl.static_range(BEST):
                highest, index = tl.max(inside, axis=1, return_indices=True)
                best += highest
                inside = tl.where(expert == index[:, None], float("-inf"), inside)
            quality = tl.where(expert == group * SIZE, best[:, None], quality)
        for _ in tl.static_range(TOP_GROUPS):
            highest, index = tl.max(quality, axis=1, return_indices=True)
            is_allowed = is_allowed | (expert // SIZE == index[:, None] // SIZE)
            quality = tl.where(expert == index[:, None], float("-inf"), quality)
        value = tl.where(is_allowed, value, float("-inf"))
    place = tl.arange(0, TOP_K_PAD)[None, :]
    chosen = tl.zeros([ROWS, TOP_K_PAD], tl.int32)
    share = tl.zeros([ROWS, TOP_K_PAD], tl.float32)
    for k in tl.static_range(TOP_K):
        highest, index = tl.max(value, axis=1, return_indices=True)  # of equal ones the first
        is_it = expert == index[:, None]
        chosen = tl.where(place == k, index[:, None], chosen)
        if BY_LOGITS:
            score = tl.exp(highest - peak) / total
        else:
            score = tl.sum(tl.where(is_it, scores, 0.0), axis=1)
        share = tl.where(place == k, score[:, None], share)
        value = tl.where(is_it, float("-inf"), value)
    if NORMALISE:
        share /= tl.sum(share, axis=1)[:, None] + TINY_SUM
    is_real = (row < rows) & (place < TOP_K)
    tl.store(experts + row * TOP_K + place, chosen, mask=is_real)
    tl.store(weights + row * TOP_K + place, share * FACTOR, mask=is_real)
