"""Numbers that a processor keeps of each slot, and neutral ones where its sequence does not want them."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanovllm.engine.sequence import Sequence
from nanovllm.engine.transfer import to_device


class SlotChanges(NamedTuple):
    slots: np.ndarray  # int64 [changes]
    values: np.ndarray  # float32 [changes, numbers]


class SlotSettings:
    """The host's half knows which slots are not neutral; the device's half is `table`."""

    table: Tensor  # float32 [slots, numbers]

    def __init__(self, neutral: tuple[float, ...]):
        self.neutral = neutral
        self._set: set[int] = set()

    def allocate(self, num_slots: int, device: torch.device) -> None:
        self.table = torch.zeros(num_slots, len(self.neutral), dtype=torch.float32, device=device)
        self.reset()

    def reset(self) -> None:
        self._set.clear()
        for column, value in zip(self.table.unbind(1), self.neutral, strict=True):
            column.fill_(value)

    def changes(self, sequences: list[Sequence], wanted: dict[int, tuple[float, ...]]) -> SlotChanges | None:
        """What is new now that these sequences are in their slots, for some of which numbers are wanted."""
        stale = self._set.intersection(seq.row for seq in sequences) - wanted.keys()
        self._set = self._set - stale | wanted.keys()
        changes = wanted | dict.fromkeys(stale, self.neutral)
        if not changes:
            return None
        slots, values = list(changes), list(changes.values())
        return SlotChanges(np.array(slots, dtype=np.int64), np.array(values, dtype=np.float32))

    def receive(self, changes: SlotChanges) -> None:
        slots, values = (to_device(array, self.table.device) for array in changes)
        self.table[slots] = values
