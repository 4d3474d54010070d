"""Log-probabilities: how likely a token was, and which were the likeliest. Of the logits as the model made
them, whatever has changed them since.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from nanovllm.engine.interfaces import LogitsProcessor
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.sampler import SamplingStep
from nanovllm.sampling_params import MAX_LOGPROBS, SamplingParams

ROWS_AT_ONCE = 64  # of log-probabilities, which take several times the memory of their logits
# A token's log-probability and rank (1 is the likeliest), then the likeliest tokens and theirs.
TokenLogprobs = tuple[float, int, list[int], list[float]]
# The same of several tokens, on the device: float32 and int64 [tokens], then int64 and float32
# [tokens, MAX_LOGPROBS].
TopLogprobs = tuple[Tensor, ...]


def concatenated(parts: Iterable[TopLogprobs]) -> TopLogprobs:
    return tuple(map(torch.cat, zip(*parts, strict=True)))


def top_logprobs(logits: Tensor, token_ids: Tensor) -> TopLogprobs:
    """logits [tokens, vocabulary], token_ids int64 [tokens]."""
    return concatenated(map(_top_logprobs, logits.split(ROWS_AT_ONCE), token_ids.split(ROWS_AT_ONCE)))


def _top_logprobs(logits: Tensor, token_ids: Tensor) -> TopLogprobs:
    chosen = logits.gather(1, token_ids[:, None])
    total = logits.float().logsumexp(1, keepdim=True)
    top = logits.topk(min(MAX_LOGPROBS, logits.shape[1]))
    ranks = (logits > chosen).sum(1) + 1
    return (chosen.float() - total)[:, 0], ranks, top.indices, top.values.float() - total


def read_logprobs(found: TopLogprobs, num_top: int) -> list[TokenLogprobs]:
    """One for each token, with so many of the likeliest tokens."""
    logprobs, ranks, *tops = found
    tensors = logprobs, ranks, *(top[:, :num_top] for top in tops)
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
        asking = [drawing[i] for i in rows]
        num_top = max((seq.sampling_params.logprobs for seq in asking), default=0)
        found = read_logprobs(tuple(tensor[rows] for tensor in tensors), num_top)
        for seq, token_logprobs in zip(asking, found, strict=True):
            so_far = seq.request.own[self.name].setdefault(seq.seq_id, [])
            del so_far[len(seq.token_ids) - seq.num_prompt_tokens :]  # of a step that failed after this
            so_far.append(token_logprobs)
