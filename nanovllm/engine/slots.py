"""What a device keeps of each running sequence, so that a decode step sends it only what it cannot know.

Each running sequence has a slot (`Sequence.slot`). It says how to go on (last token, length, block table) and
how to draw (temperature, seed). The device itself appends each token that it draws. The host (see
`BatchMaker`) writes a slot when its sequence is prefilled; later it sends newly opened blocks and which slots
take part. The memory for all slots is taken with the engine, before the KV cache takes the rest.
"""

from typing import Any

import numpy as np
import torch

from nanovllm.kernels.decode_inputs import InputTables

BLOCK_TABLE = 5  # where it begins in a slot: behind the seed (two words), temperature, length and last token


class SlotLayout:
    """
    Everything is in one buffer of int32 words, so that any change is a list of (index, value) pairs: a row
    for each slot, and behind them the slots of the decode step. Slots 0 .. max_num_seqs - 1 belong to
    sequences; the last one stays empty, for padding.
    """

    def __init__(self, config: Any):
        self.padding_slot = config.max_num_seqs
        self.num_slots = self.padding_slot + 1
        self.max_blocks = -(-config.max_model_len // config.kvcache_block_size)
        if config.num_kvcache_blocks != -1:  # else there will be enough for such a sequence
            self.max_blocks = min(self.max_blocks, config.num_kvcache_blocks)
        self.width = -(-(BLOCK_TABLE + self.max_blocks) // 4) * 4  # each row begins at a multiple of 16 bytes
        self.batch = self.num_slots * self.width  # where the decode step's slots begin


class DeviceSlots:
    """The slots, which steps read and write. Every device applies all updates, in their order."""

    def __init__(self, layout: SlotLayout, device: torch.device):
        self.buffer = torch.zeros(layout.batch + layout.num_slots, dtype=torch.int32, device=device)
        rows = self.buffer[: layout.batch].view(-1, layout.width)
        self.batch = self.buffer[layout.batch :]  # the slots of the decode step, and padding behind them
        self.inputs = InputTables(
            tokens=rows[:, 4],
            lengths=rows[:, 3],
            block_tables=rows[:, BLOCK_TABLE : BLOCK_TABLE + layout.max_blocks],
            temperatures=rows[:, 2].view(torch.float32),
            seeds=rows[:, :2].view(torch.int64)[:, 0],
        )
        self.reset()

    def reset(self) -> None:
        """Forget all slots."""
        self.buffer.zero_()
        self.batch.fill_(len(self.batch) - 1)  # the padding slot

    def apply(self, updates: np.ndarray) -> None:
        """int32 [2, changes]: indices into the buffer and their new values."""
        indices, values = to_device(updates, self.buffer.device)
        self.buffer.index_put_((indices,), values)


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on the device, for steps that are enqueued from now on: nobody waits for it."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor
