"""What a device keeps of each running sequence, so that a decode step sends it only what it cannot know.

Each running sequence has a slot (`Sequence.slot`). It says how to go on (last token, length, block table) and
how to draw (temperature, seed). The device itself appends each token that it draws. The host (see
`BatchMaker`) writes a slot when its sequence is prefilled; later it sends newly opened blocks and which slots
take part. All tables are made with the engine, so that their memory is known before the KV cache takes the
rest.
"""

from itertools import accumulate
from typing import Any

import numpy as np
import torch

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


class DeviceSlots:
    """The tables, which decode steps read and write. Every device applies all updates, in their order."""

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
        """int32 [2, changes]: indices into the buffer and their new values."""
        indices, values = to_device(updates, self.buffer.device)
        self.buffer.index_put_((indices,), values)
