"""top-k, top-p and min-p: the likeliest tokens alone may be drawn."""

from torch import Tensor

from nanovllm.extensions.logits.kernels.filtering import Filters, filter_thresholds
from nanovllm.extensions.logits.slot_settings import SlotSettings
from nanovllm.layers.sampler import SamplingStep
from nanovllm.sampling_params import SamplingParams


class FilterProcessor(SlotSettings):
    """Says how low a logit may be; the sampler leaves out what is lower."""

    name = "filters"
    fields = ("top_k", "top_p", "min_p")
    order = 40
    changes_logits = False
    neutral = Filters()

    def wants(self, params: SamplingParams) -> bool:
        return params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)

    def numbers_of(self, params: SamplingParams) -> Filters:
        return Filters(max(params.top_k, 0), max(params.top_p, 1e-30), params.min_p)

    def apply(self, logits: Tensor, step: SamplingStep) -> Tensor:
        step.lowest = filter_thresholds(logits, step.temperatures, self.table[step.slots])
        return logits
