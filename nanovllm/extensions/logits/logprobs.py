"""Log-probabilities: how likely a token was, and which were the likeliest. Of the logits as the model made
them, whatever has changed them since.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.engine.interfaces import LogitsProcessor
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.sampler import SamplingStep
from nanovllm.sampling_params import MAX_LOGPROBS, SamplingParams

ROWS_AT_ONCE = 64  # of log-probabilities, which take several times the memory of their logits
# A token's log-probability and rank (1 is the likeliest), then the likeliest tokens and theirs.
TokenLogprobs = tuple[float, int, list[int], list[float]]


class TopLogprobs(NamedTuple):
    """Log-probability and rank (1 is the likeliest) of given tokens, and the likeliest tokens with theirs."""

    logprobs: Tensor  # float32 [tokens]
    ranks: Tensor  # int64 [tokens]
    top_token_ids: Tensor  # int64 [tokens, MAX_LOGPROBS]
    top_logprobs: Tensor  # float32 [tokens, MAX_LOGPROBS]


def concatenated(parts: Iterable[TopLogprobs]) -> TopLogprobs:
    return TopLogprobs(*map(torch.cat, zip(*parts, strict=True)))


def top_logprobs(logits: Tensor, token_ids: Tensor) -> TopLogprobs:
    """logits [tokens, vocabulary], token_ids int64 [tokens]."""
    return concatenated(map(_top_logprobs, logits.split(ROWS_AT_ONCE), token_ids.split(ROWS_AT_ONCE)))


def _top_logprobs(logits: Tensor, token_ids: Tensor) -> TopLogprobs:
    chosen = logits.gather(1, token_ids[:, None])
    total = logits.float().logsumexp(1, keepdim=True)
    top = logits.topk(min(MAX_LOGPROBS, logits.shape[1]))
    ranks = (logits > chosen).sum(1) + 1
    return TopLogprobs((chosen.float() - total)[:, 0], ranks, top.indices, top.values.float() - total)


def read_logprobs(found: TopLogprobs, num_top: int) -> list[TokenLogprobs]:
    """One for each token, with so many of the likeliest tokens."""
    logprobs, ranks, top_token_ids, top_logprobs = found
    tensors = logprobs, ranks, top_token_ids[:, :num_top], top_logprobs[:, :num_top]
    return list(zip(*(tensor.tolist() for tensor in tensors), strict=True))


class LogprobProcessor(LogitsProcessor):
    """Keeps the TokenLogprobs of completions' tokens, by seq_id."""

    name = "logprobs"
    fields = ("logprobs",)
    order = 0  # before those that change logits
    changes_logits = False

    def wants(self, params: SamplingParams) -> bool:
        return params.logprobs is not None

    def read(self, request: Any, where: str) -> dict[int, list[TokenLogprobs]]:
        return {}

    def apply(self, logits: Tensor, step: SamplingStep) -> Tensor:
        """If others change logits, they change a copy: `drawn` wants to see those that the model made."""
        if any(each.changes_logits for each in step.processors):
            return logits.to(torch.float32, copy=True)
        return logits

    def drawn(self, raw_logits: Tensor, tokens: Tensor, step: SamplingStep) -> None:
        step.told[self.name] = top_logprobs(raw_logits, tokens)

    def record(self, sequences: list[Sequence], drawing: list[Sequence], tensors: tuple[Tensor, ...]) -> None:
        rows = [i for i, seq in enumerate(drawing) if self.name in seq.request.own and not seq.is_finished]
        num_top = max((drawing[i].sampling_params.logprobs for i in rows), default=0)
        found = read_logprobs(TopLogprobs(*(tensor[rows] for tensor in tensors)), num_top)
        for i, token_logprobs in zip(rows, found, strict=True):
            seq = drawing[i]
            so_far = seq.request.own[self.name].setdefault(seq.seq_id, [])
            del so_far[len(seq.token_ids) - seq.num_prompt_tokens :]  # of a step that failed after this
            so_far.append(token_logprobs)
