"""Scores prompts: which of their tokens a prefill step scores, and how likely the model finds these."""

from typing import NamedTuple

import numpy as np
import torch

from nanovllm.engine.sequence import Sequence
from nanovllm.engine.transfer import to_device
from nanovllm.layers.embed_head import ParallelLMHead
from nanovllm.layers.sampler import TopLogprobs, top_logprobs

SCORED_AT_ONCE = 256  # tokens, each of which takes a row of logits


class Scoring(NamedTuple):
    """The tokens that a prefill step scores, sequence by sequence."""

    indices: np.ndarray  # int64 [scored], where in the batch the token before each stands
    targets: np.ndarray  # int64 [scored], their ids
    counts: list[int]  # how many belong to each sequence


def take_scoring(sequences: list[Sequence]) -> Scoring | None:
    """The tokens of the prompts that this step scores. The sequences count them as scored from here on."""
    if all(seq.is_scored for seq in sequences):
        return None
    indices, targets, start = [], [], 0
    for seq in sequences:
        end = min(seq.num_computed_tokens + seq.num_scheduled_tokens, len(seq.scored_token_ids))
        first = start - seq.num_computed_tokens
        indices.append(np.arange(first + seq.num_scored, first + end))
        targets.append(np.array(seq.scored_token_ids[seq.num_scored : end], dtype=np.int64))
        seq.num_scored = max(seq.num_scored, end)
        start += seq.num_scheduled_tokens
    counts = list(map(len, targets))
    return Scoring(np.concatenate(indices), np.concatenate(targets), counts) if any(counts) else None


def score(lm_head: ParallelLMHead, hidden_states: torch.Tensor, scoring: Scoring) -> TopLogprobs:
    """How likely each target is after the token before it. hidden_states [tokens, hidden size]."""
    indices, targets = (to_device(array, hidden_states.device) for array in scoring[:2])
    parts = []
    for index, target in zip(indices.split(SCORED_AT_ONCE), targets.split(SCORED_AT_ONCE), strict=True):
        parts.append(top_logprobs(lm_head.gather(lm_head.logits(hidden_states[index])), target))
    return TopLogprobs(*map(torch.cat, zip(*parts, strict=True)))
