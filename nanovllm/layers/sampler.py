"""Draws the next token of every sequence."""

import torch
from torch import nn

from nanovllm.kernels.sampling import sample


class Sampler(nn.Module):
    def forward(
        self, logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """
        logits [batch, vocabulary], temperatures float32 [batch] (0 is greedy), seeds and positions int64
        [batch] -> token ids int64 [batch], drawn from softmax(logits / temperature).

        The draw is the argmax of the scaled logits plus Gumbel noise, which follows softmax's distribution
        without computing it. The noise depends on seed, position and token id alone, so neighbours do not
        matter.
        """
        return sample(logits, temperatures, seeds, positions)[1]
