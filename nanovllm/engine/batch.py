"""What passes between the scheduler and the ranks: a `Batch` goes to all of them, a `StepOutput` comes back.

Rank 0 makes the batch from scheduled sequences and waits for the output. Ranks never see a `Sequence`.
"""

import functools
import operator
from collections.abc import Hashable
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.engine.interfaces import LogitsProcessor
from nanovllm.engine.policies import PrefixCache
from nanovllm.engine.sequence import Sequence, unpack
from nanovllm.engine.slots import HostSlots, SlotLayout
from nanovllm.layers.attention import AttentionBackend
from nanovllm.layers.sampler import selected


class Batch(NamedTuple):
    """
    One step. A decode step computes the last token of each sequence and needs the first four fields and the
    last only: which slots take part, and each one's last token and place, devices know by the `slot_updates`
    so far.
    """

    num_sequences: int
    wanted: int  # the logits processors that at least one of the sequences wants, a bit each
    slot_updates: np.ndarray | None  # see slots.py
    messages: dict[str, Any] | None = None  # by part of the engine: what it has prepared for every rank
    slots: np.ndarray | None = None  # int32 [sequences], see slots.py
    lens_q: np.ndarray | None = None  # int32 [sequences], tokens to be computed
    lens_k: np.ndarray | None = None  # int32 [sequences], tokens that the KV cache has of each after the step
    token_ids: np.ndarray | None = None  # int32 [tokens], those to be computed
    positions: np.ndarray | None = None  # int32 [tokens]
    slot_mapping: np.ndarray | None = None  # int32 [tokens], see Context
    plan_key: Hashable = False  # of a decode step, see AttentionBackend

    @property
    def is_prefill(self) -> bool:
        return self.lens_q is not None


class BatchMaker:
    """Turns scheduled sequences into batches. All must be run, in order; if one is not, `reset` follows."""

    def __init__(
        self,
        config: Any,
        prefix_cache: PrefixCache | None = None,
        backend: AttentionBackend | None = None,
        processors: tuple[LogitsProcessor, ...] = (),
    ):
        self.prefix_cache = prefix_cache or PrefixCache()
        self.backend = backend or AttentionBackend()
        self.processors = processors
        self.of_decode = sum(1 << i for i, each in enumerate(processors) if not each.prefill_only)
        self.block_size = config.kvcache_block_size
        self.slots = HostSlots(SlotLayout(config))
        self.plan_key: Hashable = False
        self.ever_wanted = 0

    def reset(self) -> None:
        self.slots.reset()
        self.ever_wanted = 0

    def decode(self, sequences: list[Sequence]) -> Batch:
        updates, is_new_batch = self.slots.decode(sequences)
        messages = None
        if self.backend.largest_plan and is_new_batch:
            self.plan_key, message = self.backend.plan(sequences)
            messages = None if message is None else {"attention": message}
        self.backend.num_decode_steps += 1
        wanted = functools.reduce(operator.or_, (seq.request.wanted for seq in sequences)) & self.of_decode
        return Batch(len(sequences), wanted, updates, messages, plan_key=self.plan_key)

    def prefill(self, sequences: list[Sequence]) -> Batch:
        lens_q = np.array([seq.num_scheduled_tokens for seq in sequences], dtype=np.int32)
        starts = np.array([seq.num_computed_tokens for seq in sequences], dtype=np.int32)
        lens_k = starts + lens_q
        spans = zip(sequences, starts.tolist(), lens_k.tolist(), strict=True)
        packed = b"".join(seq.packed(start, end) for seq, start, end in spans)
        ends = np.cumsum(lens_q, dtype=np.int32)
        positions = np.arange(ends[-1], dtype=np.int32) + np.repeat(lens_k - ends, lens_q)
        wanted = functools.reduce(operator.or_, (seq.request.wanted for seq in sequences))
        self.ever_wanted |= wanted
        messages = {"prefix_cache": self.prefix_cache.prepare(sequences)}
        for processor in selected(self.processors, self.ever_wanted):
            messages[processor.name] = processor.prepare(sequences)
        return Batch(
            len(sequences),
            wanted,
            self.slots.prefill(sequences),
            {name: message for name, message in messages.items() if message is not None},
            np.array([seq.slot for seq in sequences], dtype=np.int32),
            lens_q,
            lens_k,
            unpack(packed).astype(np.int32),
            positions,
            self._slot_mapping(sequences, lens_q, positions),
        )

    def _slot_mapping(
        self, sequences: list[Sequence], lens_q: np.ndarray, positions: np.ndarray
    ) -> np.ndarray:
        tables = [seq.block_table for seq in sequences]
        if not tables[0]:  # warm-up
            return np.full_like(positions, -1)
        blocks = np.array(list(chain.from_iterable(tables)), dtype=np.int32)
        first = np.cumsum([0, *map(len, tables[:-1])], dtype=np.int32)
        places = np.repeat(first, lens_q) + positions // self.block_size
        return blocks[places] * self.block_size + positions % self.block_size


class StepOutput(NamedTuple):
    """What a step computes. A rank's is on its device; `to_host` gives one that is on its way to the host."""

    tokens: torch.Tensor  # int64 [sequences, in a CUDA graph with padding], the next token of each
    tensors: dict[str, tuple[torch.Tensor, ...]]  # by logits processor, what it has to tell
    done: torch.cuda.Event | None = None  # after which the copies on the host are complete

    def to_host(self, batch: Batch) -> "StepOutput":
        """Begin to copy the output of this batch. Call it before the next step, which may overwrite it."""
        size = None if batch.is_prefill else batch.num_sequences  # the rest is padding
        tensors = {}
        for name, found in self.tensors.items():
            tensors[name] = tuple(tensor[:size].to("cpu", non_blocking=True) for tensor in found)
        tokens = self.tokens[:size].to("cpu", non_blocking=True)
        done = torch.cuda.current_stream().record_event() if self.tokens.is_cuda else None
        return StepOutput(tokens, tensors, done)

    def token_ids(self) -> list[int]:
        """Wait for the step and return one token id per sequence."""
        if self.done is not None:
            self.done.synchronize()
        return self.tokens.tolist()
