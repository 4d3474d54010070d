"""What a device keeps of each running sequence, so that a decode step sends it only what it cannot know.

Each running sequence has a slot (`Sequence.slot`). It says how to go on (last token, length, block table) and
how to draw (temperature, seed). The device itself appends each token that it draws. The host writes a slot
when its sequence is prefilled; later it sends newly opened blocks and which slots take part. All tables are
made with the engine, so that their memory is known before the KV cache takes the rest.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanovllm.engine.sequence import Sequence
from nanovllm.engine.transfer import to_device
from nanovllm.kernels.decode_inputs import DecodeInputs, InputTables, decode_inputs
from nanovllm.sampling_params import SamplingParams


class SlotLayout:
    """
    Where the tables lie in one buffer of int32 words, so that any change of them is a list of (index, value)
    pairs. Slots 0 .. max_num_seqs - 1 belong to sequences; the next one stays empty, for padding.
    """

    def __init__(self, config: Any):
        self.block_size: int = config.kvcache_block_size
        self.padding_slot: int = config.max_num_seqs
        self.max_blocks = -(-config.max_model_len // self.block_size)
        if config.num_kvcache_blocks != -1:  # else there will be enough for such a sequence
            self.max_blocks = min(self.max_blocks, config.num_kvcache_blocks)
        self.num_slots = -(-(self.padding_slot + 1) // 4) * 4  # each table begins at a multiple of 16 bytes
        widths = {
            "seeds": 2,
            "tokens": 1,
            "lengths": 1,
            "temperatures": 1,
            "batch": 1,
            "block_tables": self.max_blocks,
        }
        self.sizes = {name: width * self.num_slots for name, width in widths.items()}
        ends = np.cumsum([*self.sizes.values()]).tolist()
        self.starts = dict(zip(self.sizes, [0, *ends], strict=False))
        self.num_words: int = ends[-1]


def temperature_of(params: SamplingParams) -> float:
    """Within what float32 can compute with: below 1e-6 it is greedy, above 1e20 all are equally likely."""
    return min(params.temperature, 1e20) if params.temperature > 1e-6 else 0.0


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
        self.batch: list[int] = []  # slots of the last decode step
        self.num_blocks = [0] * self.layout.padding_slot  # by slot, how many blocks were sent
        self.has_prefilled = False  # since the last decode step: the same slots may be other sequences
        self.is_new_batch = False  # whether the last decode step was the first one of its sequences

    def prefill(self, sequences: list[Sequence]) -> np.ndarray:
        """Everything about these sequences as it is after the step, which draws a token for each."""
        self.has_prefilled = True
        starts = self.layout.starts
        indices: list[int] = []
        values: list[int] = []
        for seq in sequences:
            slot = seq.slot
            seeds = starts["seeds"] + 2 * slot
            indices += [seeds, seeds + 1, starts["lengths"] + slot, starts["temperatures"] + slot]
            values += np.array([seq.request.seed], dtype="<i8").view(np.int32).tolist()
            values.append(seq.num_computed_tokens + seq.num_scheduled_tokens + 1)
            values += np.array([temperature_of(seq.sampling_params)], np.float32).view(np.int32).tolist()
            self.num_blocks[slot] = 0
            self._add_blocks(seq, indices, values)
        return _words(indices, values)

    def decode(self, sequences: list[Sequence]) -> np.ndarray | None:
        """What has changed since the last step; None if nothing has."""
        indices: list[int] = []
        values: list[int] = []
        num_blocks = self.num_blocks
        slots = [seq.slot for seq in sequences]
        self.is_new_batch = self.has_prefilled or slots != self.batch
        self.has_prefilled = False
        if slots != self.batch:
            values += slots + [self.layout.padding_slot] * (len(self.batch) - len(slots))
            start = self.layout.starts["batch"]
            indices += range(start, start + len(values))
            self.batch = slots
        for seq in sequences:
            if len(seq.block_table) != num_blocks[seq.slot]:
                self._add_blocks(seq, indices, values)
        return _words(indices, values) if indices else None

    def _add_blocks(self, seq: Sequence, indices: list[int], values: list[int]) -> None:
        """Add the part of the block table that was not sent yet."""
        num_sent, num_blocks = self.num_blocks[seq.slot], len(seq.block_table)
        start = self.layout.starts["block_tables"] + seq.slot * self.layout.max_blocks
        indices.extend(range(start + num_sent, start + num_blocks))
        values.extend(seq.block_table[num_sent:])
        self.num_blocks[seq.slot] = num_blocks


def _words(indices: list[int], values: list[int]) -> np.ndarray:
    return np.array([indices, values], dtype=np.int64).astype(np.int32)


class DeviceSlots:
    """The device's half: the tables, and what each step reads from them and writes to them."""

    def __init__(self, layout: SlotLayout, device: torch.device):
        self.block_size = layout.block_size
        self.padding_slot = layout.padding_slot
        self.device = device
        self.buffer = torch.zeros(layout.num_words, dtype=torch.int32, device=device)
        tables = dict(zip(layout.sizes, self.buffer.split([*layout.sizes.values()]), strict=True))
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
        indices, values = to_device(updates, self.device)
        self.buffer.index_put_((indices,), values)

    def next_inputs(self, slots: Tensor) -> DecodeInputs:
        """Inputs of the decode step for these slots, int32 [batch], whose lengths count its tokens then."""
        return decode_inputs(slots, self.inputs, self.block_size)

    def note_drawn(self, slots: Tensor, token_ids: Tensor) -> None:
        """Make the tokens drawn for these slots, int64 [batch], the inputs of their next step."""
        self.inputs.tokens.index_put_((slots,), token_ids.int())
