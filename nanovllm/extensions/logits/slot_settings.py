"""Numbers that a processor keeps of each slot: a sequence that does not want it has neutral ones."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanovllm.engine.interfaces import LogitsProcessor
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.slots import to_device


class SlotSettings(LogitsProcessor):
    """
    `numbers_of` takes the SamplingParams of a request that wants the processor; its numbers are within what
    float32 can compute with.
    """

    neutral: tuple[float, ...]
    table: Tensor  # float32 [slots, numbers], on the device

    def prepare(self, sequences: list[Sequence]) -> Any:
        """Slots, int64 [sequences], and their numbers, float32 [sequences, numbers]."""
        numbers = [
            self.numbers_of(seq.request.params) if self.name in seq.request.own else self.neutral
            for seq in sequences
        ]
        return np.array([seq.slot for seq in sequences]), np.float32(numbers)

    def allocate(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.table = torch.tensor([self.neutral] * num_slots, dtype=torch.float32, device=device)

    def receive(self, message: Any) -> None:
        slots, numbers = (to_device(array, self.table.device) for array in message)
        self.table[slots] = numbers

    def reset(self) -> None:
        self.table[:] = torch.tensor(self.neutral)

    def close(self) -> None:
        del self.table
