"""How likely tokens are: log_softmax of each row of logits at a few of its tokens, and nothing else of it.

A row is one program's, which adds it up lane by lane in ascending order, and then its lanes. So the bits of a
row depend on nothing but the row, however many others there are.
"""

import torch
from torch import Tensor

from nanovllm.kernels.runtime import LOG2_E, MINUS_INF, tl, triton, use_triton

BLOCK = tl.constexpr(8192)  # logits that are read together, one by each lane
UNIT = tl.constexpr(LOG2_E)  # for kernels
LOWEST = tl.constexpr(-1e38)  # a maximum of nothing from which -inf can be subtracted
REFERENCE_ROWS = 16  # that the reference makes float32 at once: few enough for a CPU's cache


def token_logprobs(
    logits: Tensor, token_ids: Tensor, temperatures: Tensor | None = None, lowest: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """
    Log-probabilities float32 [rows, tokens] of token_ids int64 [rows, tokens]; and the rank int64 [rows] of
    each row's first one, which is 1 if no logit is larger.

    logits [rows, vocabulary] are taken as float32. Those below `lowest` float32 [rows] count as -inf, and all
    are divided by temperatures float32 [rows], which are above 0. What follows is log_softmax as torch
    rounds it: the maximum is subtracted, then the logarithm of the sum. (On a GPU torch multiplies by 1 /
    temperature instead if that is a number of Python's.)
    """
    if not use_triton(logits):
        return token_logprobs_torch(logits, token_ids, temperatures, lowest)
    logprobs = torch.empty_like(token_ids, dtype=torch.float32)
    ranks = token_ids.new_empty(len(logits))
    _logprobs_kernel[(len(logits),)](
        logits,
        token_ids,
        temperatures,
        lowest,
        logprobs,
        ranks,
        logits.stride(0),
        logits.shape[1],
        COUNT=token_ids.shape[1],
        num_warps=16,
        enable_fp_fusion=False,  # so that everything is rounded as it is written
    )
    return logprobs, ranks


def token_logprobs_torch(
    logits: Tensor, token_ids: Tensor, temperatures: Tensor | None, lowest: Tensor | None
) -> tuple[Tensor, Tensor]:
    found = []
    for rows in torch.arange(len(logits)).split(REFERENCE_ROWS):
        x, ids = logits[rows].float(), token_ids[rows]
        ranks = (x > x.gather(1, ids[:, :1])).sum(1) + 1
        if lowest is not None:
            x[x < lowest[rows, None]] = -torch.inf
        if temperatures is not None:
            x /= temperatures[rows, None]
        # On a CPU a row has the same bits here in any company, which those of logsumexp have not.
        found.append((x.log_softmax(1).gather(1, ids), ranks))
    return tuple(map(torch.cat, zip(*found, strict=True)))


# A row's address may be aligned or not. The compiler would have the lanes of aligned ones read several logits
# each, of float32 fewer than of bfloat16, and add up lanes in another order.
@triton.jit(do_not_specialize=["row_stride"], do_not_specialize_on_alignment=["logits"])
def _logprobs_kernel(
    logits, token_ids, temperatures, lowest, logprobs, ranks, row_stride, vocab,
    COUNT: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    logits += i * row_stride
    token_ids += i * COUNT
    logprobs += i * COUNT
    temperature = tl.load(temperatures + i) if temperatures is not None else None
    threshold = tl.load(lowest + i) if lowest is not None else MINUS_INF
    first = tl.load(logits + tl.load(token_ids)).to(tl.float32)
    most = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    larger = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits + column, mask=column < vocab, other=MINUS_INF).to(tl.float32)
        larger += x > first
        x = _scaled_kernel(x, threshold, temperature)
        highest = tl.maximum(most, x)
        total = tl.fma(total, tl.exp2((most - highest) * UNIT), tl.exp2((x - highest) * UNIT))
        most = highest
    best = tl.max(most, axis=0)
    log_total = tl.log(tl.sum(total * tl.exp2((most - best) * UNIT), axis=0))
    tl.store(ranks + i, tl.sum(larger, axis=0) + 1)
    for n in tl.static_range(COUNT):
        x = tl.load(logits + tl.load(token_ids + n)).to(tl.float32)
        tl.store(logprobs + n, _scaled_kernel(x, threshold, temperature) - best - log_total)


@triton.jit
def _scaled_kernel(x, threshold, temperature):
    x = tl.where(x < threshold, MINUS_INF, x)
    if temperature is not None:
        x = tl.div_rn(x, temperature)
    return x
