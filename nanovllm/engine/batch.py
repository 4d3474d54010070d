"""What passes between the scheduler and the ranks: a `Batch` goes to all of them, a `StepOutput` comes back.

Rank 0 makes the batch from scheduled sequences and waits for the output. Ranks never see a `Sequence`.
"""

import struct
from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.engine.interfaces import Parts
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.slots import BLOCK_TABLE, SlotLayout
from nanovllm.layers.attention import AttentionBackend
from nanovllm.layers.sampler import selected


class Batch(NamedTuple):
    """
    One step. A decode step computes the last token of each sequence and needs the first five fields only:
    which slots take part, and each one's last token and place, devices know by the `slot_updates` so far.
    """

    num_sequences: int
    wanted: int  # the logits processors that at least one of the sequences wants, a bit each
    slot_updates: np.ndarray | None  # see DeviceSlots.apply
    messages: dict[str, Any]  # by part of the engine: what it has prepared for every rank, or None
    plan_key: Hashable = False  # of a decode step, see AttentionBackend
    slots: np.ndarray | None = None  # int32 [sequences]
    lens_q: list[int] | None = None  # of each sequence: tokens to be computed
    lens_k: list[int] | None = None  # of each sequence: tokens that the KV cache has after the step
    token_ids: np.ndarray | None = None  # int64 [tokens], those to be computed
    positions: np.ndarray | None = None  # int64 [tokens]
    slot_mapping: np.ndarray | None = None  # int32 [tokens], see Context

    @property
    def is_prefill(self) -> bool:
        return self.lens_q is not None


class BatchMaker:
    """
    Turns scheduled sequences into batches, and knows what was sent of them to the slots of all devices. All
    batches must be run, in order; if one is not, `reset` follows.
    """

    def __init__(self, config: Any, parts: Parts, backend: AttentionBackend):
        self.parts = parts
        self.backend = backend
        processors = enumerate(parts.logits_processors)
        self.of_decode = sum(1 << i for i, processor in processors if not processor.prefill_only)
        self.block_size = config.kvcache_block_size
        self.layout = SlotLayout(config)
        self.reset()

    def reset(self) -> None:
        """Forget what was sent; the devices forget it, too."""
        self.decoded: list[int] = []  # slots of the last decode step
        self.is_new = False  # whether other sequences than in the last decode step may have the slots
        self.ever_wanted = 0

    def decode(self, sequences: list[Sequence]) -> Batch:
        """Of what the devices do not know by themselves, it has what has changed since the last step."""
        updates, slots, wanted = {}, [], 0  # updates: words to be written to the slots, by index
        for seq in sequences:
            slots.append(seq.slot)
            wanted |= seq.request.wanted
            if seq.num_tokens % self.block_size == 1:  # its last token begins a block, which is a new one
                start = seq.slot * self.layout.width + BLOCK_TABLE
                updates[start + len(seq.block_table) - 1] = seq.block_table[-1]
        if slots != self.decoded:
            self.is_new = True
            padding = [self.layout.padding_slot] * (len(self.decoded) - len(slots))
            updates |= enumerate(slots + padding, self.layout.batch)
        plan_key, message = self.backend.plan(sequences, self.is_new)
        self.is_new, self.decoded = False, slots
        return Batch(
            len(sequences),
            wanted & self.of_decode,
            np.array([[*updates], [*updates.values()]], dtype=np.int32) if updates else None,
            {"attention": message},
            plan_key,
        )

    def prefill(self, sequences: list[Sequence]) -> Batch:
        updates, wanted = {}, 0  # words to be written to the slots, by index
        token_ids, slots, lens_q, lens_k, tables = [], [], [], [], []
        for seq in sequences:
            start = seq.num_computed_tokens
            end = start + seq.num_scheduled_tokens
            wanted |= seq.request.wanted
            slots.append(seq.slot)
            lens_q.append(end - start)
            lens_k.append(end)
            token_ids += seq.token_ids[start:end]
            # Within what float32 can compute with: above 1e20 all tokens are equally likely.
            temperature = min(seq.request.params.temperature, 1e20)
            if temperature <= 1e-6:
                temperature = 0.0  # greedy
            row = struct.unpack("<3i", struct.pack("<qf", seq.request.seed, temperature))
            row = [*row, end, 0, *seq.block_table]  # the step draws the next token
            tables.append(len(updates) + BLOCK_TABLE)  # where its block table begins among the words
            updates |= enumerate(row, seq.slot * self.layout.width)
        self.is_new = True
        self.ever_wanted |= wanted
        messages = {"prefix_cache": self.parts.prefix_cache.prepare(sequences)}
        for processor in selected(self.parts.logits_processors, self.ever_wanted):
            messages[processor.name] = processor.prepare(sequences)
        # Of each token: its place in its sequence, and that of its block among the words.
        words = np.array([[*updates], [*updates.values()]], dtype=np.int32)
        ends = np.cumsum(lens_q)
        positions = np.arange(ends[-1]) + np.repeat(lens_k - ends, lens_q)
        places = np.repeat(tables, lens_q) + positions // self.block_size
        slot_mapping = words[1, places] * self.block_size + positions % self.block_size
        return Batch(
            len(sequences),
            wanted,
            words,
            messages,
            slots=np.array(slots, dtype=np.int32),
            lens_q=lens_q,
            lens_k=lens_k,
            token_ids=np.array(token_ids, dtype=np.int64),
            positions=positions,
            slot_mapping=slot_mapping.astype(np.int32),
        )


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
