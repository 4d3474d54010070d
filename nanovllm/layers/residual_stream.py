"""The residual stream between two layers, and how far the norm behind it has been computed.

RMSNorm needs whole rows, and who multiplies next knows best when to normalise them: a product of a few rows
does it itself, a product of some hundred rows leaves half of it to the next, the library's wants it done, and
a product in 8 bits wants its input quantised besides. Models pass a `Stream` on and never ask.
"""

from dataclasses import dataclass

from torch import Tensor

from nanovllm.kernels.fp8_linear import QuantisedRows, Unscaled, add_rms_norm_quantise, quantise
from nanovllm.layers.layernorm import RMSNorm


@dataclass
class Stream:
    """
    `x` in front of `norm`. Without `scaled` nothing of the norm is computed yet. `scaled` alone is norm(x);
    with `squares` it is x * norm.weight, still to be divided by the root mean square of x's rows. If there is
    something to be added to x, that is done together with the norm.
    """

    x: Tensor  # [tokens, hidden]; with several ranks only the share that this one has to add to
    norm: RMSNorm
    scaled: Tensor | None = None  # [tokens, hidden]
    squares: Tensor | None = None  # float32 [tokens, parts]: their sums are those of the squares of x's rows
    added: Tensor | Unscaled | None = None  # as x, or, with one rank, parts of a sum [tokens, parts, hidden]

    @property
    def is_untouched(self) -> bool:
        return self.scaled is None and self.added is None

    def normalised(self) -> Tensor:
        """norm(x), [tokens, hidden]."""
        if self.added is not None and self.norm.group.size > 1:
            self.scaled, self.x = self.norm(self.added, self.x)
            self.added = None
        elif self.added is not None:
            self._normalise(None, keep=True)
        return self.norm(self.x) if self.scaled is None or self.squares is not None else self.scaled

    def quantised(self, group: int, keep: bool = False) -> QuantisedRows:
        """
        norm(x) with a scale for so many of its numbers, or, if that is 0, for each row. `keep` says that
        `normalised` will be asked for, too.
        """
        if self.scaled is not None or self.norm.group.size > 1:
            return quantise(self.normalised(), group)
        return self._normalise(group, keep)

    def _normalise(self, group: int | None, keep: bool) -> QuantisedRows | None:
        """On one rank: what is to be added, the norm, and unless group is None the codes, by one kernel."""
        x, residual = (self.x, None) if self.added is None else (self.added, self.x)
        norm = self.norm.weight, self.norm.eps
        rows, self.x, self.scaled = add_rms_norm_quantise(x, residual, *norm, group, keep)
        self.added = None
        return rows
