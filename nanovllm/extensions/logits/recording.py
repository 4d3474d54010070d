"""Records log-probabilities of tokens with the sequences that ask for them."""

import itertools

from torch import Tensor

from nanovllm.engine.batch import StepOutput
from nanovllm.engine.sequence import Sequence, TokenLogprobs


def record_logprobs(sequences: list[Sequence], drawing: list[Sequence], output: StepOutput) -> None:
    """Give the sequences of a step, and those that draw a token in it, the log-probabilities they ask for."""
    if output.scores is not None:
        num_top = max(seq.sampling_params.prompt_logprobs or 0 for seq in sequences)
        found = iter(_token_logprobs(*output.scores, num_top))
        for seq, count in zip(sequences, output.score_counts, strict=True):
            seq.prompt_logprobs += itertools.islice(found, count)
    if output.tokens_logprobs is not None:
        asking = [seq.sampling_params.logprobs is not None and not seq.is_finished for seq in drawing]
        rows = [row for row, asks in enumerate(asking) if asks]
        num_top = max((drawing[row].sampling_params.logprobs for row in rows), default=0)
        found = _token_logprobs(*(tensor[rows] for tensor in output.tokens_logprobs), num_top)
        for row, token_logprobs in zip(rows, found, strict=True):
            drawing[row].logprobs.append(token_logprobs)


def _token_logprobs(
    logprobs: Tensor, ranks: Tensor, top_token_ids: Tensor, top_logprobs: Tensor, num_top: int
) -> list[TokenLogprobs]:
    """One for each row of the tensors, with so many of the likeliest tokens."""
    tensors = logprobs, ranks, top_token_ids[:, :num_top], top_logprobs[:, :num_top]
    return list(zip(*(tensor.tolist() for tensor in tensors), strict=True))
