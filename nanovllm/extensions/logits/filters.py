"""top-k, top-p and min-p: the likeliest tokens alone may be drawn."""

import torch
from torch import Tensor

from nanovllm.engine.interfaces import LogitsProcessor
from nanovllm.engine.sequence import Sequence
from nanovllm.extensions.logits.kernels.filtering import Filters, filter_thresholds
from nanovllm.extensions.logits.slot_settings import SlotNumbers, SlotSettings
from nanovllm.layers.sampler import SamplingStep
from nanovllm.sampling_params import SamplingParams


class FilterProcessor(LogitsProcessor):
    """Says how low a logit may be; the sampler leaves out what is lower."""

    name = "filters"
    fields = ("top_k", "top_p", "min_p")
    order = 40

    def __init__(self) -> None:
        self.settings = SlotSettings(Filters())

    def wants(self, params: SamplingParams) -> bool:
        return params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)

    def prepare(self, sequences: list[Sequence]) -> SlotNumbers:
        wanted = {}
        for seq in sequences:
            if self.name in seq.request.own:
                params = seq.sampling_params
                # Within what float32 can compute with.
                wanted[seq.slot] = Filters(max(params.top_k, 0), max(params.top_p, 1e-30), params.min_p)
        return self.settings.of(sequences, wanted)

    def allocate(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.settings.allocate(num_slots, device)

    def receive(self, message: SlotNumbers) -> None:
        self.settings.receive(message)

    def apply(self, logits: Tensor, step: SamplingStep) -> Tensor:
        step.lowest = filter_thresholds(logits, step.temperatures, self.settings.table[step.slots])
        return logits

    def reset(self) -> None:
        self.settings.reset()

    def close(self) -> None:
        del self.settings.table
