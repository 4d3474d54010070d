"""What passes between the host and the devices in a step: what to compute, and what was drawn."""

import functools
import itertools
import operator
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.engine.sequence import Sequence, TokenLogprobs
from nanovllm.engine.shaping import ShapingUpdate
from nanovllm.layers.sampler import TopLogprobs


class Scoring(NamedTuple):
    """Which tokens of the prompts a prefill step scores, sequence by sequence."""

    indices: np.ndarray  # int64 [scored], in the batch, of the tokens before them
    targets: np.ndarray  # int64 [scored], their ids
    counts: list[int]  # of each sequence


class PrefillBatch(NamedTuple):
    """What a prefill step computes, as the host knows it: all that a rank needs of the sequences."""

    input_ids: np.ndarray  # [tokens]
    positions: np.ndarray  # [tokens]
    slot_mapping: np.ndarray  # [tokens], see Context
    lens_q: list[int]  # of each sequence
    lens_k: list[int]
    block_tables: np.ndarray | None  # [sequences, blocks]
    sampling: tuple[np.ndarray, np.ndarray, np.ndarray]  # [sequences] each, see prepare_sample
    rows: np.ndarray  # int32 [sequences], of the decode state
    extras: int  # what some sequence needs beyond a temperature, see engine/shaping.py
    shaping: ShapingUpdate | None
    block_copies: np.ndarray | None  # int64 [2, blocks], from and to, before anything else
    scoring: Scoring | None


class Drawn(NamedTuple):
    """What a step tells: the next token of each sequence and, where asked for, log-probabilities."""

    token_ids: torch.Tensor  # int64 [sequences]
    logprobs: TopLogprobs | None  # of these
    prompt_logprobs: TopLogprobs | None  # of the tokens that PrefillBatch.scoring lists


def needed_extras(sequences: list[Sequence]) -> int:
    """What some of the sequences need beyond a temperature."""
    return functools.reduce(operator.or_, map(operator.attrgetter("extras"), sequences))


def take_block_copies(sequences: list[Sequence]) -> np.ndarray | None:
    """Takes the pending page copies off the sequences."""
    copies = [pair for seq in sequences for pair in seq.block_copies]
    for seq in sequences:
        seq.block_copies = []
    return np.array(copies).T if copies else None


def take_scoring(sequences: list[Sequence]) -> Scoring | None:
    """PrefillBatch.scoring, which then counts as done."""
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
    return Scoring(np.concatenate(indices), np.concatenate(targets), list(map(len, targets)))


class StepOutput:
    """What a step tells, on its way to the host."""

    def __init__(self, drawn: Drawn, num_sequences: int, scoring: Scoring | None = None):
        self._scoring = scoring
        self.tokens = _to_host(drawn.token_ids[:num_sequences])
        self._logprobs = drawn.logprobs and [_to_host(tensor[:num_sequences]) for tensor in drawn.logprobs]
        self._prompt_logprobs = drawn.prompt_logprobs and list(map(_to_host, drawn.prompt_logprobs))
        self.done = None
        if drawn.token_ids.is_cuda:
            self.done = torch.cuda.Event()
            self.done.record()

    def token_ids(self) -> list[int]:
        """Wait for the step and return one token id per sequence."""
        if self.done is not None:
            self.done.synchronize()
        return self.tokens.tolist()

    @property
    def has_logprobs(self) -> bool:
        return self._logprobs is not None

    @property
    def has_prompt_logprobs(self) -> bool:
        return self._scoring is not None

    def logprobs(self, rows: list[int], num_top: int) -> list[TokenLogprobs]:
        """Of the tokens of these sequences, with so many likeliest ones; after `token_ids`."""
        return _rows_of([tensor[rows] for tensor in self._logprobs], num_top)

    def prompt_logprobs(self, num_top: int) -> list[list[TokenLogprobs]]:
        """Of the tokens of each sequence's prompt that this step has scored; after `token_ids`."""
        rows = iter(_rows_of(self._prompt_logprobs, num_top))
        return [list(itertools.islice(rows, count)) for count in self._scoring.counts]


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Its contents once the device gets there."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _rows_of(tensors: list[torch.Tensor], num_top: int) -> list[TokenLogprobs]:
    logprobs, ranks, top_token_ids, top_logprobs = tensors
    tensors = [logprobs, ranks, top_token_ids[:, :num_top], top_logprobs[:, :num_top]]
    return list(zip(*(tensor.tolist() for tensor in tensors), strict=True))
