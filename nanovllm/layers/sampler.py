"""Draws the next token of every sequence, and tells how likely tokens were."""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nanovllm.distributed.group import get_group
from nanovllm.extensions.structured.kernels.token_masks import Masks
from nanovllm.kernels.sampling import sample
from nanovllm.sampling_params import MAX_LOGPROBS

ROWS_AT_ONCE = 64  # of log-probabilities, which take several times the memory of their logits


class Sampler(nn.Module):
    """Where each rank holds a part of the vocabulary, each draws from its part, and the best score wins."""

    def __init__(self, vocab_start: int = 0):
        super().__init__()
        self.vocab_start = vocab_start
        self.group = get_group()

    def forward(
        self, logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor,
        thresholds: Tensor | None = None, masks: Masks | None = None, is_whole: bool = False,
    ) -> Tensor:  # fmt: skip
        """
        logits [batch, this rank's vocabulary, or all of it], temperatures float32 [batch] (0 is greedy),
        seeds and positions int64 [batch] -> token ids int64 [batch], drawn from softmax(logits / temperature)
        among the logits that are not below their row's threshold, float32 [batch], if there are thresholds,
        and that their row's mask allows, if there are masks.

        The draw is the argmax of the scaled logits plus Gumbel noise, which follows softmax's distribution
        without computing it. The noise depends on seed, position and token id alone, so neighbours do not
        matter.
        """
        vocab_start = 0 if is_whole else self.vocab_start
        settings = temperatures, seeds, positions, vocab_start, thresholds, masks
        return self.group.best_token(*sample(logits, *settings))


class TopLogprobs(NamedTuple):
    """Log-probability and rank (1 is the likeliest) of given tokens, and the likeliest tokens with theirs."""

    logprobs: Tensor  # float32 [tokens]
    ranks: Tensor  # int64 [tokens]
    top_token_ids: Tensor  # int64 [tokens, MAX_LOGPROBS]
    top_logprobs: Tensor  # float32 [tokens, MAX_LOGPROBS]


def top_logprobs(logits: Tensor, token_ids: Tensor) -> TopLogprobs:
    """logits [tokens, vocabulary], token_ids int64 [tokens]."""
    parts = zip(logits.split(ROWS_AT_ONCE), token_ids.split(ROWS_AT_ONCE), strict=True)
    return TopLogprobs(*map(torch.cat, zip(*itertools.starmap(_top_logprobs, parts), strict=True)))


def _top_logprobs(logits: Tensor, token_ids: Tensor) -> TopLogprobs:
    chosen = logits.gather(1, token_ids[:, None])
    total = logits.float().logsumexp(1, keepdim=True)
    top = logits.topk(min(MAX_LOGPROBS, logits.shape[1]))
    ranks = (logits > chosen).sum(1) + 1
    return TopLogprobs((chosen.float() - total)[:, 0], ranks, top.indices, top.values.float() - total)
