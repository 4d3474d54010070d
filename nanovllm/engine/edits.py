"""Turns what a request asks for into the numbers that devices change logits by (kernels/logit_edits.py).

Runs on the host and knows requests; where the numbers lie on a device is device_rows.py's business.
"""

from collections import Counter
from collections.abc import Collection
from itertools import accumulate

import numpy as np

from nanovllm.engine.sequence import Sequence
from nanovllm.kernels.filtering import Filters
from nanovllm.kernels.logit_edits import BANNED, HISTORY, IN_PROMPT, RULE_FIELDS, Penalties
from nanovllm.sampling_params import Needs, SamplingParams, has_penalties, has_rules

FOREVER = 2**31 - 1  # a position that no sequence reaches
# Added to a logit. Not -inf: what allowed_token_ids leaves comes first even if all of it is banned.
BAN = -1e30


def num_rule_words(params: SamplingParams, bad_words: list[list[int]], end_token_ids: Collection[int]) -> int:
    """How many int32 the rules of a request take on a device at the most; 0 if it has none."""
    if not has_rules(params):
        return 0
    num_rules = len(params.logit_bias) + len(bad_words) + (len(end_token_ids) if params.min_tokens else 0)
    return 1 + RULE_FIELDS * num_rules + sum(len(word) - 1 for word in bad_words)


def temperature_of(params: SamplingParams) -> float:
    """What float32 can work with: below it only the best token is left, above it all are alike."""
    return min(params.temperature, 1e20) if params.temperature > 1e-6 else 0.0


def filters_of(params: SamplingParams) -> Filters:
    return Filters(max(params.top_k, 0), max(params.top_p, 1e-30), params.min_p)


def penalties_of(seq: Sequence) -> Penalties:
    params = seq.sampling_params
    repetition = min(max(params.repetition_penalty, 1e-6), 1e6)  # what float32 can work with
    has_flags = float(seq.needs & Needs.TOKEN_FLAGS > 0)
    return Penalties(params.presence_penalty, params.frequency_penalty, repetition, has_flags)


def rules_of(seq: Sequence) -> np.ndarray:
    """int32, see `apply_rules`."""
    params = seq.sampling_params
    biases = Counter()  # one rule for a token: a device adds in no order, and sums of floats depend on it
    for token_id, bias in params.logit_bias:
        biases[token_id] += bias
    ends = sorted(seq.end_token_ids) if params.min_tokens else []
    words = [[token_id] for token_id in biases] + seq.bad_words + [[token_id] for token_id in ends]
    lengths = [len(word) - 1 for word in words]
    number, num_biases, num_ends = len(words), len(biases), len(ends)
    until = min(seq.num_prompt_tokens + params.min_tokens, FOREVER)
    rules = [number] + [FOREVER] * (number - num_ends) + [until] * num_ends
    rules += np.array([*biases.values()] + [BAN] * (number - num_biases), np.float32).view(np.int32).tolist()
    rules += [word[-1] for word in words]
    rules += list(accumulate(lengths, initial=1 + RULE_FIELDS * number))[1:]
    rules += lengths
    rules += [token_id for word in words for token_id in word[:-1]]
    return np.array(rules, dtype=np.int32)


def drawn_last(seq: Sequence) -> list[tuple[int, int]]:
    """(position, token id) of the newest of the completion so far."""
    start = max(seq.num_prompt_tokens, len(seq.token_ids) - HISTORY)
    return list(enumerate(seq.token_ids[start:], start))


def token_flags_of(seq: Sequence) -> tuple[int, dict[int, int]]:
    """The flags of most tokens, and by token id those of the others; see `apply_token_flags`."""
    params = seq.sampling_params
    fill = 0 if params.allowed_token_ids is None else BANNED
    flags = dict.fromkeys(params.allowed_token_ids or (), 0)
    if has_penalties(params):
        for token_id, count in Counter(seq.completion_token_ids).items():
            flags[token_id] = flags.get(token_id, fill) + count
        for token_id in set(seq.prompt_token_ids):
            flags[token_id] = flags.get(token_id, fill) | IN_PROMPT
    return fill, flags
