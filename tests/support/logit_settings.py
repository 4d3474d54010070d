"""Requests that change logits in every way, engines that preempt and cut, and log-probabilities."""

import torch

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
