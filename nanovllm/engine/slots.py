"""What a device keeps of each running sequence, so that a decode step sends it only what it cannot know.

Each running sequence has a slot (`Sequence.slot`). It says how to go on (last token, length, block table) and
how to draw (temperature, seed). The device itself appends each token that it draws. The host writes a slot
when its sequence is prefilled; later it sends newly opened blocks and which slots take part. All tables are
made with the engine, so that their memory is known before the KV cache takes the rest.
"""

import struct
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from nanovllm.engine.sequence import Sequence
from nanovllm.engine.transfer import to_device
from nanovllm.kernels.decode_inputs import InputTables


class SlotLayout:
    """
    Where the tables lie in one buffer of int32 words, so that any change of them is a list of (index, value)
    pairs. Slots 0 .. max_num_seqs - 1 belong to sequences; the next one stays empty, for padding.
    """

    def __init__(self, config: Any):
        self.padding_slot: int = config.max_num_seqs
        self.max_blocks = -(-config.max_model_len // config.kvcache_block_size)
        if config.num_kvcache_blocks != -1:  # else there will be enough for such a sequence
            self.max_blocks = min(self.max_blocks, config.num_kvcache_blocks)
        self.num_slots = -(-(self.padding_slot + 1) // 4) * 4  # each table begins at a multiple of 16 bytes
        widths = dict(seeds=2, tokens=1, lengths=1, temperatures=1, batch=1, block_tables=self.max_blocks)
        self.sizes = {name: width * self.num_slots for name, width in widths.items()}
        self.starts = dict(zip(self.sizes, accumulate(self.sizes.values(), initial=0), strict=False))


class HostSlots:
    """
    The host's half: knows what was sent, as int32 [2, changes]: indices into the buffer of `SlotLayout` and
    their new values. Every device applies all updates, in the order they are made.
    """

    def __init__(self, layout: SlotLayout):
        self.layout = layout
        self.reset()

    def reset(self) -> None:
        """Forget what was sent; the devices' halves are reset, too."""
        self.changes: tuple[list[int], list[int]] = [], []  # indices and values, to be sent with this step
        self.batch: list[int] = []  # slots of the last decode step
        self.num_blocks = [0] * self.layout.padding_slot  # by slot, how many blocks were sent
        self.has_prefilled = False  # since the last decode step: the same slots may be other sequences

    def prefill(self, sequences: list[Sequence]) -> np.ndarray:
        """Everything about these sequences as it is after the step, which draws a token for each."""
        self.has_prefilled = True
        starts = self.layout.starts
        for seq in sequences:
            slot, seed = seq.slot, seq.request.seed
            # Within what float32 can compute with: above 1e20 all tokens are equally likely.
            temperature = min(seq.sampling_params.temperature, 1e20)
            if temperature <= 1e-6:
                temperature = 0.0  # greedy
            *seed_words, temperature_word = struct.unpack("<3i", struct.pack("<qf", seed, temperature))
            self._write(starts["seeds"] + 2 * slot, seed_words)
            self._write(starts["temperatures"] + slot, [temperature_word])
            length = seq.num_computed_tokens + seq.num_scheduled_tokens + 1
            self._write(starts["lengths"] + slot, [length])
            self.num_blocks[slot] = 0
            self._write_blocks(seq)
        return self._take_changes()

    def decode(self, sequences: list[Sequence]) -> tuple[np.ndarray | None, bool]:
        """What has changed since the last step, if anything; and whether it may be of other sequences."""
        slots = [seq.slot for seq in sequences]
        is_new = self.has_prefilled or slots != self.batch
        self.has_prefilled = False
        if slots != self.batch:
            padding = [self.layout.padding_slot] * (len(self.batch) - len(slots))
            self._write(self.layout.starts["batch"], slots + padding)
            self.batch = slots
        for seq in sequences:
            if len(seq.block_table) != self.num_blocks[seq.slot]:
                self._write_blocks(seq)
        return self._take_changes() if self.changes[0] else None, is_new

    def _write_blocks(self, seq: Sequence) -> None:
        """Send the part of the block table that was not sent yet."""
        num_sent = self.num_blocks[seq.slot]
        start = self.layout.starts["block_tables"] + seq.slot * self.layout.max_blocks
        self._write(start + num_sent, seq.block_table[num_sent:])
        self.num_blocks[seq.slot] = len(seq.block_table)

    def _write(self, start: int, words: list[int]) -> None:
        indices, values = self.changes
        indices += range(start, start + len(words))
        values += words

    def _take_changes(self) -> np.ndarray:
        changes, self.changes = self.changes, ([], [])
        return np.array(changes, dtype=np.int32)


class DeviceSlots:
    """The device's half: the tables, which decode steps read and write."""

    def __init__(self, layout: SlotLayout, device: torch.device):
        self.padding_slot = layout.padding_slot
        sizes = layout.sizes
        self.buffer = torch.zeros(sum(sizes.values()), dtype=torch.int32, device=device)
        tables = dict(zip(sizes, self.buffer.split([*sizes.values()]), strict=True))
        self.inputs = InputTables(
            tables["tokens"],
            tables["lengths"],
            tables["block_tables"].view(layout.num_slots, -1),
            tables["temperatures"].view(torch.float32),
            tables["seeds"].view(torch.int64),
        )
        self.batch = tables["batch"]  # the slots of the decode step, and padding behind them
        self.reset()

    def reset(self) -> None:
        """Forget all slots."""
        self.buffer.zero_()
        self.batch.fill_(self.padding_slot)

    def apply(self, updates: np.ndarray) -> None:
        indices, values = to_device(updates, self.buffer.device)
        self.buffer.index_put_((indices,), values)
