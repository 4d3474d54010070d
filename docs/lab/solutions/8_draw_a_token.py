"""A generator for each row. Ours computes the noise of a token from a counter, in the kernel that takes the
argmax."""

import torch
from torch import Tensor

from nanovllm.layers import sampler
from nanovllm.layers.sampler import SamplingStep


class Sampler(sampler.Sampler):
    def forward(self, logits: Tensor, step: SamplingStep) -> Tensor:
        logits = logits.float()
        if step.lowest is not None:
            logits = logits.masked_fill(logits < step.lowest[:, None], float("-inf"))
        tokens = logits.argmax(-1)
        for i, temperature in enumerate(step.temperatures.tolist()):
            if temperature > 0:
                seed = hash((int(step.seeds[i]), int(step.positions[i]))) % 2**63
                uniform = torch.rand(logits.shape[1], generator=torch.Generator().manual_seed(seed))
                tokens[i] = (logits[i] / temperature - torch.log(-torch.log(uniform))).argmax()
        return tokens
