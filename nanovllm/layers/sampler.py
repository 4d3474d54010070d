"""Draws the next token of every sequence."""

import torch
from torch import nn

from nanovllm.kernels.sampling import sample
from nanovllm.utils import parallel


class Sampler(nn.Module):
    """Where ranks hold parts of the vocabulary, each draws from its own and the best score wins."""

    def __init__(self, vocab_start: int = 0):
        super().__init__()
        self.vocab_start = vocab_start
        self.group = parallel.get_group()

    def forward(
        self, logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """
        logits [batch, this rank's vocabulary], temperatures float32 [batch] (0 is greedy), seeds and
        positions int64 [batch] -> token ids int64 [batch], drawn from softmax(logits / temperature).

        The draw is the argmax of the scaled logits plus Gumbel noise, which follows softmax's distribution
        without computing it. The noise depends on seed, position and token id alone, so neighbours do not
        matter.
        """
        return self.group.best_token(*sample(logits, temperatures, seeds, positions, self.vocab_start))
