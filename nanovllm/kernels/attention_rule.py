"""What a layer's attention is besides softmax(q k^T) v: its scale, a window, a soft limit of scores, sinks.

Every kernel of attention takes an `AttentionRule`. What a rule leaves out is not compiled into the kernels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.runtime import LOG2_E, tl, triton

UNIT = tl.constexpr(LOG2_E)  # kernels compute exp2 of scores that are multiplied by this


class AttentionRule(NamedTuple):
    """
    A token attends to the last `window` tokens, itself among them (0: to all before it). A score s = q k^T *
    scale becomes softcap * tanh(s / softcap), unless that is 0 (Gemma 2). exp(sinks[head]) joins the sum that
    a head's probabilities are divided by: a key that has no value (gpt-oss).
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None  # [heads], of any floating dtype

    @property
    def is_plain(self) -> bool:
        """Whether nothing but a window and a scale is needed."""
        return not self.softcap and self.sinks is None

    def sinks_of_groups(self, kv_heads: int) -> Tensor | None:
        """float32 [kv_heads, heads of each, 1]"""
        return None if self.sinks is None else self.sinks.float().view(kv_heads, -1, 1)


def attend_torch(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rule: AttentionRule, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """
    Attention of q [..., queries, head_dim] over k and v [..., keys, head_dim] where the mask is true, and the
    log of each softmax's denominator [..., queries]: float32. Sinks are broadcast to [..., queries, 1]. A
    query that sees nothing gets zeros.
    """
    scores = q.float() @ k.mT.float() * rule.scale
    if rule.softcap:
        scores = rule.softcap * (scores / rule.softcap).tanh()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    log_sums = scores.logsumexp(-1, keepdim=True)
    if sinks is not None:
        log_sums = torch.logaddexp(log_sums, sinks)
    return (scores - log_sums).exp().nan_to_num() @ v.float(), log_sums.squeeze(-1)


@triton.jit
def soften(score, SOFTCAP: tl.constexpr):
    """softcap * tanh(score / softcap), of scores in units of log2."""
    tanh = 1.0 - 2.0 / (1.0 + tl.exp2(score * (2.0 / SOFTCAP)))
    return tanh * (SOFTCAP * UNIT)
