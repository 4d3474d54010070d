"""top-k, top-p and min-p as one number a row: the lowest logit that may still be drawn, found without sorting.

For top-k it is the largest v for which k logits are at least v; for top-p the same with the logits' weights
(exp(logit / temperature)) instead of their number. Both are found by counting: a pass over the row weighs
what lies above three points of the range that is left, which shrinks it to a quarter, until one logit is left
in it. Few passes are needed, since the range is also drawn in to the logits that it holds.
"""

import torch
from torch import Tensor

from nanovllm.kernels.runtime import tl, triton, use_triton

BLOCK = 2048
STAGES = 6  # so that enough of a row is on its way
MAX_PASSES = 128  # far more than float32 can need in a range of real logits


def filter_thresholds(logits: Tensor, temperatures: Tensor, filters: Tensor) -> Tensor:
    """The lowest logit of each row that its filters keep, float32 [batch]; -inf where none is asked for.

    logits [batch, vocabulary], temperatures float32 [batch] (0 is greedy: nothing to filter), filters float32
    [batch, 3 or more columns]: top_k (0 is all), top_p (1 is all) and min_p (0 is all). Applied in the order
    min_p, top_k, top_p, each to what those before it leave; equal logits are kept or left out together. A
    row's threshold depends on nothing but the row.
    """
    if not use_triton(logits):
        return filter_thresholds_torch(logits, temperatures, filters)
    thresholds = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        _threshold_kernel[(len(logits),)](
            logits,
            temperatures,
            filters,
            thresholds,
            logits.stride(0),
            filters.stride(0),
            logits.shape[1],
            BLOCK=BLOCK,
            STAGES=STAGES,
            MAX_PASSES=MAX_PASSES,
            num_warps=8,
        )
    return thresholds


def filter_thresholds_torch(logits: Tensor, temperatures: Tensor, filters: Tensor) -> Tensor:
    thresholds = torch.full((len(logits),), -torch.inf, device=logits.device)
    top_k, top_p, min_p = filters[:, :3].unbind(1)
    rows = ((temperatures > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))).nonzero().flatten()
    if not len(rows):
        return thresholds
    vocab = logits.shape[1]
    values = logits[rows].float().sort(descending=True).values
    distances = (values - values[:, :1]) / temperatures[rows, None]
    kth = torch.where(top_k[rows] > 0, top_k[rows], vocab).clamp_max(vocab).long() - 1
    kept = (distances >= min_p[rows, None].log()) & (values >= values.gather(1, kth[:, None]))
    weights = distances.exp().double() * kept
    before = weights.cumsum(1) - weights
    kept &= (top_p[rows, None] >= 1) | (before < top_p[rows, None] * weights.sum(1, keepdim=True))
    thresholds[rows] = values.masked_fill(~kept, torch.inf).amin(1)
    return thresholds


@triton.jit
def _threshold_kernel(
    logits,
    temperatures,
    filters,
    thresholds,
    row_stride,
    filter_stride,
    vocab,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    MAX_PASSES: tl.constexpr,
):
    """One program a row, so that a row's sums are always added up in the same order."""
    i = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + i)
    top_k = tl.load(filters + i * filter_stride)
    top_p = tl.load(filters + i * filter_stride + 1)
    min_p = tl.load(filters + i * filter_stride + 2)
    threshold = tl.full([], float("-inf"), tl.float32)
    if (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0)):
        row = logits + i * row_stride
        scale = 1.4426950408889634 / temperature
        lane_best = tl.full([BLOCK], float("-inf"), tl.float32)
        lane_least = tl.full([BLOCK], float("inf"), tl.float32)
        for start in tl.range(0, vocab, BLOCK, num_stages=STAGES):
            column = start + tl.arange(0, BLOCK)
            x = tl.load(row + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
            lane_best = tl.maximum(lane_best, x)
            lane_least = tl.minimum(lane_least, tl.where(x == float("-inf"), float("inf"), x))
        best = tl.max(lane_best, axis=0)
        threshold = tl.maximum(tl.min(lane_least, axis=0), best + tl.log2(min_p) / scale)
        if (top_k > 0) & (top_k < vocab):
            # The lanes' best are different tokens: where k of them are at least v, so are k tokens.
            low = tl.min(lane_best, axis=0)
            high = best
            if top_k <= BLOCK:
                for _ in range(12):
                    middle = low + (high - low) * 0.5
                    enough = tl.sum((lane_best >= middle).to(tl.int32), axis=0) >= top_k
                    low = tl.where(enough, middle, low)
                    high = tl.where(enough, high, middle)
                threshold = tl.maximum(threshold, low)
            threshold = _search_kernel(
                row, vocab, threshold, best, scale, top_k, 0.0, True, BLOCK, STAGES, MAX_PASSES
            )
        if top_p < 1:
            threshold = _search_kernel(
                row, vocab, threshold, best, scale, 0.0, top_p, False, BLOCK, STAGES, MAX_PASSES
            )
    tl.store(thresholds + i, threshold)


@triton.jit
def _search_kernel(
    row,
    vocab,
    low,
    best,
    scale,
    target,
    share,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    MAX_PASSES: tl.constexpr,
):
    """The largest logit v from `low` on for which the logits from v on weigh enough.

    Enough is `target` plus that share of what all from `low` on weigh; if that is more than all weigh, v is
    the least of them. Weights are 1 (COUNT) or exp2((logit - best) * scale).
    """
    least, most = low, best  # of the logits that may be the one
    high = _next_above_kernel(best)  # it lies in [low, high)
    enough = target
    passes = 0
    while (least < most) & (passes < MAX_PASSES):
        half = high * 0.5 - low * 0.5
        point_1, point_2 = low + half * 0.5, low + half
        point_3 = point_2 + half * 0.5
        lane_0 = tl.zeros([BLOCK], tl.float32)
        lane_1 = tl.zeros([BLOCK], tl.float32)
        lane_2 = tl.zeros([BLOCK], tl.float32)
        lane_3 = tl.zeros([BLOCK], tl.float32)
        lane_least = tl.full([BLOCK], float("inf"), tl.float32)
        lane_most = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in tl.range(0, vocab, BLOCK, num_stages=STAGES):
            column = start + tl.arange(0, BLOCK)
            x = tl.load(row + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
            weight = tl.full([BLOCK], 1.0, tl.float32) if COUNT else tl.exp2((x - best) * scale)
            lane_0 += tl.where(x >= low, weight, 0.0)
            lane_1 += tl.where(x >= point_1, weight, 0.0)
            lane_2 += tl.where(x >= point_2, weight, 0.0)
            lane_3 += tl.where(x >= point_3, weight, 0.0)
            lane_least = tl.minimum(lane_least, tl.where(x >= low, x, float("inf")))
            lane_most = tl.maximum(lane_most, tl.where(x < high, x, float("-inf")))
        weight_0, weight_1, weight_2, weight_3 = (
            tl.sum(lane_0, axis=0),
            tl.sum(lane_1, axis=0),
            tl.sum(lane_2, axis=0),
            tl.sum(lane_3, axis=0),
        )
        least, most = tl.min(lane_least, axis=0), tl.max(lane_most, axis=0)
        if passes == 0:
            enough += share * weight_0
            most = tl.where(weight_0 < enough, least, most)
        low = tl.maximum(
            least,
            tl.where(
                weight_3 >= enough,
                point_3,
                tl.where(weight_2 >= enough, point_2, tl.where(weight_1 >= enough, point_1, low)),
            ),
        )
        high = tl.minimum(
            _next_above_kernel(most),
            tl.where(
                weight_1 < enough,
                point_1,
                tl.where(weight_2 < enough, point_2, tl.where(weight_3 < enough, point_3, high)),
            ),
        )
        passes += 1
    return least


@triton.jit
def _next_above_kernel(x):
    """The next larger normal float32."""
    bits = x.to(tl.int32, bitcast=True)
    above = tl.where(x > 0, bits + 1, bits - 1).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) < 2.0**-120, 2.0**-119, above)
