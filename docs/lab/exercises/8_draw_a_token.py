"""Draw a token from the logits, so that a request's answer does not depend on who is beside it.

A batch changes from step to step, so one generator for all would give each sequence other noise in other
company. Give each draw noise of its own instead, which follows from the seed of its request and the position
of the token alone: argmax(logits / temperature + g) draws from softmax(logits / temperature) if each g is
-log(-log(u)) for a uniform u (the Gumbel trick). A temperature of 0 is plain argmax.
"""

from torch import Tensor

from nanovllm.layers import sampler
from nanovllm.layers.sampler import SamplingStep


class Sampler(sampler.Sampler):
    def forward(self, logits: Tensor, step: SamplingStep) -> Tensor:
        """
        logits [sequences, vocabulary]; step.temperatures, step.seeds and step.positions have one number for
        each sequence. Tokens below step.lowest, if it is not None, must not be drawn: float32 [sequences]. ->
        int64 [sequences].
        """
        raise NotImplementedError("exercise 8")
