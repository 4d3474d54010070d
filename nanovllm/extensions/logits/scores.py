"""Scores prompts: which of their tokens a prefill step scores, and how likely the model finds these."""

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanovllm.engine.interfaces import LogitsProcessor
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.slots import to_device
from nanovllm.extensions.logits.logprobs import TokenLogprobs, read_logprobs, top_logprobs
from nanovllm.layers.sampler import SamplingStep
from nanovllm.sampling_params import MAX_LOGPROBS, SamplingParams

SCORED_AT_ONCE = 256  # tokens, each of which takes a row of logits


@dataclass(eq=False)
class Scores:
    """The scores of a prompt, which its first completion brings. Those before `first` are not asked for."""

    targets: list[int]  # the i-th is scored as what follows token i
    first: int = 0
    found: list[TokenLogprobs] = field(default_factory=list)  # of targets[first:]
    seq_id: int | None = None  # of the first completion

    @property
    def is_open(self) -> bool:
        """Whether there is anything left to be scored."""
        return self.num_scored < len(self.targets)

    def restart(self) -> None:
        """Whatever steps were in flight, they will not bring scores."""
        self.num_scored = self.first + len(self.found)  # or about to be, by a step in flight

    __post_init__ = restart


# The tokens that a prefill step scores, int64 [2, scored]: where in the batch the token before each stands,
# and their ids; and how many of the likeliest tokens are asked for.
Scoring = tuple[np.ndarray, int]


class ScoreProcessor(LogitsProcessor):
    """Keeps the `Scores` of requests."""

    name = "scores"
    fields = ("prompt_logprobs",)
    order = 60
    needs_whole = False
    changes_logits = False
    prefill_only = True
    scoring = Scores  # what a request has in its `own`

    def __init__(self) -> None:
        self._steps: list[list[tuple[Scores, int]]] = []  # in flight, and how many tokens each scores
        self._scoring: Scoring | None = None

    def wants(self, params: SamplingParams) -> bool:
        return params.prompt_logprobs is not None

    def read(self, request: Any, where: str) -> Scores:
        return Scores(request.token_ids[1:])

    def _scores_of(self, seq: Sequence) -> Scores | None:
        """What this sequence scores, if there is anything left."""
        scores = seq.request.own.get(self.name)
        if scores is None or not scores.is_open:
            return None
        if scores.seq_id is None:
            scores.seq_id = seq.seq_id
        return scores if scores.seq_id == seq.seq_id else None

    def max_cached(self, seq: Sequence) -> int:
        """None that a score is computed from."""
        scores = self._scores_of(seq)
        return len(seq) - 1 if scores is None else scores.num_scored

    def prepare(self, sequences: list[Sequence]) -> Scoring | None:
        """What this step scores counts as scored from here on."""
        pairs, steps, start = [], [], 0
        for seq in sequences:
            if (scores := self._scores_of(seq)) is not None:
                place = start - seq.num_computed_tokens  # in the batch, of the sequence's first token
                end = seq.num_computed_tokens + seq.num_scheduled_tokens
                found = scores.targets[scores.num_scored : end]
                pairs += enumerate(found, place + scores.num_scored)
                steps.append((scores, len(found)))
                scores.num_scored += len(found)
            start += seq.num_scheduled_tokens
        if not pairs:
            return None
        self._steps.append(steps)
        num_top = max(seq.sampling_params.prompt_logprobs or 0 for seq in sequences)
        return np.array(pairs).T.copy(), num_top

    def largest(self, length: int) -> Scoring | None:
        count = min(length - 1, SCORED_AT_ONCE)
        return (np.zeros((2, count), dtype=np.int64), MAX_LOGPROBS) if count else None

    def record(self, sequences: list[Sequence], drawing: list[Sequence], tensors: tuple[Tensor, ...]) -> None:
        found = iter(read_logprobs(tensors, MAX_LOGPROBS))
        for scores, count in self._steps.pop(0):
            scores.found += itertools.islice(found, count)

    def receive(self, message: Scoring) -> None:
        self._scoring = message

    def hidden(self, hidden_states: Tensor, lm_head: Any, step: SamplingStep) -> None:
        """How likely each target is after the token before it. hidden_states [tokens, hidden size]."""
        if self._scoring is None:
            return
        (pairs, num_top), self._scoring = self._scoring, None
        parts = (
            top_logprobs(lm_head.gather(lm_head.logits(hidden_states[index])), target, num_top)
            for index, target in to_device(pairs, hidden_states.device).split(SCORED_AT_ONCE, dim=1)
        )
        step.told[self.name] = tuple(map(torch.cat, zip(*parts, strict=True)))

    def reset(self) -> None:
        for scores, _ in sum(self._steps, []):
            scores.restart()
        self._steps.clear()
        self._scoring = None
