"""Numbers that a processor keeps of each slot: a sequence that does not want it has neutral ones."""

import numpy as np
import torch
from torch import Tensor

from nanovllm.engine.sequence import Sequence
from nanovllm.engine.transfer import to_device

Numbers = tuple[float, ...]
SlotNumbers = tuple[np.ndarray, np.ndarray]  # slots, int64 [n], and their numbers, float32 [n, numbers]


class SlotSettings:
    table: Tensor  # float32 [slots, numbers], on the device

    def __init__(self, neutral: Numbers):
        self.neutral = neutral

    def allocate(self, num_slots: int, device: torch.device) -> None:
        self.table = torch.zeros(num_slots, len(self.neutral), dtype=torch.float32, device=device)
        self.reset()

    def reset(self) -> None:
        self.receive((np.arange(len(self.table)), np.tile(np.float32(self.neutral), (len(self.table), 1))))

    def of(self, sequences: list[Sequence], wanted: dict[int, Numbers]) -> SlotNumbers:
        """What these sequences have in their slots: by slot, what is wanted there."""
        slots = [seq.slot for seq in sequences]
        numbers = [wanted.get(slot, self.neutral) for slot in slots]
        return np.array(slots, dtype=np.int64), np.array(numbers, dtype=np.float32)

    def receive(self, message: SlotNumbers) -> None:
        slots, numbers = (to_device(array, self.table.device) for array in message)
        self.table[slots] = numbers
