"""Attention with a window, in chunks, with a limit of scores, sinks or slopes: what Mistral, Llama 4, Gemma,
gpt-oss and BLOOM do.

What a rule leaves out is not compiled into the kernels.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nanovllm.kernels.attention_variant import AttentionVariant, Hooks
from nanovllm.kernels.runtime import LOG2_E, masked_load, tl, triton

UNIT = tl.constexpr(LOG2_E)  # kernels compute exp2 of scores that are multiplied by this


class RuleConstants(NamedTuple):
    window: int
    softcap: float
    num_slopes: int


@dataclass(eq=False)
class AttentionRule(AttentionVariant):
    """
    A token attends to the last `window` tokens, itself among them (0: to all before it), or with `in_chunks`
    to those from the last multiple of `window` on (Llama 4). A score s = q k^T * scale becomes softcap *
    tanh(s / softcap), unless that is 0 (Gemma 2). exp(sinks[head]) joins the sum that a head's probabilities
    are divided by: a key that has no value (gpt-oss). From each score slopes[head] is subtracted as often as
    the key lies before the query (ALiBi; Press et al., 2022).
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None  # [heads], of any floating dtype
    slopes: Tensor | None = None  # float32 [heads]
    in_chunks: bool = False

    def __post_init__(self) -> None:
        has_sinks, has_slopes = self.sinks is not None, self.slopes is not None
        start = chunk_start if self.in_chunks else window_start
        self.hooks = Hooks(
            first_token=start if self.window else None,
            score=change_score if self.softcap or has_slopes else None,
            begin=begin_with_sink if has_sinks else None,
            begin_prefill=begin_prefill_with_sink if has_sinks else None,
            constants=RuleConstants(self.window, self.softcap, len(self.slopes) if has_slopes else 0),
        )
        self.extras = self.sinks, self.slopes
        unknown = "sinks" if has_sinks else "in chunks" if self.in_chunks and self.window else ""
        self.flash_problem = unknown and f"it knows no attention {unknown}"

    def flash_options(self) -> dict[str, Any]:
        window = (self.window - 1, 0) if self.window else (-1, -1)  # which does not count the token itself
        options = {"window_size": window, "softcap": self.softcap, "alibi_slopes": self.slopes}
        return super().flash_options() | options

    def first_token(self, context_lens: Tensor) -> Tensor:
        if not self.window:
            return super().first_token(context_lens)
        chunk = (context_lens - 1) // self.window * self.window
        return (chunk if self.in_chunks else context_lens - self.window).clamp_min(0)

    def score(self, scores: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if self.softcap:
            scores = self.softcap * (scores / self.softcap).tanh()
        if self.slopes is not None:
            scores = scores - self.slopes.view(*scores.shape[:2], -1, 1) * (query - key)
        return scores

    def first_sums(self) -> Tensor:
        return self.sinks.float()

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        if self.hooks.score is None and self.sinks is None:  # nothing but the mask differs
            return super().attend(q, k, v, mask, is_causal)
        key = torch.arange(k.shape[-2], device=q.device)
        query = key[-q.shape[-2] :, None] if is_causal or mask is not None else key[-1]
        scores = self.score(q.float() @ k.mT.float() * self.scale, query, key)
        if is_causal:
            mask = torch.ones_like(scores, dtype=torch.bool).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        log_sums = scores.logsumexp(-1, keepdim=True)
        if self.sinks is not None:
            log_sums = torch.logaddexp(log_sums, self.first_sums().view(*q.shape[:2], -1, 1))
        return (scores - log_sums).exp() @ v.float()


def set_rules(model: nn.Module) -> None:
    """Of a model whose layers note what they compute in `features` (extensions/transformers)."""
    for attention in getattr(model, "attention", ()):
        attention.variant = AttentionRule(attention.variant.scale, **attention.features)


@triton.jit
def window_start(extras, seq, context_len, HOOKS: tl.constexpr):
    return context_len - HOOKS.constants.window


@triton.jit
def chunk_start(extras, seq, context_len, HOOKS: tl.constexpr):
    WINDOW: tl.constexpr = HOOKS.constants.window
    return (context_len - 1) // WINDOW * WINDOW


@triton.jit
def change_score(extras, score, head, distance, HOOKS: tl.constexpr):
    """softcap * tanh(score / softcap) - slope * distance, of scores in units of log2."""
    SOFTCAP: tl.constexpr = HOOKS.constants.softcap
    if SOFTCAP > 0:
        tanh = 1.0 - 2.0 / (1.0 + tl.exp2(score * (2.0 / SOFTCAP)))
        score = tanh * (SOFTCAP * UNIT)
    if HOOKS.constants.num_slopes > 0:
        slope = masked_load(extras[1] + head, head < HOOKS.constants.num_slopes)
        score -= slope * UNIT * distance
    return score


@triton.jit
def begin_with_sink(extras, index, highest, total, SIZES: tl.constexpr, HOOKS: tl.constexpr):
    """The first split begins with a key that has no value."""
    row, head, _ = index
    is_first = tl.program_id(2) == 0
    sink = tl.load(extras[0] + head, mask=row < SIZES.HEADS, other=0.0).to(tl.float32) * UNIT
    highest = tl.where(is_first, sink, highest)
    total += tl.where((tl.arange(0, SIZES.TILE) == 0) & is_first, 1.0, 0.0)[:, None]
    return highest, total, ()


@triton.jit
def begin_prefill_with_sink(extras, head, highest, total, HOOKS: tl.constexpr):
    sink = tl.load(extras[0] + head).to(tl.float32) * UNIT
    return tl.zeros_like(highest) + sink, total + 1.0
