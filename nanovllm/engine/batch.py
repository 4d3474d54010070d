"""What passes between the scheduler and the ranks: a `Batch` goes to all of them, a `StepOutput` comes back.

Rank 0 makes the batch from scheduled sequences and waits for the output. Ranks never see a `Sequence`.
"""

import functools
import operator
import struct
from collections.abc import Collection, Hashable
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.engine.interfaces import LogitsProcessor
from nanovllm.engine.policies import PrefixCache
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.slots import SlotLayout
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
    slot_updates: np.ndarray | None  # see DeviceSlots.apply
    messages: dict[str, Any] | None = None  # by part of the engine: what it has prepared for every rank
    slots: np.ndarray | None = None  # int32 [sequences]
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
    """
    Turns scheduled sequences into batches, and knows what was sent of them to the slots of all devices. All
    batches must be run, in order; if one is not, `reset` follows.
    """

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
        self.layout = SlotLayout(config)
        self.plan_key: Hashable = False
        self.reset()

    def reset(self) -> None:
        """Forget what was sent; the devices forget it, too."""
        self.changes: tuple[list[int], list[int]] = [], []  # of slots, to be sent: indices and values
        self.decoded: list[int] = []  # slots of the last decode step
        self.num_blocks = [0] * self.layout.padding_slot  # by slot, how many blocks were sent
        self.has_prefilled = False  # since the last decode step: the same slots may be other sequences
        self.ever_wanted = 0

    def decode(self, sequences: list[Sequence]) -> Batch:
        """Of what the devices do not know by themselves, it has what has changed since the last step."""
        slots = [seq.slot for seq in sequences]
        is_new = self.has_prefilled or slots != self.decoded
        self.has_prefilled = False
        if slots != self.decoded:
            padding = [self.layout.padding_slot] * (len(self.decoded) - len(slots))
            self._write("batch", 0, slots + padding)
            self.decoded = slots
        for seq in sequences:
            if len(seq.block_table) != self.num_blocks[seq.slot]:
                self._write_blocks(seq)
        updates = self._take_changes() if self.changes[0] else None
        messages = None
        if is_new and self.backend.largest_plan:
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
        token_ids = chain.from_iterable(seq.token_ids[start:end] for seq, start, end in spans)
        ends = np.cumsum(lens_q, dtype=np.int32)
        positions = np.arange(ends[-1], dtype=np.int32) + np.repeat(lens_k - ends, lens_q)
        wanted = functools.reduce(operator.or_, (seq.request.wanted for seq in sequences))
        for seq in sequences:
            self._write_slot(seq)
        self.has_prefilled = True
        self.ever_wanted |= wanted
        messages = {"prefix_cache": self.prefix_cache.prepare(sequences)}
        for processor in selected(self.processors, self.ever_wanted):
            messages[processor.name] = processor.prepare(sequences)
        return Batch(
            len(sequences),
            wanted,
            self._take_changes(),
            {name: message for name, message in messages.items() if message is not None},
            np.array([seq.slot for seq in sequences], dtype=np.int32),
            lens_q,
            lens_k,
            np.fromiter(token_ids, np.int32, ends[-1]),
            positions,
            self._slot_mapping(sequences, lens_q, positions),
        )

    def _write_slot(self, seq: Sequence) -> None:
        """Everything about a sequence as it is after the step, which draws a token for it."""
        # Within what float32 can compute with: above 1e20 all tokens are equally likely.
        temperature = min(seq.sampling_params.temperature, 1e20)
        if temperature <= 1e-6:
            temperature = 0.0  # greedy
        words = struct.unpack("<3i", struct.pack("<qf", seq.request.seed, temperature))
        self._write("seeds", 2 * seq.slot, words[:2])
        self._write("temperatures", seq.slot, words[2:])
        self._write("lengths", seq.slot, [seq.num_computed_tokens + seq.num_scheduled_tokens + 1])
        self.num_blocks[seq.slot] = 0
        self._write_blocks(seq)

    def _write_blocks(self, seq: Sequence) -> None:
        """The part of the block table that was not sent yet."""
        num_sent = self.num_blocks[seq.slot]
        self._write("block_tables", seq.slot * self.layout.max_blocks + num_sent, seq.block_table[num_sent:])
        self.num_blocks[seq.slot] = len(seq.block_table)

    def _write(self, table: str, offset: int, words: Collection[int]) -> None:
        indices, values = self.changes
        start = self.layout.starts[table] + offset
        indices += range(start, start + len(words))
        values += words

    def _take_changes(self) -> np.ndarray:
        changes, self.changes = self.changes, ([], [])
        return np.array(changes, dtype=np.int32)

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
