"""top-k, top-p and min-p as one number a row, found without sorting: the lowest logit that may be drawn.

For top-k it is the largest v for which k logits are at least v. For top-p the logits' weights, exp(logit /
temperature), are added up instead of counting the logits. Both are found by search: a pass over the row adds
up what lies above each of three points that divide the remaining range into quarters, and keeps one quarter,
until one logit is left in it. A first pass copies the BEST largest logits of every lane; where those suffice,
the search looks at nothing else.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.runtime import LOG2_E, MINUS_INF, tl, triton, use_triton

BLOCK = tl.constexpr(2048)  # logits that are read together, one by each lane
STAGES = tl.constexpr(6)  # blocks that are loaded ahead
BEST = tl.constexpr(4)  # logits of every lane that are copied
UNIT = tl.constexpr(LOG2_E)  # for kernels
LEAST = tl.constexpr(-3.0e38)  # no real logit is lower
MAX_PASSES = tl.constexpr(128)  # far more than float32 can need in a range of real logits


class Filters(NamedTuple):
    """A row's filters, in the order of the table's columns. The defaults keep all tokens."""

    top_k: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0


def filter_thresholds(logits: Tensor, temperatures: Tensor, filters: Tensor) -> Tensor:
    """The lowest logit of each row that its filters keep, float32 [batch]; -inf for a row without filters.

    logits [batch, vocabulary], temperatures float32 [batch] (0 is greedy: nothing to filter), filters float32
    [batch, 3] are Filters, contiguous. min_p is applied first, then top_k, then top_p, each to what is left.
    Of equal logits all are kept or none. A row's threshold depends on nothing but the row.
    """
    if not use_triton(logits):
        return filter_thresholds_torch(logits, temperatures, filters)
    thresholds = torch.empty_like(temperatures)
    bests = thresholds.new_empty(len(logits), BEST * BLOCK)
    _threshold_kernel[(len(logits),)](
        logits,
        temperatures,
        filters,
        thresholds,
        bests,
        logits.stride(0),
        logits.shape[1],
        num_warps=8,
        maxnreg=128,  # so that two programs fit on a multiprocessor
    )
    return thresholds


def filter_thresholds_torch(logits: Tensor, temperatures: Tensor, filters: Tensor) -> Tensor:
    thresholds = torch.full_like(temperatures, -torch.inf)
    rows = (temperatures > 0) & (filters != filters.new_tensor(Filters())).any(1)
    top_k, top_p, min_p = filters[rows, :, None].unbind(1)
    vocab = logits.shape[1]
    values = logits[rows].float().sort(descending=True).values
    distances = (values - values[:, :1]) / temperatures[rows, None]
    kth = torch.where(top_k > 0, top_k, vocab).clamp_max(vocab).long() - 1
    kept = (distances >= min_p.log()) & (values >= values.gather(1, kth))
    weights = distances.exp().double() * kept
    before = weights.cumsum(1) - weights
    kept &= (top_p >= 1) | (before < top_p * weights.sum(1, keepdim=True))
    thresholds[rows] = values.masked_fill(~kept, torch.inf).amin(1)
    return thresholds


@triton.jit
def _threshold_kernel(
    logits,
    temperatures,
    filters,
    thresholds,
    bests,
    row_stride,
    vocab,
):
    """One program a row, so that a row's sums are always added up in the same order."""
    i = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + i)
    filters += i * 3
    top_k = tl.load(filters)
    top_p = tl.load(filters + 1)
    min_p = tl.load(filters + 2)
    threshold = tl.full([], MINUS_INF, tl.float32)
    if (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0)):
        row = logits + i * row_stride
        candidates = bests + i * BEST * BLOCK
        scale = UNIT / temperature
        lane = tl.arange(0, BLOCK)
        first = tl.full([BLOCK], MINUS_INF, tl.float32)
        second, third, fourth = first, first, first
        for start in tl.range(0, vocab, BLOCK, num_stages=STAGES):
            x = tl.load(row + start + lane, mask=start + lane < vocab, other=MINUS_INF).to(tl.float32)
            fourth = tl.maximum(fourth, tl.minimum(x, third))
            third = tl.maximum(third, tl.minimum(x, second))
            second = tl.maximum(second, tl.minimum(x, first))
            first = tl.maximum(first, x)
        bests_of_lanes = first, second, third, fourth
        for n in tl.static_range(BEST):
            tl.store(candidates + n * BLOCK + lane, bests_of_lanes[n])
        tl.debug_barrier()
        best = tl.max(first, axis=0)
        complete = _next_above_kernel(tl.max(fourth, axis=0))  # from here on `candidates` has all there are
        threshold = tl.maximum(LEAST, best + tl.log2(min_p) / scale)
        if (top_k > 0) & (top_k < vocab):
            low = tl.maximum(threshold, complete)
            if _weigh_kernel(candidates, BEST * BLOCK, low, best, scale, True, 1) >= top_k:
                threshold = _search_kernel(candidates, BEST * BLOCK, low, best, scale, top_k, True, 1)
            elif threshold < complete:
                threshold = _search_kernel(row, vocab, threshold, best, scale, top_k, True, STAGES)
        if top_p < 1:
            low = tl.maximum(threshold, complete)
            enough = _weigh_kernel(candidates, BEST * BLOCK, low, best, scale, False, 1)
            needed = enough
            if threshold < complete:
                needed = _weigh_kernel(row, vocab, threshold, best, scale, False, STAGES)
            needed *= top_p
            if enough >= needed:
                threshold = _search_kernel(candidates, BEST * BLOCK, low, best, scale, needed, False, 1)
            else:
                threshold = _search_kernel(row, vocab, threshold, best, scale, needed, False, STAGES)
    tl.store(thresholds + i, threshold)


@triton.jit
def _weigh_kernel(row, length, low, best, scale, COUNT: tl.constexpr, STAGES: tl.constexpr):
    """What the logits from `low` on weigh: 1 each (COUNT) or exp2((logit - best) * scale)."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, length, BLOCK, num_stages=STAGES):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(row + column, mask=column < length, other=MINUS_INF).to(tl.float32)
        weight = 1.0 if COUNT else tl.exp2((x - best) * scale)
        total += tl.where(x >= low, weight, 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def _search_kernel(row, length, low, best, scale, enough, COUNT: tl.constexpr, STAGES: tl.constexpr):
    """
    The largest logit from `low` on for which the logits from it on weigh enough, see _weigh_kernel; if all do
    not, it takes more passes to find the least of them.
    """
    least, most = low, best  # of the logits that may be the one
    high = _next_above_kernel(best)  # it lies in [low, high)
    passes = 0
    while (least < most) & (passes < MAX_PASSES):
        half = high * 0.5 - low * 0.5
        point_1 = low + half * 0.5
        point_2 = low + half
        point_3 = low + half * 1.5
        lane_1 = tl.zeros([BLOCK], tl.float32)
        lane_2, lane_3 = lane_1, lane_1
        lane_least = tl.full([BLOCK], float("inf"), tl.float32)
        lane_most = -lane_least
        for start in tl.range(0, length, BLOCK, num_stages=STAGES):
            column = start + tl.arange(0, BLOCK)
            x = tl.load(row + column, mask=column < length, other=MINUS_INF).to(tl.float32)
            weight = 1.0 if COUNT else tl.exp2((x - best) * scale)
            lane_1 += tl.where(x >= point_1, weight, 0.0)
            lane_2 += tl.where(x >= point_2, weight, 0.0)
            lane_3 += tl.where(x >= point_3, weight, 0.0)
            lane_least = tl.minimum(lane_least, tl.where(x >= low, x, float("inf")))
            lane_most = tl.maximum(lane_most, tl.where(x < high, x, MINUS_INF))
        least, most = tl.min(lane_least, axis=0), tl.max(lane_most, axis=0)
        # It lies between the last point from which on all weighs enough and the next.
        low = tl.maximum(low, least)
        high = tl.minimum(high, _next_above_kernel(most))
        if tl.sum(lane_3, axis=0) >= enough:
            low = tl.maximum(low, point_3)
        elif tl.sum(lane_2, axis=0) >= enough:
            low, high = tl.maximum(low, point_2), tl.minimum(high, point_3)
        elif tl.sum(lane_1, axis=0) >= enough:
            low, high = tl.maximum(low, point_1), tl.minimum(high, point_2)
        else:
            high = tl.minimum(high, point_1)
        passes += 1
    return least


@triton.jit
def _next_above_kernel(x):
    """The next larger float32, or one a little further where that would be next to nothing."""
    bits = x.to(tl.int32, bitcast=True)
    above = tl.where(x > 0, bits + 1, bits - 1).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) < 2.0**-120, 2.0**-119, above)
