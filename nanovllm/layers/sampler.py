"""From logits to the next token of every sequence."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from nanovllm.distributed.group import get_group
from nanovllm.kernels.sampling import sample


@dataclass
class SamplingStep:
    """What drawing the next tokens takes, on the device: one entry for each sequence."""

    slots: Tensor  # int32 [sequences], see engine/slots.py
    temperatures: Tensor  # float32 [sequences], 0 is greedy
    seeds: Tensor  # int64 [sequences]
    positions: Tensor  # int32 [sequences], of the tokens to be drawn
    processors: Iterable[Any] = ()  # the logits processors that at least one of the sequences wants
    vocab_start: int = 0  # where the logits' part of the vocabulary begins
    lowest: Tensor | None = None  # float32 [sequences]: tokens with a lower logit are not drawn
    # By logits processor, what it has to tell of the step.
    told: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)


def selected(processors: Iterable[Any], wanted: int) -> list[Any]:
    """Those logits processors whose bits are set: bit i is that of the i-th."""
    return [processor for i, processor in enumerate(processors) if wanted >> i & 1]


class Sampler(nn.Module):
    """Where each rank holds a part of the vocabulary, each draws from its part, and the best score wins."""

    def __init__(self) -> None:
        super().__init__()
        self.group = get_group()

    def forward(self, logits: Tensor, step: SamplingStep) -> Tensor:
        """
        Token ids int64 [batch], drawn from softmax(logits / temperature) among the tokens that `step.lowest`
        allows. logits [batch, vocabulary, or a part of it that begins at `step.vocab_start`].

        The draw is the argmax of the scaled logits plus Gumbel noise, which follows softmax's distribution
        without computing it. The noise depends on seed, position and token id alone, so neighbours do not
        matter.
        """
        scores, token_ids = sample(logits, step)
        return token_ids if self.group.size == 1 else self.group.best_token(scores, token_ids)
