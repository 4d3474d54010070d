"""Requests that change logits in every way, engines that preempt and cut, log-probabilities, and what changes
logits in transformers.
"""

import math

import torch
import transformers

from nanovllm import SamplingParams

VOCAB = 257
PROMPT = [5, 9, 9, 70, *range(40, 70), 9]

MIXED = [
    {},
    dict(top_k=5),
    dict(top_p=0.6, seed=3),
    dict(temperature=0, frequency_penalty=1.0),
    dict(min_p=0.1, logit_bias={i: 1.5 for i in range(20)}),
    dict(allowed_token_ids=[*range(100)], logprobs=2),
    dict(temperature=0),
    dict(top_k=3, presence_penalty=1.0, min_tokens=10, stop_token_ids=[*range(200)]),
    dict(seed=8),
    dict(bad_words=["a", "bc", "def", "g" * 300], repetition_penalty=1.2),
]
SCHEDULES = {
    "all at once": {},
    "one by one": dict(max_num_seqs=1),
    "preempted": dict(num_kvcache_blocks=9),
    "in chunks": dict(max_num_batched_tokens=20),
    "not cached": dict(enable_prefix_caching=False),
}


def expected_logprobs(reference, token_ids: list[int]) -> torch.Tensor:
    """[tokens, vocabulary], of what comes after each token."""
    with torch.no_grad():
        return reference(input_ids=torch.tensor([token_ids])).logits[0].double().log_softmax(-1)


def processors_of(params: SamplingParams) -> transformers.LogitsProcessorList:
    """What transformers has for the options that narrow the choice, in our order."""
    found = [transformers.TemperatureLogitsWarper(params.temperature)]
    if params.min_p > 0:
        found.append(transformers.MinPLogitsWarper(params.min_p))
    if params.top_k > 0:
        found.append(transformers.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        found.append(transformers.TopPLogitsWarper(params.top_p))
    return transformers.LogitsProcessorList(found)


class Penalty(transformers.LogitsProcessor):
    """Presence and frequency penalty as OpenAI's API defines them; transformers has none."""

    def __init__(self, presence: float, frequency: float):
        self.presence, self.frequency = presence, frequency

    def __call__(self, input_ids, scores):
        counts = torch.bincount(input_ids[0, len(PROMPT) :], minlength=VOCAB)
        return scores - self.frequency * counts - self.presence * (counts > 0)


class Only(transformers.LogitsProcessor):
    def __init__(self, token_ids: list[int]):
        self.token_ids = token_ids

    def __call__(self, input_ids, scores):
        changed = torch.full_like(scores, -math.inf)
        changed[:, self.token_ids] = scores[:, self.token_ids]
        return changed
