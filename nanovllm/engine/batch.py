"""What passes between the scheduler and the ranks: a `Batch` goes to all of them, a `StepOutput` comes back.

Rank 0 makes the one from scheduled sequences and waits for the other. Ranks never see a `Sequence`.
"""

import itertools
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.engine.device_rows import HostRows, RowLayout, RowUpdates
from nanovllm.engine.sequence import Sequence, TokenLogprobs
from nanovllm.layers.sampler import TopLogprobs
from nanovllm.sampling_params import Needs, SamplingParams

EVERYTHING = SamplingParams(top_k=1, logit_bias={0: 1.0}, presence_penalty=1.0, logprobs=0, prompt_logprobs=0)
SCORED_AT_ONCE = 256  # prompt tokens


class Scoring(NamedTuple):
    """Which tokens of the prompts a prefill step scores, sequence by sequence."""

    indices: np.ndarray  # int64 [scored], in the batch, of the tokens before them
    targets: np.ndarray  # int64 [scored], their ids
    counts: list[int]  # of each sequence


class Batch(NamedTuple):
    """
    One step. A decode step computes the last token of each sequence (`lens_q` is 1): ranks know its id and
    place, and which rows take part, from `row_updates` of this step and earlier ones; it has nothing else.
    """

    num_sequences: int
    needs: Needs  # of any of the sequences
    row_updates: RowUpdates | None
    rows: np.ndarray | None = None  # int32 [sequences], see device_rows.py
    lens_q: np.ndarray | None = None  # int32 [sequences], tokens to be computed
    lens_k: np.ndarray | None = None  # int32 [sequences], tokens they end at: what there will be in the cache
    token_ids: np.ndarray | None = None  # int32 [tokens], those to be computed
    slot_mapping: np.ndarray | None = None  # int32 [tokens], see Context
    block_copies: np.ndarray | None = None  # int64 [2, blocks], from and to, before anything else
    scoring: Scoring | None = None

    @property
    def is_prefill(self) -> bool:
        return self.lens_q is not None


class BatchMaker:
    """Turns scheduled sequences into batches. Each is to be run, in order, or all be `reset`."""

    def __init__(self, config: Any):
        self.block_size = config.kvcache_block_size
        self.rows = HostRows(RowLayout(config))

    def reset(self) -> None:
        self.rows.reset()

    def decode(self, sequences: list[Sequence]) -> Batch:
        return Batch(len(sequences), _needs(sequences), self.rows.decode(sequences))

    def prefill(self, sequences: list[Sequence]) -> Batch:
        """Takes pending page copies and tokens to be scored off the sequences."""
        lens_q = [seq.num_scheduled_tokens for seq in sequences]
        lens_k = [seq.num_computed_tokens + seq.num_scheduled_tokens for seq in sequences]
        token_ids, slots = [], []
        for seq, end in zip(sequences, lens_k, strict=True):
            token_ids.append(np.array(seq[seq.num_computed_tokens : end], dtype=np.int32))
            position = np.arange(seq.num_computed_tokens, end, dtype=np.int32)
            if seq.block_table:
                blocks = np.array(seq.block_table, dtype=np.int32)[position // self.block_size]
                slots.append(blocks * self.block_size + position % self.block_size)
            else:  # warm-up
                slots.append(np.full_like(position, -1))
        return Batch(
            len(sequences),
            _needs(sequences),
            self.rows.prefill(sequences),
            np.array([seq.row for seq in sequences], dtype=np.int32),
            np.array(lens_q, dtype=np.int32),
            np.array(lens_k, dtype=np.int32),
            np.concatenate(token_ids),
            np.concatenate(slots),
            _take_block_copies(sequences),
            _take_scoring(sequences),
        )


def largest_batch(config: Any, num_tokens: int) -> Batch:
    """
    A prefill of as many sequences as a step can have and so many tokens, each of which asks for everything.
    """
    num_seqs = min(config.max_num_seqs, num_tokens)
    sequences = []
    for row in range(num_seqs):
        length = min(max(1, config.max_model_len - 1), num_tokens - (num_seqs - row - 1))
        num_tokens -= length
        seq = Sequence([0] * length, EVERYTHING)
        seq.num_scheduled_tokens, seq.row = length, row
        seq.scored_token_ids = seq.token_ids[1:][:SCORED_AT_ONCE] if row == 0 else []
        sequences.append(seq)
    return BatchMaker(config).prefill(sequences)


def _needs(sequences: list[Sequence]) -> Needs:
    needs = 0  # `|` of flags would take many times as long
    for seq in sequences:
        needs |= seq.needs
    return Needs(needs)


def _take_block_copies(sequences: list[Sequence]) -> np.ndarray | None:
    copies = [pair for seq in sequences for pair in seq.block_copies]
    for seq in sequences:
        seq.block_copies = []
    return np.array(copies).T if copies else None


def _take_scoring(sequences: list[Sequence]) -> Scoring | None:
    """What the step scores of the prompts, which then counts as done."""
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


class StepOutput(NamedTuple):
    """What a step tells. A rank's is on its device; from `to_host` on it is on its way to the host."""

    tokens: torch.Tensor  # int64 [sequences, in a CUDA graph with padding], the next token of each
    tokens_logprobs: TopLogprobs | None = None  # of these, where asked for
    scores: TopLogprobs | None = None  # of the prompts' tokens that Batch.scoring lists
    score_counts: list[int] | None = None  # of each sequence
    done: torch.cuda.Event | None = None  # after which a copy on the host is complete

    def to_host(self, batch: Batch) -> "StepOutput":
        """Begin to copy the output of this batch. Before the next step, which may overwrite it."""
        tokens, tokens_logprobs, scores = self[:3]
        done = torch.cuda.Event() if tokens.is_cuda else None
        output = StepOutput(
            _to_host(tokens[: batch.num_sequences]),
            tokens_logprobs and TopLogprobs(*(_to_host(x[: batch.num_sequences]) for x in tokens_logprobs)),
            scores and TopLogprobs(*map(_to_host, scores)),
            batch.scoring and batch.scoring.counts,
            done,
        )
        if done is not None:
            done.record()
        return output

    def token_ids(self) -> list[int]:
        """Wait for the step and return one token id per sequence."""
        if self.done is not None:
            self.done.synchronize()
        return self.tokens.tolist()

    @property
    def has_logprobs(self) -> bool:
        return self.tokens_logprobs is not None

    @property
    def has_prompt_logprobs(self) -> bool:
        return self.scores is not None

    def logprobs(self, rows: list[int], num_top: int) -> list[TokenLogprobs]:
        """Of the tokens of these sequences, with so many likeliest ones; after `token_ids`."""
        return _rows_of([tensor[rows] for tensor in self.tokens_logprobs], num_top)

    def prompt_logprobs(self, num_top: int) -> list[list[TokenLogprobs]]:
        """Of the tokens of each sequence's prompt that this step has scored; after `token_ids`."""
        rows = iter(_rows_of(list(self.scores), num_top))
        return [list(itertools.islice(rows, count)) for count in self.score_counts]


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Its contents once the device gets there."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _rows_of(tensors: list[torch.Tensor], num_top: int) -> list[TokenLogprobs]:
    logprobs, ranks, top_token_ids, top_logprobs = tensors
    tensors = [logprobs, ranks, top_token_ids[:, :num_top], top_logprobs[:, :num_top]]
    return list(zip(*(tensor.tolist() for tensor in tensors), strict=True))
