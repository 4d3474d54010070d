"""Draws the next token of every sequence."""

from dataclasses import dataclass

from torch import Tensor, nn

from nanovllm.distributed.group import get_group
from nanovllm.kernels.sampling import sample


@dataclass
class SamplingStep:
    """What drawing the next tokens takes, on the device: one entry for each sequence."""

    slots: Tensor  # int32 [sequences], see engine/slots.py
    temperatures: Tensor  # float32 [sequences], 0 is greedy
    seeds: Tensor  # int64 [sequences]
    positions: Tensor  # int64 [sequences], of the tokens to be drawn
    vocab_start: int = 0  # where the logits' part of the vocabulary begins
    lowest: Tensor | None = None  # float32 [sequences]: tokens with a lower logit are not drawn


class Sampler(nn.Module):
    """Where each rank holds a part of the vocabulary, each draws from its part, and the best score wins."""

    def __init__(self) -> None:
        super().__init__()
        self.group = get_group()

    def forward(self, logits: Tensor, step: SamplingStep) -> Tensor:
        """
        logits [batch, this rank's vocabulary, or all of it] -> token ids int64 [batch], drawn from
        softmax(logits / temperature) among the tokens that `step.lowest` allows.

        The draw is the argmax of the scaled logits plus Gumbel noise, which follows softmax's distribution
        without computing it. The noise depends on seed, position and token id alone, so neighbours do not
        matter.
        """
        settings = step.temperatures, step.seeds, step.positions, step.vocab_start, step.lowest
        return self.group.best_token(*sample(logits, *settings))
