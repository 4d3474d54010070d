"""Log-probabilities: how likely a token was, and which were the likeliest. Of the logits as the model made
them, or of what the token was drawn from.
"""

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.engine.interfaces import LogitsProcessor
from nanovllm.engine.sequence import Sequence
from nanovllm.extensions.logits.kernels.likelihood import token_logprobs
from nanovllm.layers.sampler import SamplingStep
from nanovllm.sampling_params import MAX_LOGPROBS, SamplingParams

BLOCK = 128  # logits that are compared by their maximum first
# A token's log-probability and rank (1 is the likeliest), then the likeliest tokens and theirs.
TokenLogprobs = tuple[float, int, list[int], list[float]]
# The same of several tokens, on the device: float32 and int64 [tokens], then int64 and float32 [tokens, so
# many likeliest].
TopLogprobs = tuple[Tensor, ...]


def top_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    num_top: int,
    *drawn_with: Tensor | None,
) -> TopLogprobs:
    """
    Of token_ids int64 [tokens] and of num_top others at most, after logits [tokens, vocabulary];
    `drawn_with` are the temperatures and the lowest logits of `token_logprobs`.
    """
    token_ids = token_ids[:, None]
    if num_top:
        token_ids = torch.cat((token_ids, top_tokens(logits, min(num_top, logits.shape[1]))), 1)
    logprobs, ranks = token_logprobs(logits, token_ids, *drawn_with)
    return logprobs[:, 0], ranks, token_ids[:, 1:], logprobs[:, 1:]


def top_tokens(logits: Tensor, count: int) -> Tensor:
    """
    The likeliest tokens, int64 [rows, count]. Of equal logits the one with the lower id comes first, where
    torch.topk takes any.
    """
    padded = F.pad(logits, (0, -logits.shape[1] % BLOCK), value=-torch.inf)
    blocks = padded.unflatten(1, (-1, BLOCK))
    best = _largest(blocks.amax(2), count).sort(1).values  # these blocks have all of them
    candidates = (best[:, :, None] * BLOCK + torch.arange(BLOCK, device=best.device)).flatten(1)
    return candidates.gather(1, _largest(padded.gather(1, candidates), count))


def _largest(x: Tensor, count: int) -> Tensor:
    return x.sort(dim=1, descending=True, stable=True).indices[:, :count]


def read_logprobs(found: TopLogprobs, num_top: int) -> list[TokenLogprobs]:
    """One for each token, with so many of the likeliest tokens."""
    logprobs, ranks, top_ids, top_logprobs = found
    tensors = logprobs, ranks, top_ids[:, :num_top], top_logprobs[:, :num_top]
    return [*zip(*map(Tensor.tolist, tensors), strict=True)]


class TopProcessor(LogitsProcessor):
    """Does nothing, but a step has it in which somebody asks for the likeliest tokens: they take time."""

    name = "top_logprobs"
    changes_logits = False

    def wants(self, params: SamplingParams) -> bool:
        return bool(params.logprobs)


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

    def drawn(
        self,
        raw_logits: Tensor,
        tokens: Tensor,
        step: SamplingStep,
        *drawn_with: Tensor | None,
    ) -> None:
        num_top = MAX_LOGPROBS * any(isinstance(each, TopProcessor) for each in step.processors)
        step.told[self.name] = top_logprobs(raw_logits, tokens, num_top, *drawn_with)

    def record(
        self,
        sequences: list[Sequence],
        drawing: list[Sequence],
        tensors: tuple[Tensor, ...],
    ) -> None:
        asking = {
            i: seq for i, seq in enumerate(drawing) if self.name in seq.request.own and not seq.is_finished
        }
        num_top = max((seq.sampling_params.logprobs for seq in asking.values()), default=0)
        rows = tuple(tensor[[*asking]] for tensor in tensors)
        for seq, newest in zip(asking.values(), read_logprobs(rows, num_top), strict=True):
            so_far = seq.request.own[self.name].setdefault(seq.seq_id, [])
            del so_far[len(seq.token_ids) - seq.num_prompt_tokens :]  # of a step that failed after this
            so_far.append(newest)


class ProcessedLogprobs(LogprobProcessor):
    """Of the distribution that the token was drawn from; for a greedy one that of temperature 1."""

    order = sys.maxsize  # behind those that change logits

    def apply(self, logits: Tensor, step: SamplingStep) -> Tensor:
        self._logits = logits
        return logits

    def drawn(self, raw_logits: Tensor, tokens: Tensor, step: SamplingStep) -> None:
        temperatures = step.temperatures.masked_fill(step.temperatures == 0, 1)
        super().drawn(self._logits, tokens, step, temperatures, step.lowest)
        del self._logits
