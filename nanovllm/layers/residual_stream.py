"""The residual with a lazy RMSNorm: who multiplies next decides when to normalise.

Models pass a `Stream` on and never ask. Products that leave a part of the norm or of the addition to the next
one make subclasses of their own.
"""

from dataclasses import dataclass

from torch import Tensor

from nanovllm.layers.layernorm import RMSNorm


@dataclass
class Stream:
    """`x` in front of `norm`; `normed` is norm(x), if it has been computed."""

    x: Tensor  # [tokens, hidden]
    norm: RMSNorm
    normed: Tensor | None = None  # [tokens, hidden]

    @property
    def is_untouched(self) -> bool:
        """Whether x is complete and nothing of the norm has been computed."""
        return self.normed is None

    def residual(self) -> Tensor:
        """x, [tokens, hidden]; with several ranks only the rows that this one has to add to are valid."""
        return self.x

    def normalised(self) -> Tensor:
        """norm(x), [tokens, hidden]."""
        return self.norm(self.x) if self.normed is None else self.normed

    def add(self, y: Tensor, next_norm: RMSNorm) -> "Stream":
        """The stream plus y, this rank's share of a sum over the ranks, in front of the next norm."""
        normed, total = next_norm(y, self.residual())
        return Stream(total, next_norm, normed)
